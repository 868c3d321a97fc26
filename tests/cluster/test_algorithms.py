import math

import pytest

from meshtrain.cluster.algorithms import (
    ALGORITHMS,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    all_of,
    best,
    sent,
)
from meshtrain.cluster.topology import Group, Hop

ALPHA, RATE = 1e-5, 1e9


def flat(n, topology="fat_tree"):
    return Group(n, (Hop("node", n, ALPHA, RATE, 1),), topology)


def two_levels(inside, nodes):
    return Group(
        inside * nodes,
        (
            Hop("node", inside, ALPHA, 10 * RATE, 1),
            Hop("rail", nodes, ALPHA, RATE, inside),
        ),
    )


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_formulas_are_those_of_the_papers(n):
    nbytes, k = 1e8, math.log2(n)
    assert ALGORITHMS["ring"](ALL_REDUCE, flat(n), nbytes) == pytest.approx(
        2 * (n - 1) * ALPHA + 2 * (n - 1) / n * nbytes / RATE
    )
    assert ALGORITHMS["butterfly"](ALL_REDUCE, flat(n), nbytes) == pytest.approx(
        2 * k * ALPHA + 2 * (n - 1) / n * nbytes / RATE
    )
    assert ALGORITHMS["tree"](ALL_REDUCE, flat(n), nbytes) == pytest.approx(
        2 * k * ALPHA + 2 * nbytes / RATE
    )


@pytest.mark.parametrize("n", [3, 6, 12, 100])
def test_a_butterfly_of_other_than_a_power_of_two_folds_what_is_beyond(n):
    """Thakur et al. 2005, section 4.5: a message of all before and one after, and between them the power of two
    below.
    """
    nbytes, k = 1e8, n.bit_length() - 1
    share = (2**k - 1) / 2**k
    assert ALGORITHMS["butterfly"](ALL_REDUCE, flat(n), nbytes) == pytest.approx(
        (2 * k + 2) * ALPHA + (2 * share + 2) * nbytes / RATE
    )


def test_on_a_torus_an_edge_of_each_level_of_a_tree_shares_a_wire():
    few, many = (
        ALGORITHMS["tree"](ALL_REDUCE, flat(64, "torus"), nbytes) for nbytes in (0, 1e8)
    )
    assert many - few == pytest.approx(2 * 6 * 1e8 / RATE)
    assert few == ALGORITHMS["tree"](ALL_REDUCE, flat(64), 0)


def test_halves_make_a_whole():
    for name in ("ring", "butterfly"):
        for n in (8, 12):
            half = ALGORITHMS[name](ALL_GATHER, flat(n), 1e6) + ALGORITHMS[name](
                REDUCE_SCATTER, flat(n), 1e6
            )
            assert half == pytest.approx(ALGORITHMS[name](ALL_REDUCE, flat(n), 1e6))


def test_few_bytes_take_few_steps_and_many_bytes_take_little_traffic():
    assert (
        best(ALL_REDUCE, flat(48), 1e3).algorithm == "tree"
    )  # 48 is no power of two, where butterfly pays extra
    assert best(ALL_REDUCE, flat(48), 1e10).algorithm == "ring"
    assert best(ALL_REDUCE, flat(64), 1e3).algorithm == "butterfly"


def test_a_torus_prefers_neighbours():
    assert best(ALL_GATHER, flat(64, "torus"), 1e10).algorithm == "ring"


def test_hierarchical_sends_only_a_share_between_nodes():
    group, nbytes = two_levels(8, 16), 1e9
    inside = 2 * (min(7, 6) * ALPHA + 7 / 8 * nbytes / (10 * RATE))
    between = 2 * (min(15, 8) * ALPHA + 15 / 16 * nbytes / 8 / RATE)
    assert ALGORITHMS["hierarchical"](ALL_REDUCE, group, nbytes) == pytest.approx(
        inside + between
    )
    assert best(ALL_REDUCE, group, 1e5).seconds < ALGORITHMS["ring"](
        ALL_REDUCE, group, 1e5
    )


def test_the_best_is_the_cheapest_of_all():
    for nbytes in (1, 1e4, 1e8):
        for group in (flat(5), two_levels(8, 3)):
            assert best(ALL_REDUCE, group, nbytes).seconds == min(
                all_of(ALL_REDUCE, group, nbytes).values()
            )


def test_an_all_to_all_passes_each_part_over_the_levels_between_the_two_and_shares_no_way_out():
    nbytes = 1e9
    assert best(ALL_TO_ALL, flat(8), nbytes).seconds == pytest.approx(
        7 * ALPHA + 7 / 8 * nbytes / RATE
    )
    # Of 16 devices in two nodes 7 are near, and 8 beyond a link that is ten times as slow.
    near, far = (
        7 * ALPHA + 7 / 16 * nbytes / (10 * RATE),
        8 * ALPHA + 8 / 16 * nbytes / RATE,
    )
    assert best(ALL_TO_ALL, two_levels(8, 2), nbytes).seconds == pytest.approx(
        near + far
    )
    # A ring leaves each node once for all its members.
    assert ALGORITHMS["ring"](REDUCE_SCATTER, two_levels(8, 2), nbytes) < far
    assert (
        best(ALL_TO_ALL, flat(64, "torus"), nbytes).seconds
        > 7 * best(ALL_TO_ALL, flat(64), nbytes).seconds
    )


def test_one_device_sends_nothing():
    assert best(ALL_REDUCE, Group(1, ()), 1e9).seconds == 0
    assert sent(ALL_REDUCE, 1, 1e9) == 0


def test_a_message_goes_at_the_speed_of_the_slowest_link_it_may_cross():
    assert best(PERMUTE, two_levels(8, 2), 1e9).seconds == pytest.approx(ALPHA + 1)


def test_bytes_sent_by_one_device():
    assert sent(ALL_REDUCE, 4, 100) == 150
    assert sent(ALL_GATHER, 4, 100) == sent(REDUCE_SCATTER, 4, 100) == 75
    assert sent(PERMUTE, 4, 100) == 100
