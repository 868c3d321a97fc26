"""One pipeline stage: loss and gradients by plain differentiation, microbatches one after the other (gradient
accumulation).

Where gradients may travel over data during the backward, the last microbatch is gone through layer by layer, as a stage
of a pipeline
goes through it: each layer's gradients are complete when the layer's backward is.

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
from meshtrain.parallel.forward import Batch, Forward, LabelLosses, LossAndGradients, Totals, added
from meshtrain.parallel.pipeline.stage import Slot, Stage, after
from meshtrain.parallel.zero import Weights

Tree = Any


def accumulate(
    forward: Forward, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
) -> LossAndGradients:
    """Loss summed over the microbatches [M, b, T], and `seed` times its gradient: of one in float32, else in
    `precision.gradient_sums`.
    """

    def microbatch(batch: Batch) -> LossAndGradients:
        def loss(differentiated: Tree) -> tuple[jax.Array, Totals]:
            replaced = weights._replace(differentiated=differentiated)
            return forward.loss(
                replaced, forward.last_stream(replaced, batch, key), batch, jnp.array(True), seed
            )

        seeded, vjp, totals = jax.vjp(loss, weights.differentiated, has_aux=True)
        gradients = vjp(vary(jnp.ones(()), varying(seeded)))[0]
        return LossAndGradients(totals, jax.tree.map(lambda g: g.astype(jnp.float32), gradients))

    def step(sums: LossAndGradients, batch: Batch) -> tuple[LossAndGradients, None]:
        return added(sums, microbatch(batch)), None

    first = jax.tree.map(lambda a: a[0], batches)
    if inputs(batches).shape[0] == 1:
        return microbatch(first)
    return lax.scan(
        step, _nothing(forward, weights, jax.eval_shape(microbatch, first).totals), batches
    )[0]


def _nothing(forward: Forward, weights: Weights, totals: Totals) -> LossAndGradients:
    """The sums before the first microbatch, whose loss and what else is measured are like `totals`."""
    totals = jax.tree.map(lambda x: vary(jnp.zeros(()), varying(x)), totals)
    return LossAndGradients(totals, forward.zero.no_gradients(weights.differentiated))


def accumulate_overlapped(
    forward: Forward, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
) -> LossAndGradients:
    """Does the same, with matrices' gradients reduce-scattered during the last microbatch's backward
    (`zero.reduce_early`).
    """
    tokens = inputs(batches)
    zero_fill = jnp.zeros(())
    blocks = None
    last = jnp.int32(len(tokens) - 1)
    if len(tokens) > 1:
        sums = accumulate(forward, weights, jax.tree.map(lambda a: a[:-1], batches), key, seed)
        # One after the other, so that the activations of two microbatches are never alive together.
        tokens, zero_fill = after((tokens, zero_fill), sums.totals)
    stage = Stage(forward, 1, weights, {**batches, input_name(batches): tokens}, key)
    totals, edge, cotangent, stash, slot = _run_to_loss(stage, last, seed, zero_fill)
    if len(tokens) > 1:
        blocks = sums.gradients["blocks"]
        edge_before = {part: sums.gradients[part] for part in edge}
        totals, edge = added((sums.totals, edge_before), (totals, edge))
    else:
        edge = jax.tree.map(lambda g: g.astype(jnp.float32), edge)
    head = forward.zero.reduce_early("head", after(edge["head"], cotangent))
    gx, blocks = stage.backward_sending(
        stash, cotangent, blocks, slot, partial(forward.zero.reduce_early, "blocks")
    )
    embedding = stage.add_embedding_gradient(edge, last, gx)["embedding"]
    return LossAndGradients(totals, {"embedding": embedding, "blocks": blocks, "head": head})


def accumulate_in_place(
    forward: Forward, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
) -> LossAndGradients:
    """Does the same, but adds each layer's gradients to their sums in place: a microbatch's gradients never all exist
    at once.
    """
    stage, zero = Stage(forward, 1, weights, batches, key), jnp.int32(0)

    def step(sums: LossAndGradients, microbatch: jax.Array) -> tuple[LossAndGradients, None]:
        totals, edge, cotangent, stash, slot = _run_to_loss(stage, microbatch, seed, 0)
        gx, blocks = stage.backward(stash, cotangent, sums.gradients["blocks"], slot)
        edge = added({part: sums.gradients[part] for part in edge}, edge)
        edge = stage.add_embedding_gradient(edge, microbatch, gx)
        return LossAndGradients(added(sums.totals, totals), {**edge, "blocks": blocks}), None

    totals = jax.eval_shape(lambda x: stage.loss(x, zero, jnp.array(True), seed)[0], stage.zeros())
    microbatches = jnp.arange(len(inputs(batches)), dtype=jnp.int32)
    return lax.scan(step, _nothing(forward, weights, totals), microbatches)[0]


def _run_to_loss(
    stage: Stage, microbatch: jax.Array, seed: jax.Array, zero_fill: jax.Array | float
) -> tuple[Totals, Tree, jax.Array, Tree, Slot]:
    """A microbatch's totals, the gradients of embedding and head of its loss, the last layer's cotangent, and what the
    layers' backward
    takes: the stash, and its slot.
    """
    here = jnp.array(True)
    zero = jnp.int32(0)
    slot = Slot(here, microbatch, zero, zero)
    stash = stage.buffers(1, stage.stash_shapes(split=False)[0], zero_fill)
    y, stash = stage.forward(stage.embed(microbatch), stash, slot)
    return *stage.loss(y, microbatch, here, seed), stash, slot


def label_losses(forward: Forward, weights: Weights, batches: Batch) -> LabelLosses:
    """The labels of the microbatches one by one, [M, b, T] each, without gradients."""

    def microbatch(batch: Batch) -> LabelLosses:
        return forward.label_losses(
            weights, forward.last_stream(weights, batch, None), batch, jnp.array(True)
        )

    return lax.map(microbatch, batches)
