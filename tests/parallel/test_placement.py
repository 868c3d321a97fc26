"""Where weights lie, in numbers: what splits which axis, and what each device holds of it."""

import math

import pytest

from meshtrain.config import load
from meshtrain.parallel.placement import all_placed, notes, splits


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"kv_heads": ("tensor",), "vocab": ("pipeline", "tensor")}),
        (
            {"parallel": {"vocab": "edge"}},
            {"kv_heads": ("tensor",), "vocab": ("tensor",)},
        ),
        (
            {"model": {"heads": 8, "kv_heads": 2}, "mesh": {"tensor": 4}},
            {"kv_heads": ()},
        ),
    ],
)
def test_named_dimensions_lie_on_the_axes_that_divide_them(sections, expected):
    config = load(sections)
    table = splits(config.model, config.mesh, config.parallel.vocab)
    assert {name: table[name] for name in expected} == expected
    assert (table["layers"], table["heads"], table["mlp"]) == (
        ("pipeline",),
        ("tensor",),
        ("tensor",),
    )


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"mesh": {"tensor": 2}, "model": {"kv_heads": 3}},
            ["kv_heads 3", "mesh.tensor 2", "every tensor rank"],
        ),
        (
            {"mesh": {"tensor": 2}, "model": {"d_ff": 97}},
            ["d_ff 97", "padded to 98", "1.0%"],
        ),
        (
            {"mesh": {"tensor": 2}, "model": {"vocab_size": 301}},
            ["vocab_size 301", "padded to 302", "0.3%"],
        ),
        (
            {
                "mesh": {"pipeline": 4},
                "parallel": {"microbatches": 4},
                "model": {"layers": 5},
            },
            ["layers 5", "4 stages", "the longest has 2", "38%"],
        ),
    ],
)
def test_what_a_mesh_pads_is_noted_with_its_price(sections, says):
    model = {"layers": 4, "d_model": 48, "heads": 6, "d_ff": 96, "vocab_size": 264}
    (note,) = notes(load({**sections, "model": {**model, **sections.get("model", {})}}))
    assert all(part in note for part in says), note
    assert note.endswith(".") and "\n" not in note


def test_experts_lie_over_tensor_too_where_parts_of_sequences_are_sent_to_them():
    def over(*overrides):
        config = load(
            {
                "model": {"moe": {"experts": 8, "d_ff": 32}},
                "mesh": {"data": 4, "expert": 2, "tensor": 2},
            },
            overrides,
        )
        gate = next(
            weight
            for weight in all_placed(config)
            if weight.name == "blocks.experts.gate"
        )
        return gate.over, math.prod(gate.shape) // gate.on_device()

    parts = "parallel.sequence_parallel=true"
    gathered, swapped = (
        f"parallel.experts.dispatch={x}" for x in ("all_gather", "all_to_all")
    )
    by_columns = ((("pipeline",), ("expert",), (), ("tensor",)), 4)
    assert over() == over(parts, gathered) == over(swapped) == by_columns
    by_experts = over(parts, swapped)
    assert by_experts == ((("pipeline",), ("expert", "tensor"), (), ()), 4)
    # all_to_all sends 3 / 4 x 1.25 of the rows that all_gather does
    assert over(parts) == by_experts
    # 6 experts do not divide over 4 ranks
    assert over(parts, swapped, "model.moe.experts=6") == by_columns
