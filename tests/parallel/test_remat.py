"""What a layer keeps for its backward, by parallel.remat: seen in the residuals of its vjp inside the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.compat import residuals
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.model.hooks import Hooks
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.schedule.table import Slot
from meshtrain.step import Program

LENGTH, WIDTH, TENSOR = 12, 16, 2


def scores_kept(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> jax.Array:
    """Attention as a hook that keeps its scores, [B, H, T, T]."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v).reshape(
        -1, q.shape[2] * q.shape[3]
    )


def kept(
    remat: str, hooks: Hooks | None = None, **parallel: Any
) -> list[tuple[int, ...]]:
    """Shapes of what a layer's vjp keeps on a device of 2 tensor ranks, besides its own arguments."""
    config = load(
        {
            "model": {
                "layers": 2,
                "d_model": WIDTH,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 24,
                "vocab_size": 37,
            },
            "mesh": {"data": 1, "tensor": TENSOR, "pipeline": 2},
            "parallel": {
                "remat": remat,
                "microbatches": 2,
                "schedule": "1f1b",
                **parallel,
            },
            "train": {"global_batch_size": 2, "sequence_length": LENGTH},
        }
    )
    program = Program(config, make_mesh(config), **(vars(hooks) if hooks else {}))
    shapes: list[tuple[int, ...]] = []

    def local(masters: Any, batch: Any) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        stage = Stage(
            program.local.forward,
            1,
            program.local.zero.gather_params(masters),
            batches,
            None,
        )
        zero = jnp.int32(0)
        vjp = stage._trace(
            stage.stacked_layer(
                Slot(jnp.array(True), zero, zero, zero), stage.segments[0], 0
            ),
            zero,
            stage.zeros(),
        ).vjp
        shapes.extend(r.shape for r in residuals(vjp))
        return jnp.zeros(())

    specs = (program.layout.shards, PartitionSpec("data"))
    mapped = jax.shard_map(
        local, mesh=program.mesh, in_specs=specs, out_specs=PartitionSpec()
    )
    jax.eval_shape(mapped, program.layout.masters, program.batch_shapes())
    return shapes


def elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


@pytest.mark.thorough
def test_selective_keeps_no_scores_where_attention_would():
    scores = (1, 2, LENGTH, LENGTH)
    hooks = Hooks(attention=scores_kept)
    assert scores in kept("none", hooks) and scores not in kept("selective", hooks)
    assert elements(kept("selective", hooks)) < elements(kept("none", hooks))


def test_selective_keeps_what_takes_a_product_and_nothing_else():
    """Of 2 tensor ranks: q, k, v, attention's output and what goes into the activation; the stream after attention."""
    found, whole = kept("selective"), kept("none")
    hidden = (LENGTH, 24 // TENSOR)
    # up and gate, and with everything kept the product of the two
    assert (
        [shape for shape in found if shape == hidden]
        == [hidden] * 2
        != [shape for shape in whole if shape == hidden]
    )
    streams = [shape for shape in found if np.prod(shape) == LENGTH * WIDTH]
    assert len(streams) < len(
        [shape for shape in whole if np.prod(shape) == LENGTH * WIDTH]
    )


@pytest.mark.parametrize(("remat", "shares"), [("none", 3), ("selective", 1)])
def test_with_sequence_parallelism_no_gathered_input_of_a_product_is_kept(
    remat, shares
):
    def streams(shapes: list[tuple[int, ...]], length: int) -> int:
        return sum(int(np.prod(shape)) == length * WIDTH for shape in shapes)

    split, whole = (
        kept(remat, sequence_parallel=True),
        kept(remat, sequence_parallel=False),
    )
    # the norms' outputs and the stream between attention and MLP or, of these, what attention gave to it; a share each
    assert streams(split, LENGTH) == 0 and streams(split, LENGTH // TENSOR) >= shares
    assert streams(whole, LENGTH) >= shares
    assert elements(split) < elements(whole)


def test_full_keeps_nothing_of_the_microbatch():
    assert all(np.prod(shape) <= LENGTH * WIDTH / 4 / 2 for shape in kept("full"))


@pytest.mark.thorough
def test_selective_gives_the_same_gradients_of_packed_sequences_with_dropout():
    """On one stage too, where the backward runs after the loop over layers whose arrays attention was given."""
    found = []
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 37, (2, 2, LENGTH)).astype(np.int32)
    places = np.tile(np.r_[:5, : LENGTH - 5].astype(np.int32), (2, 1))
    segments = np.tile(np.repeat([0, 1], [5, LENGTH - 5]).astype(np.int32), (2, 1))
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "positions": places,
        "segments": segments,
        "weights": np.ones((2, LENGTH), np.float32),
    }
    for remat in ("none", "selective"):
        config = load(
            {
                "model": {
                    "layers": 2,
                    "d_model": WIDTH,
                    "heads": 4,
                    "d_ff": 24,
                    "vocab_size": 37,
                    "dropout": 0.1,
                },
                "data": {"batching": "packed"},
                "parallel": {"remat": remat},
                "train": {"global_batch_size": 2, "sequence_length": LENGTH},
            }
        )
        program = Program(config, make_mesh(config))
        batch = jax.device_put(arrays, program.batch_sharding)
        found.append(
            jax.jit(program.gradients)(
                program.init().params, batch, jnp.int32(0), jnp.float32(1)
            )
        )
    jax.tree.map(np.testing.assert_array_equal, *found)
