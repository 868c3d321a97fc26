"""Logits on a mesh are the reference's, whatever the schedule's placement of the layers, the vocabulary and ZeRO."""

from typing import Any

import jax
import numpy as np
import pytest
import reference
from short_runs import canonical_numbers, place, token_batches

from meshtrain.config import load
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.step import Program

LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any], str]] = {
    "data, ZeRO-3": ((4, 2, 1), {"zero_stage": 3}, "gpt2"),
    "interleaved": (
        (2, 2, 2),
        {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2},
        "llama",
    ),
    "vocabulary on the edges": (
        (1, 2, 2),
        {"vocab": "edge", "sequence_parallel": True, "remat": "full"},
        "gpt2",
    ),
    "V, as on an accelerator": (
        (1, 1, 2),
        {"microbatches": 2, "schedule": "v_1f1b"},
        "llama",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_the_references_on_every_layout(name):
    mesh, parallel, family = LAYOUTS[name]
    config = load(
        {
            "model": {
                "family": family,
                "layers": 5,
                "d_model": 24,
                "heads": 6,
                "kv_heads": 2,
                "d_ff": 50,
                "vocab_size": 257,
            },
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": parallel,
            "train": {"global_batch_size": 8, "sequence_length": 16},
        }
    )
    program = Program(config)
    if "accelerator" in name:
        program.local = LocalStep(program.layout, "accelerator", program.hooks)
    weights, tokens = canonical_numbers(program.layout), token_batches(config, 1)[0][0]
    found = program.logits(place(program.layout, weights), tokens)
    assert (found.shape, found.dtype) == ((8, 16, 257), np.float32)
    assert not found.sharding.is_fully_replicated or mesh[0] == 1, "rows stay over data"
    each = jax.vmap(
        lambda w, t: reference.logits(reference.Model(family), w, t), (None, 0)
    )
    np.testing.assert_allclose(found, jax.jit(each)(weights, tokens), atol=1e-5)
