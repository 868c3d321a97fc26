"""One pipeline stage: loss and gradients by plain differentiation, microbatches one after the other (gradient accumulation).

The last one is gone through by hand where that lets gradients travel over data: each layer's is complete when the layer's backward is.

    backward     head   layer 3   layer 2   layer 1   layer 0   embedding
    over data              ╰─ head ─ ─ ─ ─ ─ ─ ─ ─ ─ ─╯
                                  ╰─ 3 ──╯ ╰─ 2 ──╯ ╰─ 1 ──╯    0, embedding, norms
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.inputs import input_name, inputs
from meshtrain.parallel.beside import after
from meshtrain.parallel.forward import Batch, Forward, Judged, Totals
from meshtrain.parallel.pipeline.stage import Slot, Stage
from meshtrain.parallel.pipeline.storage import empty
from meshtrain.parallel.zero import Weights

Tree = Any


def loss_sum(forward: Forward, weights: Weights, batch: Batch, key: jax.Array | None) -> Totals:
    """Summed loss of one microbatch on a mesh without pipeline stages."""
    return forward.loss(weights, _last(forward, weights, batch, key), batch, jnp.array(True))


def _last(forward: Forward, weights: Weights, batch: Batch, key: jax.Array | None) -> jax.Array:
    """What the last layer gives."""
    x = forward.embed(weights, batch, key)
    layer_at = jnp.asarray(forward.layout.layer_at[0, 0])
    return forward.layers(batch, key, layer_at, forward.config.parallel.remat)(weights.part("blocks"), x)


def accumulate(
    forward: Forward, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
) -> tuple[Totals, Tree]:
    """Loss summed over the microbatches [M, b, T], and `seed` times its gradient in float32."""

    count = inputs(batches).shape[0]
    if not (forward.zero.closes_early and forward.overlaps):
        return _summed(forward, weights, batches, key, seed)
    before = _summed(forward, weights, jax.tree.map(lambda a: a[:-1], batches), key, seed) if count > 1 else None
    return _closing(forward, weights, batches, key, seed, before)


def _summed(
    forward: Forward, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
) -> tuple[Totals, Tree]:
    def one(batch: Batch) -> tuple[Totals, Tree]:
        of = lambda w: loss_sum(forward, weights._replace(differentiated=w), batch, key)  # noqa: E731
        loss, vjp, measured = jax.vjp(of, weights.differentiated, has_aux=True)
        gradients = vjp(vary(seed, varying(loss)))[0]
        return (loss, measured), jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

    first = jax.tree.map(lambda a: a[0], batches)
    if inputs(batches).shape[0] == 1:
        return one(first)

    def step(total: tuple[Totals, Tree], batch: Batch) -> tuple[tuple[Totals, Tree], None]:
        return jax.tree.map(jnp.add, total, one(batch)), None

    totals = jax.tree.map(lambda x: vary(jnp.zeros(()), varying(x)), jax.eval_shape(one, first)[0])
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights.differentiated)
    start = (totals, vary(zeros, forward.config.mesh.axes))
    return lax.scan(step, start, batches)[0]


def _closing(
    forward: Forward,
    weights: Weights,
    batches: Batch,
    key: jax.Array | None,
    seed: jax.Array,
    before: tuple[Totals, Tree] | None,
) -> tuple[Totals, Tree]:
    """The last microbatch, added to those before it; matrices' gradients are closed on the way (`zero.early`)."""
    read, nothing = inputs(batches), jnp.zeros(())
    if before is not None:
        # One after the other, so that what two microbatches hold is never there at once.
        read, nothing = after((read, nothing), before[0])
    stage, here = Stage(forward, 1, weights, {**batches, input_name(batches): read}, key), jnp.array(True)
    zero, last = jnp.int32(0), jnp.int32(len(read) - 1)
    slot = Slot(here, last, zero, zero)
    x = stage.embed(stage.edge, last)
    y, stash = stage.forward(x, empty((1, stage.layers), stage.stashed(split=False)[0], nothing), slot)
    loss, vjp, measured = jax.vjp(lambda w, y: stage.loss(w, y, last, here), stage.edge, y, has_aux=True)
    edge, cotangent = vjp(vary(seed, varying(loss)))
    totals, edge = (loss, measured), jax.tree.map(lambda g: g.astype(jnp.float32), edge)
    blocks = None
    if before is not None:
        blocks = before[1]["blocks"]
        totals, edge = jax.tree.map(jnp.add, (totals, edge), (before[0], {part: before[1][part] for part in edge}))

    head = forward.zero.early("head", after(edge["head"], cotangent))
    gx, blocks = stage.backward_sending(stash, cotangent, blocks, slot, partial(forward.zero.early, "blocks"))
    embedding = stage.add_embedding_gradient(edge, last, gx)["embedding"]
    return totals, {"embedding": embedding, "blocks": blocks, "head": head}


def judged(forward: Forward, weights: Weights, batches: Batch) -> Judged:
    """The labels of the microbatches one by one, [M, b, T] each, without gradients."""

    def one(batch: Batch) -> Judged:
        return forward.judged(weights, _last(forward, weights, batch, None), batch, jnp.array(True))

    return lax.map(one, batches)
