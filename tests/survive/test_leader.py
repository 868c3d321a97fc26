"""What a leader says besides what it decides."""

import dataclasses

from meshtrain.survive.leader import cleared
from meshtrain.survive.records import Node, Rank, RestartPlan

PLAN = RestartPlan(
    3,
    2,
    "running",
    "n0",
    1.0,
    "numbers",
    "",
    members=["n1", "n0"],
    incarnations=["b", "a"],
    step=12,
)


def nodes(*steps: int, generation: int = 2) -> list[Node]:
    return [
        Node(f"n{k}", generation=generation, rank=Rank(k, 9, step=step))
        for k, step in enumerate(steps)
    ]


def test_a_step_that_has_numbers_elsewhere_clears_the_data_once_all_have_passed_it():
    assert "step 12 has finite numbers now" in cleared(nodes(13, 14), PLAN)
    assert cleared(nodes(13, 12), PLAN) is None
    assert cleared(nodes(13), PLAN) is None
    assert cleared(nodes(13, 14, generation=1), PLAN) is None
    assert cleared(nodes(13, 14), dataclasses.replace(PLAN, kind="signal")) is None
