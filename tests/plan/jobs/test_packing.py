"""Which nodes each rule gives a job, what a packing is worth, and that no device is given twice, whatever the jobs."""

import random

import pytest

from meshtrain.plan.jobs.command import place
from meshtrain.plan.jobs.listed import Jobs, JobSpec
from meshtrain.plan.jobs.packing import RULES, Blocks, Packing, blocks_of
from meshtrain.plan.jobs.requests import JobShape
from meshtrain.plan.jobs.searched import STRATEGIES, Search, score, strategies


def names(packing: Packing) -> list[str]:
    return [placed.request.job.name for placed in packing.now]


def test_the_figures_of_a_packing_by_hand(cluster, packer):
    made = packer(
        cluster(4, 4, 2),
        *(JobSpec(name=f"job-{i}", devices=n) for i, n in enumerate((2, 3, 1, 2))),
    )
    packing = made.pack(made.usual("best_fit"))  # nodes 0 and 1 are full, 2 and 3 free
    assert packing.free == [0, 0, 4, 4]
    assert (packing.utilisation, packing.fragmentation, packing.balance) == (
        0.5,
        0.0,
        0.0,
    )
    packing = made.pack(
        made.usual("balance")
    )  # loads 2, 3, 1, 2: of 8 free devices 3 at most side by side
    assert packing.free == [2, 1, 3, 2]
    assert packing.fragmentation == pytest.approx(1 - 3 / 8)
    assert packing.balance == pytest.approx(1 - 0.5**0.5 / 2)


def test_an_empty_and_a_full_cluster(cluster, packer):
    empty = packer(cluster(2, 4, 2))
    packing = empty.pack(empty.usual("first_fit"))
    assert (packing.utilisation, packing.fragmentation, packing.balance) == (
        0.0,
        0.0,
        1.0,
    )
    full = packer(cluster(2, 4, 2), JobSpec(name="all", devices=8))
    packing = full.pack(full.usual("first_fit"))
    assert (packing.utilisation, packing.fragmentation, packing.balance) == (
        1.0,
        0.0,
        1.0,
    )


def test_the_search_finds_what_first_fit_and_best_fit_miss(cluster, packer):
    # 1 and 2 on the first node leave no room for the last 2; 1 + 3 and 2 + 2 fill both.
    made = packer(
        cluster(2, 4, 2),
        *(JobSpec(name=f"job-{i}", devices=n) for i, n in enumerate((1, 2, 3, 2))),
    )
    found = strategies(made, Jobs())
    busy = {name: packing.utilisation for name, packing in found.items()}
    assert busy == {"first_fit": 0.75, "best_fit": 0.75, "balance": 1.0, "search": 1.0}


def test_a_job_that_ends_makes_room_and_latency_puts_the_short_one_first(
    cluster, packer
):
    made = packer(
        cluster(1, 4, 1),
        JobSpec(name="long", devices=4, hours=10),
        JobSpec(name="short", devices=4, hours=1),
    )
    found = strategies(made, Jobs(goal="latency"))
    assert [(p.start, p.end) for p in found["first_fit"].placed] == [(0, 10), (10, 11)]
    assert found["first_fit"].mean_hours == 10.5 and found["search"].mean_hours == 6.0
    assert names(found["search"]) == ["short"] and found["search"].last_hours == 11


def test_one_without_room_does_not_hold_up_those_behind_it(cluster, packer):
    jobs = (
        JobSpec(name="most", devices=3, hours=2),
        JobSpec(name="all", devices=4, hours=1),
        JobSpec(name="one", devices=1, hours=5),
        JobSpec(name="for-ever", devices=1),
    )
    made = packer(cluster(1, 4, 1), *jobs)
    placed = made.pack(made.usual("first_fit")).placed
    # `one` is in at once; when `most` ends, three devices are free, which `all` cannot use, and `for-ever` has one of
    # them for good.
    assert [(p.request.job.name, p.start) for p in placed] == [
        ("most", 0),
        ("one", 0),
        ("for-ever", 2),
    ]
    assert made.pack(made.usual("first_fit")).mean_hours == float("inf")


