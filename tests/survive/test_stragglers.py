"""Who is slow is told by figures that differ, three times in a row; never by a figure that everybody has, or that
stands still.
"""

import re

import pytest

from meshtrain.survive.heartbeat import HOST
from meshtrain.survive.records import Node, Rank, RestartPlan
from meshtrain.survive.stragglers import SPAN, TIMES, Stragglers, judge

PLAN = RestartPlan(
    2,
    1,
    "running",
    "n0",
    0.0,
    "start",
    "",
    members=["n0", "n1", "n2"],
    incarnations=["i"] * 3,
)


def spent(share: float, seconds: float, phase: str = "data") -> dict[str, float]:
    return {phase: share * seconds, "wait": (1 - share) * seconds}


def nodes(
    look: int,
    shares=(None,) * 3,
    products=(None,) * 3,
    span: float = SPAN,
    phase: str = "data",
) -> list[Node]:
    """At look number `look`: of each, the share of its steps in which it waited for nobody."""
    matmul = [
        None if p is None else {"seconds": p, "bits": 0, "times": look}
        for p in products
    ]
    phases = [
        None if share is None else spent(share, look * 1.01 * span, phase)
        for share in shares
    ]
    ranks = [
        Rank(k, 9, step=look, pace=1.0, phases=phases[k], matmul=matmul[k])
        for k in range(3)
    ]
    return [
        Node(f"n{k}", "i", f"h{k}", generation=1, state="running", rank=rank)
        for k, rank in enumerate(ranks)
    ]


def told(looks, plan: RestartPlan = PLAN) -> list[tuple[str, float]]:
    stragglers = Stragglers(plan.generation)
    return [
        (node, score)
        for look in looks
        for node, score, _ in stragglers.look(look, plan)
    ]


def test_the_rank_that_waits_least_is_told_once():
    looks = [nodes(look, shares=(0.1, 0.5, 0.1)) for look in range(10)]
    assert told(looks) == [("n1", 0.6)]
    # The first look has nothing before it.
    assert told(looks[:TIMES]) == []
    seen = Stragglers(1)
    (_, _, sentence) = next(found for look in looks for found in seen.look(look, PLAN))
    assert re.match(r"rank 1 on n1 \(h1\) is slow: 50% .*\(elsewhere 10%\)", sentence)


def test_the_rank_whose_device_is_slower_is_told():
    assert told([nodes(look, products=(0.010, 0.010, 0.020)) for look in range(4)]) == [
        ("n2", 0.5)
    ]


@pytest.mark.parametrize(
    "looks",
    [
        [nodes(look, shares=(0.5, 0.5, 0.5)) for look in range(9)],  # all alike
        # A quarter slower is not
        [nodes(look, shares=(0.1, 0.34, 0.1)) for look in range(9)],
        [nodes(5, shares=(0.1, 0.5, 0.1))] * 9,  # one figure, seen nine times
        [
            nodes(look, shares=(0.1, 0.5, 0.1), span=SPAN / 9) for look in range(27)
        ],  # not for long enough
        # Nobody to compare with
        [nodes(look, shares=(None, 0.5, None)) for look in range(9)],
        [
            nodes(look, shares=(0.0, 0.0, 0.0), products=(0.0, 0.0, 0.0), span=0.0)
            for look in range(9)
        ],
    ],
)
def test_what_tells_nothing(looks):
    assert told(looks) == []


def test_one_slow_look_now_and_then_is_not_told():
    assert SPAN < 4
    looks, phases = [], [{"data": 0.0, "wait": 0.0} for _ in range(3)]
    for look in range(30):
        for rank, sums in enumerate(phases):
            share = 0.6 if rank == 1 and look % TIMES else 0.1
            sums["data"], sums["wait"] = (
                sums["data"] + share * 4,
                sums["wait"] + (1 - share) * 4,
            )
        ranks = [
            Rank(k, 9, step=look, phases=dict(sums)) for k, sums in enumerate(phases)
        ]
        looks.append(
            [
                Node(f"n{k}", "i", generation=1, rank=rank)
                for k, rank in enumerate(ranks)
            ]
        )
    assert told(looks) == []


def test_who_takes_no_part_is_not_compared():
    def with_spare(look: int) -> list[Node]:
        return [
            *nodes(look, shares=(0.1, 0.1, None))[:2],
            Node(
                "n9", "i", generation=1, rank=Rank(0, 9, phases=spent(0.9, look * SPAN))
            ),
        ]

    assert told(map(with_spare, range(9))) == []
    old = [
        Node(n.name, "i", n.host, generation=0, rank=n.rank)
        for n in nodes(1, shares=(0.1, 0.9, 0.1))
    ]
    assert told([old] * 9) == []


# What `tests/survive/test_training_processes.py` read of two ranks in 15 s, on two cores that 14 processes wanted: at
# first neither was disturbed, then the second was stopped for 0.4 of each 0.5 s.
LOADED = (
    {
        "data": 0.0894,
        "dispatch": 0.0042,
        "log": 0.0257,
        "stopped": 0.0102,
        "queued": 0.4867,
        "wait": 14.4529,
    },
    {
        "data": 0.083,
        "dispatch": 0.0028,
        "log": 0.0192,
        "stopped": 0.013,
        "queued": 0.2672,
        "wait": 14.6792,
    },
)
STOPPED = (
    {
        "data": 0.0192,
        "dispatch": 0.0008,
        "log": 0.0095,
        "stopped": 0.0016,
        "queued": 0.2984,
        "wait": 14.8976,
    },
    {
        "data": 0.0218,
        "dispatch": 0.0009,
        "log": 0.0078,
        "stopped": 11.1608,
        "queued": 0.199,
        "wait": 3.8406,
    },
)


def test_a_rank_that_is_stopped_now_and_then_is_slow_and_why_is_told():
    first, second = judge(dict(enumerate(STOPPED))).values()
    assert second.is_slow and not first.is_slow
    assert "not run: stopped, frozen or throttled" in second.words()


def test_ranks_on_cores_that_all_want_are_not_slow():
    assert not any(pace.is_slow for pace in judge(dict(enumerate(LOADED))).values())


@pytest.mark.parametrize("phase", HOST)
def test_the_phase_in_which_it_is_longest_is_named(phase):
    usual = dict.fromkeys(HOST, 0.02) | {"wait": 1 - 0.02 * len(HOST)}
    assert judge({0: usual, 1: usual | {phase: 0.6, "wait": 0.3}})[1].phase == phase
