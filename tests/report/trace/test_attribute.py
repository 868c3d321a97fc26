"""The wall is shared without a rest, whatever runs at once."""

import random

import pytest

from meshtrain.report.trace.attribute import share


def test_one_that_runs_alone_has_the_time_and_two_at_once_half_each():
    found, outside, gaps = share([(0, 6, 0, "a"), (4, 8, 0, "b")], (0, 10))
    assert found == {"a": 5, "b": 3} and outside == 2 and gaps == 0


def test_the_second_rank_counts_only_where_nothing_of_the_first_runs():
    found, _, gaps = share([(0, 4, 0, "a"), (2, 8, 1, "waits"), (9, 10, 0, "a")], (0, 10))
    assert found == {"a": 5, "waits": 4} and gaps == 1


def test_what_lies_outside_the_window_is_cut_off():
    assert share([(-5, 3, 0, "a"), (8, 20, 0, "b"), (30, 40, 0, "c")], (0, 10)) == ({"a": 3, "b": 2}, 0, 5)


def test_where_nothing_runs_all_is_outside():
    assert share([], (2, 10)) == ({}, 8, 0)


def test_shares_sum_to_the_wall():
    draw = random.Random(0)
    spans = [
        (a, a + draw.uniform(0, 3), draw.randrange(3), draw.choice("abcd"))
        for a in (draw.uniform(-2, 12) for _ in range(200))
    ]
    found, outside, gaps = share(spans, (0, 10))
    assert sum(found.values()) + outside + gaps == pytest.approx(10)
    # nothing more than all that had its name
    for key in "abcd":
        assert found[key] <= sum(max(0, min(b, 10) - max(a, 0)) for a, b, _, k in spans if k == key)
