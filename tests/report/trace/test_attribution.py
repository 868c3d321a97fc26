"""The kinds stand once, beside the planner's, and the wall is shared among them without a rest, whatever runs at
once.
"""

import dataclasses
import random
from collections import Counter

import pytest

from meshtrain.plan.seconds import StepTime
from meshtrain.report.trace.attribute import share
from meshtrain.report.trace.attribution import (
    COLLECTIVES,
    KINDS,
    MEANING,
    PARTS,
    Attribution,
    axis_kind,
    planned,
)

TOLD = Attribution(
    "cpu",
    8,
    3,
    0.5,
    {"forward": 0.1, "tensor": 0.2, "idle": 0.05, "unknown": 0.05, "masked": 0.1},
    waiting={"tensor": 0.1},
    collectives=Counter({("all-reduce", "data+tensor"): 1.5}),
    cannot_tell=["Something."],
)


def test_every_kind_has_a_meaning_and_is_in_one_part():
    assert set(MEANING) == set(KINDS)
    assert sorted(kind for kinds, _ in PARTS.values() for kind in kinds) == sorted(
        KINDS
    )


def test_every_second_of_the_planner_is_in_one_part():
    fields = [field.name for field in dataclasses.fields(StepTime)]
    assert sorted(name for _, names in PARTS.values() for name in names) == sorted(
        fields
    )
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


def test_one_that_runs_alone_has_the_time_and_two_at_once_half_each():
    found, outside, gaps = share([(0, 6, 0, "a"), (4, 8, 0, "b")], (0, 10))
    assert found == {"a": 5, "b": 3} and outside == 2 and gaps == 0


def test_the_second_rank_counts_only_where_nothing_of_the_first_runs():
    found, _, gaps = share(
        [(0, 4, 0, "a"), (2, 8, 1, "waits"), (9, 10, 0, "a")], (0, 10)
    )
    assert found == {"a": 5, "waits": 4} and gaps == 1


def test_what_lies_outside_the_window_is_cut_off():
    assert share([(-5, 3, 0, "a"), (8, 20, 0, "b"), (30, 40, 0, "c")], (0, 10)) == (
        {"a": 3, "b": 2},
        0,
        5,
    )


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
        assert found[key] <= sum(
            max(0, min(b, 10) - max(a, 0)) for a, b, _, k in spans if k == key
        )
