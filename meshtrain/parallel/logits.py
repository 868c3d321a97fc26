"""Logits on any mesh: the stages of a pipeline one after the other, each waiting for the one before.

    stage 0   ─ layers 0, 1 ─►
    stage 1                    ─ layers 2, 3 ─►        what a stage made goes to all of them, so that no table is needed
    all                                         ─ head ─►

For looking at what a model says, on the mesh that it is trained on; with stages it is too slow to serve one."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.forward import Batch, Forward
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.table import Slot


def logits(forward: Forward, weights: Weights, batch: Batch) -> Array:
    """This device's shard of the vocabulary, [b, T, V share] in float32, of its data rank's tokens [b, T]."""
    x, here = stream(forward, weights, batch)
    return compute_logits(forward, weights, x, here)


def stream(forward: Forward, weights: Weights, batch: Batch) -> tuple[Array, Array]:
    """Returns the last stage's output [b, T, D] for its data rank's tokens [b, T], and whether this device is of that
    stage.
    """
    layout = forward.layout
    stage = Stage(
        forward, layout.chunks, weights, jax.tree.map(lambda a: a[None], batch), None
    )
    first = jnp.zeros((), jnp.int32)
    x = stage.embed(first)
    here = lax.axis_index(PIPELINE) == 0
    for k in range(len(layout.stages.counts)):
        place, chunk = (
            (layout.table.stage_of(k), layout.table.chunk_of(k))
            if layout.table
            else (0, 0)
        )
        here = lax.axis_index(PIPELINE) == place

        def run(x: Array, chunk: int = chunk) -> Array:
            return stage.run(x, Slot(jnp.array(True), first, jnp.int32(chunk), first))

        y = (
            lax.cond(here, run, lambda x: x, x)
            if forward.skips and layout.table
            else run(x)
        )
        x = vary(_only(here, y), forward.stream_axes)
    return x, here


def compute_logits(
    forward: Forward, weights: Weights, x_BTD: Array, here: Array
) -> Array:
    """The logits of what `stream` made, or of some of its places: this device's shard, [b, T, V share] in float32."""
    shard = forward.logits(weights, x_BTD, here)
    # with parallel.vocab: edge only the last stage's logits are of use, though every stage has computed some
    return shard if PIPELINE in forward.collectives.vocabulary else _only(here, shard)


def _only(here: Array, x: Array) -> Array:
    """Sends the value of the one stage where `here` is true to all stages."""
    if PIPELINE in varying(x):
        return lax.psum(jnp.where(here, x, 0), PIPELINE)
    return x
