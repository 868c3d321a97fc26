"""Layers of several kinds, each in a stack of its own, give the losses and gradients of one device, in float64."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_experts
from covering import thorough_but
from short_runs import canonical_numbers, packed_batch, place, token_batches

import meshtrain as mt
from meshtrain.config import Config, load
from meshtrain.step import Program

WITHIN = 1e-6
# A mesh sums in another order; it may not be further from float64 than this many times the most that one device rounds.
BESIDE_ONE_DEVICE = 1.5
MOE = {
    "experts": 8,
    "top_k": 3,
    "d_ff": 20,
    "router": "sigmoid",
    "balance": "bias",
    "groups": [4, 2],
    "route_scale": 2.5,
    "shared_experts": 1,
}
FULL = {"data": 2, "tensor": 2, "pipeline": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "data 4, ZeRO-3": ({"data": 4}, {"zero_stage": 3, "microbatches": 2}),
    "2 x 2 x 2": (FULL, {"zero_stage": 3, "microbatches": 4, "schedule": "1f1b"}),
    "2 x 2 x 2, remat": (FULL, {"microbatches": 4, "schedule": "1f1b", "remat": "full"}),
    "gpipe": ({"pipeline": 4}, {"microbatches": 4, "schedule": "gpipe"}),
    "interleaved": (
        {"pipeline": 2, "data": 2},
        {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    ),
    "zero bubble": (
        {"data": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "zb_h1", "zero_stage": 2},
    ),
    "paired": ({"pipeline": 2, "tensor": 2}, {"microbatches": 4, "schedule": "paired"}),
    "paired, one stage": ({"data": 2}, {"microbatches": 4, "schedule": "paired"}),
    "expert 2": ({"data": 4, "expert": 2}, {"zero_stage": 3}),
    "expert 2, pipeline": (
        {"data": 2, "expert": 2, "pipeline": 2, "tensor": 2},
        {"microbatches": 2, "schedule": "1f1b", "experts": {"dispatch": "all_to_all"}},
    ),
    "context 2": ({"context": 2, "data": 2}, {"zero_stage": 3}),
    "context 2, pipeline": (
        {"context": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "1f1b"},
    ),
}


def config_of(layout: str, dense: int = 2, **sections: Any) -> Config:
    mesh, parallel = LAYOUTS[layout]
    return load(
        {
            "model": {
                "layers": 5,
                "dense_layers": dense,
                "dense_d_ff": 40,
                "d_model": 24,
                "heads": 4,
                "kv_heads": 2,
                "vocab_size": 61,
                "moe": MOE,
            },
            "train": {"global_batch_size": 8, "sequence_length": 24, "steps": 4},
            "parallel": parallel,
            "mesh": mesh,
            **sections,
        }
    )


def batch_of(packed: bool) -> dict[str, np.ndarray]:
    tokens, labels = token_batches(config_of("one"), 1)[0]
    return packed_batch(tokens, labels) if packed else {"tokens": tokens, "labels": labels}


@cache
def right(dense: int, packed: bool) -> tuple[Any, float, Any, np.ndarray]:
    """Canonical numbers, and what the reference makes of them: loss, gradients, counts."""
    config = config_of("one", dense)
    numbers = canonical_numbers(Program(config).layout)
    moe = vars(config.model.moe)
    model = reference.Model("llama")
    return numbers, *reference_experts.run(model, moe, numbers, batch_of(packed))


def gradients_of(config: Config, numbers: Any, batch: Any) -> tuple[float, Any]:
    program = Program(config)
    given = (place(program.layout, numbers), program.place(batch), jnp.int32(0), jnp.float32(1))
    loss, shards = jax.jit(program.gradients)(*given)
    return float(loss), jax.tree.map(np.asarray, program.layout.canonical(shards))


def errors_of(gradients: Any, packed: bool) -> dict[str, float]:
    """The distance of each weight's gradient from the reference, over its norm; loads are compared apart."""

    def apart(mine: np.ndarray, theirs: np.ndarray) -> float:
        return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))

    errors = jax.tree.map(apart, gradients, right(2, packed)[2])
    paths, _ = jax.tree.flatten_with_path(errors)
    named = {jax.tree_util.keystr(path): error for path, error in paths}
    return {name: error for name, error in named.items() if "load" not in name}


@cache
def one_device_errors(packed: bool) -> dict[str, float]:
    """What float32 rounds on one device."""
    _, gradients = gradients_of(config_of("one"), right(2, packed)[0], batch_of(packed))
    return errors_of(gradients, packed)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("layout", thorough_but(list(LAYOUTS), lambda _: False, ["2 x 2 x 2"]))
def test_dense_layers_that_come_first_are_those_of_a_loop_in_float64(
    layout: str, packed: bool
) -> None:
    numbers, loss, _, counts = right(2, packed)
    found, gradients = gradients_of(config_of(layout), numbers, batch_of(packed))
    assert found == pytest.approx(loss, rel=WITHIN)
    load_of = gradients["blocks"]["experts"]["load"]
    np.testing.assert_array_equal(load_of[:, : MOE["experts"]], counts)
    assert "experts" not in gradients["dense_blocks"]
    limit = max(WITHIN, BESIDE_ONE_DEVICE * max(one_device_errors(packed).values()))
    errors = errors_of(gradients, packed)
    assert {name: error for name, error in errors.items() if error > limit} == {}


@pytest.mark.parametrize("dense", [0, 1])
def test_the_layers_of_a_stack_are_told_by_its_name(dense: int) -> None:
    layout = mt.Program(config_of("one", dense)).layout
    stacks = {name: list(layers.layers) for name, layers in layout.stacks.items()}
    assert stacks == (
        {"dense_blocks": [0], "blocks": [1, 2, 3, 4]} if dense else {"blocks": [*range(5)]}
    )