def test_those_that_end_together_leave_together(cluster, packer):
    jobs = [
        JobSpec(name="one", devices=2, hours=1),
        JobSpec(name="two", devices=2, hours=1),
        JobSpec(name="all", devices=4),
        JobSpec(name="half", devices=2),
    ]
    made = packer(cluster(1, 4, 1), *jobs)
    placed = made.pack(made.usual("first_fit")).placed
    # Would `one` leave before `two`, `half` were in before `all`.
    assert [(p.request.job.name, p.start) for p in placed] == [
        ("one", 0),
        ("two", 0),
        ("all", 1),
    ]


def test_a_search_that_may_try_nothing_keeps_the_best_of_the_rules(cluster, packer):
    made = packer(
        cluster(2, 4, 2),
        *(JobSpec(name=f"job-{i}", devices=n) for i, n in enumerate((1, 2, 3, 2))),
    )
    search = Search(made, "utilisation", seed=0)
    search.most = 0
    assert (
        search.best([made.pack(made.usual(rule)) for rule in RULES]).rule == "balance"
    )


def test_throughput_prefers_the_faster_of_two(cluster, config):
    slow = JobSpec(name="slow", config=str(config), set=("model.layers=16",))
    fast = JobSpec(name="fast", config=str(config), set=("model.layers=4",))
    found = place(Jobs(goal="throughput", jobs=(slow, fast)), cluster(2, 4, 2)).packings
    assert names(found["first_fit"]) == ["slow"] and names(found["search"]) == ["fast"]
    assert found["search"].tokens_per_second > 2 * found["first_fit"].tokens_per_second


def test_a_higher_priority_goes_first(cluster, packer):
    jobs = JobSpec(name="low", devices=4), JobSpec(name="high", devices=1, priority=1)
    made = packer(cluster(1, 4, 1), *jobs)
    for packing in strategies(made, Jobs()).values():
        assert names(packing) == ["high"]


def test_any_of_several_numbers_takes_the_first_that_has_room(cluster, packer):
    jobs = JobSpec(name="half", devices=2), JobSpec(name="any", any_of=(4, 2, 1))
    made = packer(cluster(1, 4, 1), *jobs)
    for packing in strategies(made, Jobs()).values():
        assert packing.utilisation == 1.0
        assert sorted(p.shape.devices for p in packing.now) in ([2, 2], [4])


