"""Placements worked out by hand, on 4 nodes of 4 devices, two nodes to a block of links."""

import pytest

from meshtrain.plan.jobs.listed import Job
from meshtrain.plan.jobs.rules import RULES, Blocks, blocks_of
from meshtrain.plan.jobs.ways import Way


@pytest.fixture
def nodes(cluster, packer):
    """A function (rule, devices of each job) -> the nodes of each, after one another."""

    def placed(rule: str, *devices: int) -> list[list[int]]:
        jobs = [Job(name=f"job-{i}", devices=n) for i, n in enumerate(devices)]
        made = packer(cluster(4, 4, 2), *jobs)
        packing = made.pack(made.usual(rule))
        assert len(packing.placed) == len(devices)
        return [list(found.by_node(4)) for found in packing.placed]

    return placed


@pytest.mark.parametrize(
    "rule, expected",
    [
        # 1 goes beside 2 on the first node that has room; the last 2 find one device there, and one on the next.
        ("first_fit", [[0], [1], [0], [2]]),
        # 1 fills up the node that 3 left one device of, and the last 2 the node of the first.
        ("best_fit", [[0], [1], [1], [0]]),
        ("balance", [[0], [1], [2], [3]]),
    ],
)
def test_jobs_of_one_node(nodes, rule, expected):
    assert nodes(rule, 2, 3, 1, 2) == expected


@pytest.mark.parametrize(
    "rule, expected",
    [
        # The first nodes that are free, which lie in two blocks.
        ("first_fit", [[0], [1, 2]]),
        # The block that is left with least: the other has only one node.
        ("best_fit", [[0], [2, 3]]),
        ("balance", [[0], [1, 2]]),
    ],
)
def test_jobs_of_two_nodes(nodes, rule, expected):
    assert nodes(rule, 1, 8) == expected


def test_best_fit_takes_the_block_that_is_left_with_least(nodes):
    # Both blocks have two nodes with 2 free devices; the first has 2 + 4, the second 2 + 2.
    free, blocks = [2, 4, 2, 2], blocks_of_two()
    assert RULES["best_fit"](Way(2, 2), free, blocks, False) == [2, 3]
    assert RULES["first_fit"](Way(2, 2), free, blocks, False) == [0, 1]
    assert RULES["balance"](Way(2, 2), free, blocks, False) == [0, 1]


def blocks_of_two() -> Blocks:
    return Blocks(((range(2), range(2, 4)), (range(4),)))


@pytest.mark.parametrize("rule", RULES)
def test_together_is_within_one_block_or_not_at_all(rule):
    blocks, way = blocks_of_two(), Way(2, 4)
    assert RULES[rule](way, [3, 4, 4, 4], blocks, True) == [2, 3]
    assert RULES[rule](way, [3, 4, 4, 3], blocks, True) is None
    assert RULES[rule](way, [3, 4, 4, 3], blocks, False) == [1, 2]


def test_balance_takes_the_emptiest_block():
    blocks = blocks_of_two()
    assert RULES["balance"](Way(2, 3), [3, 4, 4, 4], blocks, True) == [2, 3]
    assert RULES["balance"](Way(2, 3), [4, 4, 4, 3], blocks, True) == [0, 1]


def test_blocks_are_those_of_the_links(cluster):
    assert blocks_of(cluster(4, 4, 2)) == blocks_of_two()
    assert blocks_of(cluster(5, 4, 2)).lowest == (range(2), range(2, 4), range(4, 5))
    assert blocks_of(cluster(3, 4, 3)).levels == ((range(3),),)
