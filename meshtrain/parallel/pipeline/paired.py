"""A cell `F8+B4`: one microbatch's forward and another's backward in one loop over layers, so that each hides the
other's messages.

    F        layer 0   layer 1   layer 2   layer 3          B        layer 3   layer 2   layer 1   layer 0

    turn              0           1           2           3
    products        0F 3B       1F 2B       2F 1B       3F 0B
    messages       of 0F under the products of 3B, and the other way round

The two need nothing of each other. DualPipe builds this overlap by hand (DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", section 3.2.1). XLA's scheduler finds it where both stand in the body of one loop, in the order that
`pipeline.order` tells it. Where no stage has a forward any more, `I4+W3` does the same: the products of a weight
gradient, which sends nothing, hide the messages of an input gradient.

On one stage F keeps a layer where B has just read one, so that two microbatches take the place of one:

    turn                     0      1      2      3
    stash (0: read, 0': written)
      B 3 2 1 0, F 0 1 2 3   3 0'   2 1'   1 2'   0 3'     the next pair reads 3' first, where 0 is now
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshtrain import xla
from meshtrain.parallel.pipeline.buffers import put, read, write
from meshtrain.parallel.pipeline.order import ordered
from meshtrain.parallel.pipeline.stage import StackedLayer, Stage
from meshtrain.schedule.table import Slot

Tree = Any


class Pair(NamedTuple):
    """The state that the loop carries from layer to layer."""

    x: Array  # F's stream; where there is no F, what it was
    cotangent: Array  # B's
    stash: list[Tree]
    w_residuals: list[Tree]
    gradients: Tree


class PairSlots(NamedTuple):
    """The instructions of a clock's pair: of B, and of F or W."""

    f: Slot[Array] | None
    b: Slot[Array]
    w: Slot[Array] | None


def run_pair(stage: Stage, pair: Pair, slots: PairSlots, split: bool) -> Pair:
    """Runs the chunks of a pair, or of a backward alone, in one loop. `split`: its backward is an I. Segments have one
    kind each.
    """
    segments = stage.segments
    edges = {
        0,
        stage.slots,
        *(s.first for s in segments),
        *(stage.slots - s.behind for s in segments),
    }
    for first, behind in itertools.pairwise(sorted(edges)):
        ahead = next(n for n, s in enumerate(segments) if s.first <= first < s.behind)
        back = next(
            n
            for n, s in enumerate(segments)
            if s.first <= stage.slots - 1 - first < s.behind
        )
        turn = _turn(stage, ahead, back, slots, split)
        pair = lax.scan(turn, pair, jnp.arange(first, behind, dtype=jnp.int32))[0]
    return pair


def _turn(
    stage: Stage,
    ahead: int,
    back: int,
    slots: PairSlots,
    split: bool,
) -> Callable:
    """Returns the loop's body: a layer of segment `ahead` forward, and one of segment `back` backward."""
    forward = _forward_half(stage, slots.f, ahead) if slots.f else lambda pair, i: pair
    backward = _backward_half(stage, slots, back, split)

    def turn(pair: Pair, i: Array) -> tuple[Pair, None]:
        ahead_i = i - stage.segments[ahead].first
        back_i = stage.slots - 1 - i - stage.segments[back].first
        w_residuals = pair.w_residuals
        for_w: tuple[Tree, ...] = ()
        stash, stashed = _read_first(
            pair.stash, back, *stage.stashed_at(slots.b, back_i)
        )
        if slots.w:
            stash, stashed_for_w = _read_first(
                stash, back, *stage.stashed_at(slots.w, back_i)
            )
            w_residuals, residuals = _read_first(w_residuals, back, slots.w.cot, back_i)
            for_w = (stashed_for_w, residuals)

        def halves(pair: Pair) -> Pair:
            return backward(forward(pair, ahead_i), back_i, stashed, for_w)

        return ordered(
            halves, pair._replace(stash=stash, w_residuals=w_residuals)
        ), None

    return turn


def _offset_layer(
    stage: Stage, slot: Slot[Array], n: int
) -> tuple[StackedLayer, Array]:
    """Returns the layer of segment `n`, and where its stacked weights are in the first turn."""
    layer = stage.stacked_layer(slot, stage.segments[n], 0)
    return layer, stage.offset(slot.chunk, layer)


def _forward_half(
    stage: Stage, f: Slot[Array], n: int
) -> Callable[[Pair, Array], Pair]:
    """Returns F's half of a turn: (pair, turn of segment `n`) -> the pair with that layer's output."""
    layer, offset = _offset_layer(stage, f, n)

    @jax.named_scope(xla.FORWARD)
    def run(pair: Pair, i: Array) -> Pair:
        x, output = stage.forward_layer(layer, offset + i, pair.x)
        kept = write(pair.stash[n][0], output, *stage.stashed_at(f, i))
        return pair._replace(x=x, stash=put(pair.stash, n, [kept]))

    return run


def _backward_half(
    stage: Stage, slots: PairSlots, n: int, split: bool
) -> Callable[..., Pair]:
    """Returns B's half of a turn: (pair, turn of segment `n`, what F stashed, what W takes) -> the pair with that
    layer's gradients.
    """
    b = slots.b
    w = slots.w
    layer, offset = _offset_layer(stage, b, n)
    if w:
        w_layer, w_offset = _offset_layer(stage, w, n)

    @jax.named_scope(xla.BACKWARD)
    def run(pair: Pair, i: Array, stashed: Tree, for_w: tuple[Tree, ...]) -> Pair:
        if split:
            gx, output = stage.input_layer(layer, offset + i, pair.cotangent, stashed)
            kept = write(pair.w_residuals[n][0], output, slots.b.cot, i)
            pair = pair._replace(
                cotangent=gx, w_residuals=put(pair.w_residuals, n, [kept])
            )
        else:
            carry = (pair.cotangent, pair.gradients)
            (gx, gradients), _ = stage.backward_layer(
                b.active, layer, offset + i, carry, stashed
            )
            pair = pair._replace(cotangent=gx, gradients=gradients)
        if w:
            at = w_offset + i
            gradients, _ = stage.weight_layer(
                w.active, w_layer, at, pair.gradients, *for_w
            )
            pair = pair._replace(gradients=gradients)
        return pair

    return run


def _read_first(parts: list[Tree], n: int, *at: Array) -> tuple[list[Tree], Tree]:
    """Barriers: what is at a place of the buffers of a segment is read before anything is written in them, or XLA would
    copy them. Each array has a barrier of its own, since the results of a barrier vary over all axes over which any
    operand does.
    """
    leaves, tree = jax.tree.flatten(parts[n][0])
    both = [lax.optimization_barrier((leaf, read(leaf, *at))) for leaf in leaves]
    buffers, values = zip(*both, strict=True) if both else ((), ())
    return put(parts, n, [jax.tree.unflatten(tree, buffers)]), jax.tree.unflatten(
        tree, values
    )
