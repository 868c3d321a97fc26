"""The kinds stand once, beside the planner's."""

import dataclasses
from collections import Counter

import pytest

from meshtrain.plan.seconds import StepTime
from meshtrain.report.trace.attribution import COLLECTIVES, KINDS, MEANING, PARTS, Attribution, axis_kind, planned

TOLD = Attribution(
    "cpu", 8, 3, 0.5, {"forward": 0.1, "tensor": 0.2, "idle": 0.05, "unknown": 0.05, "masked": 0.1}, waiting={"tensor": 0.1},
    collectives=Counter({("all-reduce", "data+tensor"): 1.5}), cannot_tell=["Something."],
)  # fmt: skip


def test_every_kind_has_a_meaning_and_is_in_one_part():
    assert set(MEANING) == set(KINDS)
    assert sorted(kind for kinds, _ in PARTS.values() for kind in kinds) == sorted(KINDS)


def test_every_second_of_the_planner_is_in_one_part():
    fields = [field.name for field in dataclasses.fields(StepTime)]
    assert sorted(name for _, names in PARTS.values() for name in names) == sorted(fields)
    step = StepTime(*range(1, len(fields) + 1))
    assert sum(planned(dict(step.parts())).values()) == step.total


def test_what_crosses_islands_is_a_kind_of_its_own():
    assert axis_kind(("island",)) == axis_kind(("island", "data")) == "island"
    assert axis_kind(("data", "tensor")) == axis_kind(("data",)) == "data"
    assert PARTS["across islands"][0] == ("island",) and "island" in COLLECTIVES


def test_parts_sum_to_what_the_kinds_sum_to():
    assert sum(TOLD.parts.values()) == pytest.approx(sum(TOLD.seconds.values()))
    assert TOLD.parts["bubble"] == 0.1


def test_idle_and_unknown_seconds_are_not_attributed():
    assert TOLD.attributed == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        (("tensor",), "tensor"),
        (("tensor", "pipeline"), "pipeline"),
        (("data", "tensor", "pipeline"), "data"),
        (("unknown",), "unknown"),
    ],
)
def test_a_collective_along_several_axes_counts_with_the_outermost(axes, kind):
    assert axis_kind(axes) == kind