def some_jobs(seed: int) -> tuple[tuple[int, int, int], list[JobSpec]]:
    chance = random.Random(seed)
    nodes, per_node, block = chance.choice([(4, 4, 2), (6, 8, 3), (5, 4, 2), (3, 8, 3)])
    jobs = []
    for number in range(chance.randint(1, 12)):
        sizes = [*range(1, per_node + 1), *(per_node * k for k in range(2, block + 1))]
        jobs.append(
            JobSpec(
                name=f"job-{number}",
                devices=chance.choice(sizes),
                hours=chance.choice((0.0, 1.0, 2.5, 7.0)),
                together=chance.random() < 0.3,
                priority=chance.choice((0, 0, 3)) if seed % 2 else 0,
            )
        )
    return (nodes, per_node, block), jobs


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(24))
def test_no_device_is_given_twice_and_the_search_is_never_worse(cluster, packer, seed):
    shape, jobs = some_jobs(seed)
    made = packer(cluster(*shape), *jobs)
    goal = ("utilisation", "throughput", "latency")[seed % 3]
    found = strategies(made, Jobs(goal=goal, seed=seed))
    assert tuple(found) == STRATEGIES
    for packing in found.values():
        assert len(packing.placed) <= len(jobs)
        for i, one in enumerate(packing.placed):
            assert len(set(one.devices)) == one.shape.devices == one.request.job.devices
            assert all(0 <= device < packing.cluster.devices for device in one.devices)
            assert {len(there) for there in one.group_by_node(shape[1]).values()} == {
                one.shape.each
            }
            if one.request.job.together:
                assert (
                    len({node // shape[2] for node in one.group_by_node(shape[1])}) == 1
                )
            for other in packing.placed[:i]:
                at_once = one.start < other.end and other.start < one.end
                assert not (at_once and set(one.devices) & set(other.devices))
        assert score(found["search"], goal) >= score(packing, goal)
        if goal == "utilisation" and len({job.priority for job in jobs}) == 1:
            assert found["search"].utilisation >= packing.utilisation
    again = strategies(made, Jobs(goal=goal, seed=seed))
    assert [[p.devices for p in packing.placed] for packing in again.values()] == [
        [p.devices for p in packing.placed] for packing in found.values()
    ]


@pytest.mark.parametrize("seed", range(6))
def test_few_jobs_are_packed_as_well_as_can_be(cluster, packer, seed):
    chance = random.Random(seed)
    sizes = [chance.randint(1, 4) for _ in range(6)]
    made = packer(
        cluster(3, 4, 3),
        *(JobSpec(name=f"job-{i}", devices=n) for i, n in enumerate(sizes)),
    )
    assert strategies(made, Jobs())["search"].utilisation * 12 == pytest.approx(
        most_busy(sizes, (4, 4, 4))
    )


def most_busy(sizes: list[int], free: tuple[int, ...]) -> int:
    """By trying every node for every job, and leaving it out."""
    if not sizes:
        return 0
    first, *rest = sizes
    found = most_busy(rest, free)
    for node, left in enumerate(free):
        if left >= first:
            found = max(
                found,
                first
                + most_busy(rest, (*free[:node], left - first, *free[node + 1 :])),
            )
    return found


# Worked out by hand, on 4 nodes of 4 devices, two nodes to a block of links.
@pytest.fixture
def nodes(cluster, packer):
    """A function (rule, devices of each job) -> the nodes of each, after one another."""

    def placed(rule: str, *devices: int) -> list[list[int]]:
        jobs = [JobSpec(name=f"job-{i}", devices=n) for i, n in enumerate(devices)]
        made = packer(cluster(4, 4, 2), *jobs)
        packing = made.pack(made.usual(rule))
        assert len(packing.placed) == len(devices)
        return [list(found.group_by_node(4)) for found in packing.placed]

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
    assert RULES["best_fit"](JobShape(2, 2), free, blocks, False) == [2, 3]
    assert RULES["first_fit"](JobShape(2, 2), free, blocks, False) == [0, 1]
    assert RULES["balance"](JobShape(2, 2), free, blocks, False) == [0, 1]


def blocks_of_two() -> Blocks:
    return Blocks(((range(2), range(2, 4)), (range(4),)))


@pytest.mark.parametrize("rule", RULES)
def test_together_is_within_one_block_or_not_at_all(rule):
    blocks, shape = blocks_of_two(), JobShape(2, 4)
    assert RULES[rule](shape, [3, 4, 4, 4], blocks, True) == [2, 3]
    assert RULES[rule](shape, [3, 4, 4, 3], blocks, True) is None
    assert RULES[rule](shape, [3, 4, 4, 3], blocks, False) == [1, 2]


def test_balance_takes_the_emptiest_block():
    blocks = blocks_of_two()
    assert RULES["balance"](JobShape(2, 3), [3, 4, 4, 4], blocks, True) == [2, 3]
    assert RULES["balance"](JobShape(2, 3), [4, 4, 4, 3], blocks, True) == [0, 1]


def test_blocks_are_those_of_the_links(cluster):
    assert blocks_of(cluster(4, 4, 2)) == blocks_of_two()
    assert blocks_of(cluster(5, 4, 2)).lowest == (range(2), range(2, 4), range(4, 5))
    assert blocks_of(cluster(3, 4, 3)).levels == ((range(3),),)
