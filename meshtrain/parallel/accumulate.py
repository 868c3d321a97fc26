"""One pipeline stage: loss and gradients by plain differentiation, microbatches one after the other (gradient
accumulation).

Where gradients may travel over data during the backward, the last microbatch runs layer by layer, as in a stage of a
pipeline. A layer's gradients are then complete when its backward is.

    backward     head   layer 3   layer 2   layer 1   layer 0   embedding
    over data              ╰─ head ─ ─ ─ ─ ─ ─ ─ ─ ─ ─╯
                                  ╰─ 3 ──╯ ╰─ 2 ──╯ ╰─ 1 ──╯    0, embedding, norms
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshtrain.compat import vary, varying
from meshtrain.inputs import input_name, inputs
from meshtrain.parallel.forward import (
    Batch,
    Forward,
    LabelLosses,
    LossAndGradients,
    Totals,
    added,
    widen_gradients,
)
from meshtrain.parallel.pipeline.buffers import after
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.table import Slot

Tree = Any


def accumulate(
    forward: Forward,
    weights: Weights,
    batches: Batch,
    key: Array | None,
    seed: Array,
) -> LossAndGradients:
    """Returns the loss summed over the microbatches [M, b, T], and `seed` times its gradient: float32 for one
    microbatch, in `precision.gradient_sums` for several.
    """

    def microbatch(batch: Batch) -> LossAndGradients:
        def loss(differentiated: Tree) -> tuple[Array, Totals]:
            replaced = weights._replace(differentiated=differentiated)
            x = forward.last_stream(replaced, batch, key)
            return forward.loss(replaced, x, batch, jnp.array(True), seed)

        seeded, vjp, totals = jax.vjp(loss, weights.differentiated, has_aux=True)
        (gradients,) = vjp(vary(jnp.ones(()), varying(seeded)))
        return LossAndGradients(totals, widen_gradients(gradients))

    def step(sums: LossAndGradients, batch: Batch) -> tuple[LossAndGradients, None]:
        return added(sums, microbatch(batch)), None

    first = jax.tree.map(lambda a: a[0], batches)
    if inputs(batches).shape[0] == 1:
        return microbatch(first)
    totals = jax.eval_shape(microbatch, first).totals
    sums, _ = lax.scan(step, _zeros(forward, weights, totals), batches)
    return sums


def _zeros(forward: Forward, weights: Weights, totals: Totals) -> LossAndGradients:
    """Returns the sums before the first microbatch, for totals of these types."""
    zeros = lambda x: vary(jnp.zeros(x.shape), varying(x))
    totals = jax.tree.map(zeros, totals)
    return LossAndGradients(totals, forward.zero.no_gradients(weights.differentiated))


def accumulate_overlapped(
    forward: Forward,
    weights: Weights,
    batches: Batch,
    key: Array | None,
    seed: Array,
) -> LossAndGradients:
    """Does the same, with matrices' gradients reduce-scattered during the last microbatch's backward
    (`zero.reduce_early`).
    """
    tokens = inputs(batches)
    zero_fill = jnp.zeros(())
    blocks = None
    stacks = forward.layout.stacks
    last = jnp.int32(len(tokens) - 1)
    if len(tokens) > 1:
        earlier = jax.tree.map(lambda a: a[:-1], batches)
        sums = accumulate(forward, weights, earlier, key, seed)
        # One after the other, so that the activations of two microbatches are never alive together.
        tokens, zero_fill = after((tokens, zero_fill), sums.totals)
    batches = {**batches, input_name(batches): tokens}
    stage = Stage(forward, 1, weights, batches, key)
    totals, edge, cotangent, stash, slot = _run_to_loss(stage, last, seed, zero_fill)
    if len(tokens) > 1:
        blocks = {stack: sums.gradients[stack] for stack in stacks}
        edge_before = {part: sums.gradients[part] for part in edge}
        totals = added(sums.totals, totals)
        edge = added(edge_before, edge)
    else:
        edge = widen_gradients(edge)
    reduce_early = forward.zero.reduce_early
    head_gradient = after(edge["head"], cotangent)
    head = reduce_early({"head": head_gradient})
    gx, blocks = stage.backward_sending(stash, cotangent, blocks, slot, reduce_early)
    edge = stage.add_embedding_gradient(edge, last, gx)
    return LossAndGradients(totals, {**edge, **blocks, **head})


def accumulate_in_place(
    forward: Forward,
    weights: Weights,
    batches: Batch,
    key: Array | None,
    seed: Array,
) -> LossAndGradients:
    """Does the same, but adds each layer's gradients to their sums in place: a microbatch's gradients never all exist
    at once.
    """
    stage = Stage(forward, 1, weights, batches, key)

    def step(
        sums: LossAndGradients, microbatch: Array
    ) -> tuple[LossAndGradients, None]:
        totals, edge, cotangent, stash, slot = _run_to_loss(stage, microbatch, seed, 0)
        before = {stack: sums.gradients[stack] for stack in forward.layout.stacks}
        gx, blocks = stage.backward(stash, cotangent, before, slot)
        edge_before = {part: sums.gradients[part] for part in edge}
        edge = added(edge_before, edge)
        edge = stage.add_embedding_gradient(edge, microbatch, gx)
        totals = added(sums.totals, totals)
        return LossAndGradients(totals, {**edge, **blocks}), None

    def loss(x: Array) -> Totals:
        totals, _, _ = stage.loss(x, jnp.int32(0), jnp.array(True), seed)
        return totals

    totals = jax.eval_shape(loss, stage.zeros())
    microbatches = jnp.arange(len(inputs(batches)), dtype=jnp.int32)
    sums, _ = lax.scan(step, _zeros(forward, weights, totals), microbatches)
    return sums


def _run_to_loss(
    stage: Stage, microbatch: Array, seed: Array, zero_fill: Array | float
) -> tuple[Totals, Tree, Array, Tree, Slot[Array]]:
    """Returns a microbatch's totals, the loss's gradient for embedding and head, the last layer's cotangent, and two
    arguments of the layers' backward: the stash and its slot.
    """
    here = jnp.array(True)
    zero = jnp.int32(0)
    slot = Slot(
        active=here,
        microbatch=microbatch,
        chunk=zero,
        stash=zero,
    )
    stashed, _ = stage.stash_shapes(split=False)
    stash = stage.buffers(1, stashed, zero_fill)
    x = stage.embed(microbatch)
    y, stash = stage.forward(x, stash, slot)
    totals, edge, cotangent = stage.loss(y, microbatch, here, seed)
    return totals, edge, cotangent, stash, slot


def label_losses(forward: Forward, weights: Weights, batches: Batch) -> LabelLosses:
    """Returns the loss of each label of the microbatches, [M, b, T], without gradients."""

    def microbatch(batch: Batch) -> LabelLosses:
        x = forward.last_stream(weights, batch, None)
        return forward.label_losses(weights, x, batch, jnp.array(True))

    return lax.map(microbatch, batches)
