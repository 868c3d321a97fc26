"""Weights are rounded to float8 once a step, whatever the number of microbatches, and the numbers are those of weights
that are rounded wherever they are multiplied.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from short_runs import OF_SIXTEENS as MODEL
from short_runs import canonical_numbers, place, token_batches

from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.model.float8 import E4M3
from meshtrain.parallel.float8_storage import Float8Storage
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.step import Program

ATTENTION = 32 * 64 * 2 + 32 * 32 * 2
OF_LAYER = ATTENTION + 3 * 32 * 64
EXPERTS = {name: n for name, n in MODEL.items() if name != "d_ff"} | {
    "moe": {"experts": 4, "top_k": 2, "d_ff": 32}
}
CELLS = {
    "one device": (MODEL, {}, {}),
    "ZeRO-1": (MODEL, {"data": 2}, {"zero_stage": 1}),
    "ZeRO-2": (MODEL, {"data": 2}, {"zero_stage": 2}),
    "ZeRO-3": (MODEL, {"data": 2}, {"zero_stage": 3}),
    "ZeRO-3 held": (
        MODEL,
        {"data": 2},
        {"zero_stage": 3, "zero_hold": True, "remat": "full"},
    ),
    "pipeline": (MODEL, {"data": 2, "pipeline": 2}, {"schedule": "1f1b"}),
    "zero bubble": (MODEL, {"pipeline": 2}, {"schedule": "zb_h1"}),
    "chunks": (
        MODEL | {"layers": 12},
        {"data": 2, "pipeline": 2},
        {"schedule": "interleaved", "virtual_stages": 2},
    ),
    "tensor": (MODEL, {"data": 2, "tensor": 2}, {"sequence_parallel": True}),
    "experts": (EXPERTS, {"data": 2}, {}),
}
QUICK = ("chunks",)


def cells(*names, quick=()):
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.thorough)
        for name in names
    ]


def program_of(cell, microbatches=4, rows=8, **precision):
    model, mesh, parallel = CELLS[cell]
    config = load(
        {
            "model": model,
            "mesh": mesh,
            "parallel": {"microbatches": microbatches, **parallel},
            "precision": {"matmul": "float8", **precision},
            "train": {"global_batch_size": rows, "sequence_length": 16},
        }
    )
    return Program(config, make_mesh(config))


def arguments(program):
    params = place(program.layout, canonical_numbers(program.layout))
    tokens, labels = token_batches(program.config, 1)[0]
    batch = program.place({"tokens": tokens, "labels": labels})
    return params, batch, jnp.int32(0), jnp.float32(1)


def conversions(jaxpr):
    """Returns the numbers that a program makes e4m3 of, each time in each turn of its loops."""
    total = 0
    for eqn in jaxpr.eqns:
        if (
            eqn.primitive.name == "convert_element_type"
            and eqn.params["new_dtype"] == E4M3
        ):
            total += eqn.invars[0].aval.size
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += turns * sum(map(conversions, jaxprs_in_params(eqn.params)))
    return total


def rounded_weights(cell, microbatches, **precision):
    """Returns how many numbers of weights a device rounds in a step: what does not grow with the rows."""
    by_rows = []
    for rows in (16, 32):
        program = program_of(cell, microbatches, rows, **precision)
        made = jax.make_jaxpr(program.gradients)(*arguments(program))
        by_rows.append(conversions(made.jaxpr))
    return 2 * by_rows[0] - by_rows[1]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize(
    "cell",
    cells("ZeRO-1", "ZeRO-2", "pipeline", "zero bubble", "chunks", quick=("ZeRO-1",)),
)
def test_each_weight_is_rounded_once_whatever_the_number_of_microbatches(cell, recipe):
    # The backward sums over other groups, or the same
    turns = 2 if recipe == "rowwise" else 1
    model, mesh, _ = CELLS[cell]
    layers = model["layers"] // mesh.get("pipeline", 1)
    for microbatches in (4, 8):
        found = rounded_weights(cell, microbatches, float8_recipe=recipe)
        # shards are rounded for the forward, and gathered as bytes, but where all layers are gathered as they are
        ranks = 1 if cell == "pipeline" else mesh.get("data", 1)
        assert found == layers * OF_LAYER * (turns - 1 + 1 / ranks)


@pytest.mark.thorough
def test_with_zero_3_shards_are_rounded_once_and_gathered_as_bytes():
    for microbatches in (4, 8):
        found = rounded_weights("ZeRO-3", microbatches, float8_skip=[0, 0])
        assert found == 2 * 4 * OF_LAYER / 2


def gradients(program):
    loss, grads = jax.jit(program.gradients)(*arguments(program))
    return float(loss), [np.asarray(g) for g in jax.tree.leaves(grads)]


@pytest.mark.parametrize("cell", cells(*CELLS, quick=QUICK))
@pytest.mark.parametrize("overlaps", [False, True])
def test_numbers_are_those_of_weights_rounded_where_they_are_multiplied(
    cell, overlaps, monkeypatch
):
    """`overlaps`: by the step of accelerators, on CPU."""
    found = []
    for once in (True, False):
        if not once:
            monkeypatch.setattr(Float8Storage, "round_once", lambda *_: None)
        program = program_of(cell)
        if overlaps:
            program.local = LocalStep(program.layout, "accelerator", program.hooks)
        found.append(gradients(program))
    (loss, mine), (expected, theirs) = found
    assert loss == expected
    for here, there in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(here, there)
