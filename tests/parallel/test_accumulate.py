"""Gradients that are closed on the way are those of plain differentiation, and take the same bytes over data in more
pieces.

As on accelerators, where collectives travel beside compute; on CPU, where they would be waited for, they are closed at
the end.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import slow_but
from short_runs import canonical_numbers, loss_and_gradients, place, token_batches

from meshtrain.config import Config, load, replaced
from meshtrain.hlo import collectives
from meshtrain.mesh import make_mesh
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.parallel.placement import buckets
from meshtrain.step import Program

SIZES = {
    "layers": 5,
    "d_model": 24,
    "heads": 6,
    "kv_heads": 2,
    "d_ff": 50,
    "vocab_size": 257,
}
CELLS: dict[str, dict[str, Any]] = {
    "one microbatch, tied": {
        "model": {"family": "gpt2", "dropout": 0.2},
        "mesh": {"data": 4, "tensor": 2},
    },
    "three microbatches": {
        "mesh": {"data": 4},
        "parallel": {"microbatches": 3, "remat": "full"},
    },
    "ZeRO-3, held": {
        "mesh": {"data": 2, "tensor": 2},
        "parallel": {
            "microbatches": 2,
            "zero_stage": 3,
            "zero_hold": True,
            "sequence_parallel": True,
        },
    },
    "adapters": {
        "mesh": {"data": 4},
        "lora": {"rank": 3},
        "parallel": {"microbatches": 2},
    },
}


def config_of(cell: str) -> Config:
    given = CELLS[cell]
    given = {
        **given,
        "model": SIZES | given.get("model", {}),
        "train": {"global_batch_size": 24, "sequence_length": 16},
    }
    return load(given)


def program_of(config: Config, overlaps: bool) -> Program:
    program = Program(config, make_mesh(config))
    if overlaps:  # as `Forward` finds it where devices are not CPUs
        program.local = LocalStep(program.layout, "accelerator", program.hooks)
    return program


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cell",
    slow_but(CELLS, ["one microbatch, tied", "ZeRO-3, held", "three microbatches"]),
)
def test_gradients_closed_on_the_way_are_those_closed_at_the_end(cell):
    config = config_of(cell)
    (loss, right), (same, seen) = (
        loss_and_gradients(program_of(config, overlaps)) for overlaps in (False, True)
    )
    assert float(same) == pytest.approx(float(loss), rel=1e-6)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(right))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest),
        seen,
        right,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "pipeline"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_sums_are_the_gradients_to_bfloat16(stage, pipeline):
    parallel = {"microbatches": 4, "zero_stage": stage, "schedule": "1f1b"}
    config, found = config_of("three microbatches"), []
    config = replaced(config, mesh={"data": 2, "pipeline": pipeline}, parallel=parallel)
    tokens, labels = token_batches(config, 1)[0]
    for sums in ("float32", "bfloat16"):
        program = program_of(
            replaced(config, precision={"gradient_sums": sums}), overlaps=True
        )
        batch = jax.device_put(
            {"tokens": tokens, "labels": labels}, program.batch_sharding
        )
        live = place(program.layout, canonical_numbers(program.layout))
        found.append(
            jax.jit(program.gradients)(live, batch, jnp.int32(0), jnp.float32(1))[1]
        )
    off = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)), *found
    )
    # 8 bits, rounded three times: nothing is lost that a float32 does not hold, and nothing but sums is rounded
    assert all(0 < error < 3 * 2**-8 for error in jax.tree.leaves(off)), off


@pytest.mark.thorough
def test_as_many_bytes_are_scattered_in_a_piece_for_each_bucket_and_each_matrix():
    config = config_of("three microbatches")
    pieces, sent = [], []
    for overlaps in (False, True):
        found = collectives(
            program_of(config, overlaps).lower().compile(), make_mesh(config)
        )
        pieces.append(
            Counter(c.kind for c in found if c.axes == ("data",))["reduce-scatter"]
        )
        sent.append(found.traffic)
    assert sent[0] == pytest.approx(sent[1])
    matrices, vectors = 9, 3
    assert pieces == [
        matrices + vectors,
        (matrices - 2) * len(buckets(SIZES["layers"])) + 2 + vectors,
    ]


def test_a_compression_with_a_memory_has_one_reduction_a_step():
    config = replaced(
        config_of("three microbatches"), parallel={"reduce": {"compression": "int8"}}
    )
    assert Program(config, make_mesh(config)).local.zero.overlaps_reduce_scatter
    config = replaced(config, parallel={"reduce": {"compression": "powersgd"}})
    assert not Program(config, make_mesh(config)).local.zero.overlaps_reduce_scatter


@pytest.mark.parametrize("layers", [1, 3, 8, 32, 61, 126])
def test_buckets_are_all_layers_once_and_about_as_long(layers):
    found = buckets(layers)
    assert [i for first, behind in found for i in range(first, behind)] == list(
        range(layers)
    )
    sizes = [behind - first for first, behind in found]
    assert len(found) <= 8 and max(sizes) - min(sizes) <= 1
