"""Who is slow is told by figures that differ, three times in a row; never by a figure that everybody has, or that stands still."""

import random

import pytest

from meshtrain.survive.records import Node, Plan, Rank
from meshtrain.survive.stragglers import SLOW, TIMES, Stragglers

PLAN = Plan(2, 1, "running", "n0", 0.0, "start", "", members=["n0", "n1", "n2"], incarnations=["i"] * 3)


def nodes(step: int, hosts=(None,) * 3, products=(None,) * 3, pace: float | None = 1.0) -> list[Node]:
    matmul = [None if p is None else {"seconds": p, "bits": 0, "times": step} for p in products]
    ranks = [Rank(k, 9, step=step, pace=pace, host=hosts[k], matmul=matmul[k]) for k in range(3)]
    return [Node(f"n{k}", "i", f"h{k}", generation=1, state="running", rank=rank) for k, rank in enumerate(ranks)]


def told(looks, plan: Plan = PLAN) -> list[tuple[str, float]]:
    stragglers = Stragglers()
    return [(node, score) for look in looks for node, score, _ in stragglers.look(look, plan)]


def test_the_rank_whose_host_takes_longer_is_told_once():
    looks = [nodes(step, hosts=(0.1, 0.5, 0.1)) for step in range(10)]
    assert told(looks) == [("n1", 0.6)]
    assert told(looks[: TIMES - 1]) == []
    seen = Stragglers()
    (_, _, sentence) = next(found for look in looks for found in seen.look(look, PLAN))
    assert sentence.startswith("rank 1 on n1 (h1) is slow: 0.400 of the 1.000 s of a step")


def test_the_rank_whose_device_is_slower_is_told():
    assert told([nodes(step, products=(0.010, 0.010, 0.020)) for step in range(4)]) == [("n2", 0.5)]


@pytest.mark.parametrize(
    "looks",
    [
        [nodes(step, hosts=(0.5, 0.5, 0.5)) for step in range(9)],  # all alike
        [nodes(step, hosts=(0.1, 0.34, 0.1)) for step in range(9)],  # a quarter slower is not
        [nodes(5, hosts=(0.1, 0.5, 0.1))] * 9,  # one figure, seen nine times
        [nodes(step, hosts=(0.1, 0.5 if step % TIMES else 0.1, 0.1)) for step in range(9)],  # not in a row
        [nodes(step, hosts=(None, 0.5, None)) for step in range(9)],  # nobody to compare with
        [nodes(step, hosts=(0.1, 0.5, 0.1), pace=None) for step in range(9)],
        [nodes(step, hosts=(0.0, 0.0, 0.0), products=(0.0, 0.0, 0.0), pace=0.0) for step in range(9)],
    ],
)
def test_what_tells_nothing(looks):
    assert told(looks) == []


def test_who_takes_no_part_is_not_compared():
    spare = [*nodes(1)[:2], Node("n9", "i", generation=1, rank=Rank(0, 9, step=3, pace=1.0, host=0.9))]
    assert told([spare] * 9) == []
    old = [Node(n.name, "i", n.host, generation=0, rank=n.rank) for n in nodes(1, hosts=(0.1, 0.9, 0.1))]
    assert told([old] * 9) == []


def test_with_even_noise_nobody_is_told():
    dice = random.Random(0)
    most = (1 - SLOW) * 0.9
    looks = [nodes(step, hosts=[0.3 + dice.random() * most for _ in range(3)]) for step in range(500)]
    assert told(looks) == []
