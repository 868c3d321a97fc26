"""Families with experts on meshes: gradients are those of one device, where norms and sinks of heads are shared, and
experts too.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN

from meshtrain.config import load
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import TensorFiles
from meshtrain.hf_families import CONFIG, model_section, read_json
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

CASES = {
    "olmoe, fewer key heads than ranks": ("olmoe", {"tensor": 4}, {}),
    "olmoe, experts spread": (
        "olmoe",
        {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
        {"microbatches": 2},
    ),
    "gpt_oss, experts spread": (
        "gpt_oss",
        {"data": 2, "expert": 2, "tensor": 2},
        {"zero_stage": 3},
    ),
    "gpt_oss, ulysses": (
        "gpt_oss",
        {"context": 2, "tensor": 2},
        {"context_strategy": "ulysses"},
    ),
    "gpt_oss, keys gathered": (
        "gpt_oss",
        {"context": 2, "pipeline": 2},
        {"context_strategy": "all_gather", "microbatches": 2},
    ),
}


def gradients(family, mesh, parallel):
    """The loss and the gradients of a golden model, mesh-independent."""
    config = load(
        {
            "model": model_section(read_json(GOLDEN / family / CONFIG), CONFIG),
            "mesh": mesh,
            "parallel": parallel,
            "train": {"global_batch_size": 4, "sequence_length": 48},
        }
    )
    program = Program(config, make_mesh(config))
    params = loading.load(program.layout, TensorFiles(GOLDEN / family))
    tokens = np.random.default_rng(0).integers(0, 45, (4, 49)).astype(np.int32)
    batch = program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    loss, found = jax.jit(program.gradients)(
        params, batch, jnp.zeros((), jnp.int32), jnp.ones(())
    )
    return loss, jax.tree.map(np.asarray, jax.jit(program.layout.canonical)(found))


@cache
def on_one_device(family):
    return gradients(family, {}, {})


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case):
    family, *layout = CASES[case]
    loss, found = gradients(family, *layout)
    right_loss, right = on_one_device(family)
    np.testing.assert_allclose(loss, right_loss, atol=2e-6)
    for (path, mine), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(right), strict=True
    ):
        if "load" in str(path[-1]):
            # what a router counts is equal, but for the rounds, which only spread experts take
            mine, wanted = (np.delete(x, -2, axis=-1) for x in (mine, wanted))
        # a key's bias has no gradient but noise
        least = 0.1 if "k_bias" in str(path[-1]) else 0
        bound = 3e-5 * max(np.abs(wanted).max(), least)
        np.testing.assert_allclose(
            mine, wanted, atol=bound, err_msg=jax.tree_util.keystr(path)
        )
