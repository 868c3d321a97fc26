"""Which steps are of which kind, and which layers are sent when."""

import itertools

import pytest
from island_runs import settings

from meshtrain.config.reduce import SyncConfig
from meshtrain.parallel.sync import when


@pytest.mark.parametrize(
    ("every", "fragments", "start"), [(4, 1, 0), (6, 2, 3), (7, 3, 1), (5, 5, 2)]
)
def test_each_fragment_is_sent_once_an_interval_and_never_two_at_once(
    every, fragments, start
):
    sync = SyncConfig(every=every, fragments=fragments, start=start)
    sent = [when.due(sync, taken) for taken in range(start + 1, start + 1 + 3 * every)]
    assert all(when.due(sync, taken) is None for taken in range(start + 1))
    for first in (0, every, 2 * every):
        assert sorted(f for f in sent[first : first + every] if f is not None) == list(
            range(fragments)
        )
    assert sent[every - 1] == fragments - 1
    places = [taken for taken, f in enumerate(sent) if f is not None]
    assert {b - a for a, b in itertools.pairwise(places)} <= {
        every // fragments,
        -(-every // fragments),
    }


def test_what_was_sent_arrives_so_many_steps_later():
    sync = SyncConfig(every=6, fragments=2, start=3, delay=2)
    sent = {taken: f for taken in range(40) if (f := when.due(sync, taken)) is not None}
    arrived = {
        taken: f for taken in range(40) if (f := when.arrives(sync, taken)) is not None
    }
    assert sent[6] == 0 and sent[9] == 1
    assert arrived == {taken + 2: f for taken, f in sent.items() if taken + 2 < 40}


def test_the_first_steps_are_synchronous():
    assert [
        when.synchronous(SyncConfig(every=2, start=3), taken) for taken in range(5)
    ] == [True] * 3 + [False] * 2


def test_every_layer_is_in_one_fragment_and_neighbours_are_in_different_ones():
    config = settings(sync={"every": 4, "fragments": 2})
    found = [
        [when.has_layer(config, fragment, layer) for fragment in range(2)]
        for layer in range(5)
    ]
    assert found == [[True, False], [False, True]] * 2 + [[True, False]]
