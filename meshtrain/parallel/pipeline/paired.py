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
from meshtrain.parallel.pipeline.stage import Slot, Stage

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

    f: Slot | None
    b: Slot
    w: Slot | None
    b_cot: Array  # where I leaves what W needs
    w_cot: Array


def run_pair(stage: Stage, pair: Pair, slots: PairSlots, split: bool) -> Pair:
    """Runs the chunks of a pair, or of a backward alone, in one loop. `split`: its backward is an I. Segments have one
    kind each.
    """
    segments = stage.segments
    edges = {
        0,
        stage.layers,
        *(s.first for s in segments),
        *(stage.layers - s.behind for s in segments),
    }
    for first, behind in itertools.pairwise(sorted(edges)):
        ahead = next(n for n, s in enumerate(segments) if s.first <= first < s.behind)
        back = next(
            n for n, s in enumerate(segments) if s.first <= stage.layers - 1 - first < s.behind
        )
        turn = _turn(stage, ahead, back, slots, split)
        pair = lax.scan(turn, pair, jnp.arange(first, behind, dtype=jnp.int32))[0]
    return pair


def _turn(stage: Stage, ahead: int, back: int, slots: PairSlots, split: bool) -> Callable:
    """Returns the loop's body: a layer of segment `ahead` forward, and one of segment `back` backward."""
    f, b, w, b_cot, w_cot = slots
    forward_segment = stage.segments[ahead]
    segment = stage.segments[back]
    if f:
        ahead_layer = stage.stacked_layer(f, forward_segment, 0)
        f_first = stage.offset(f.chunk, ahead_layer)
    back_layer = stage.stacked_layer(b, segment, 0)
    b_first = stage.offset(b.chunk, back_layer)
    if w:
        weight_layer = stage.stacked_layer(w, segment, 0)
        w_first = stage.offset(w.chunk, weight_layer)

    def turn(pair: Pair, i: Array) -> tuple[Pair, None]:
        stash = pair.stash
        w_residuals = pair.w_residuals
        ahead_i = i - forward_segment.first
        back_i = stage.layers - 1 - i - segment.first
        stash, stashed = _read_first(stash, back, b.place, back_i)
        if w:
            stash, stashed_for_w = _read_first(stash, back, w.place, back_i)
            w_residuals, residuals = _read_first(w_residuals, back, w_cot, back_i)

        def halves(pair: Pair) -> Pair:
            x, cotangent, stash, w_residuals, gradients = pair
            if f:
                with jax.named_scope(xla.FORWARD):
                    x, output = stage.forward_layer(ahead_layer, f_first + ahead_i, x)
                    kept = [write(stash[ahead][0], output, f.place, ahead_i)]
                    stash = put(stash, ahead, kept)
            with jax.named_scope(xla.BACKWARD):
                at = b_first + back_i
                if split:
                    cotangent, output = stage.input_layer(back_layer, at, cotangent, stashed)
                    kept = [write(w_residuals[back][0], output, b_cot, back_i)]
                    w_residuals = put(w_residuals, back, kept)
                else:
                    carry = (cotangent, gradients)
                    (cotangent, gradients), _ = stage.backward_layer(
                        b.active, back_layer, at, carry, stashed
                    )
                if w:
                    at = w_first + back_i
                    gradients, _ = stage.weight_layer(
                        w.active, weight_layer, at, gradients, stashed_for_w, residuals
                    )
            return Pair(x, cotangent, stash, w_residuals, gradients)

        return ordered(halves, pair._replace(stash=stash, w_residuals=w_residuals)), None

    return turn


def _read_first(parts: list[Tree], n: int, *at: Array) -> tuple[list[Tree], Tree]:
    """Barriers: what is at a place of the buffers of a segment is read before anything is written in them, or XLA would
    copy them. Each array has a barrier of its own, since the results of a barrier vary over all axes over which any
    operand does.
    """
    leaves, tree = jax.tree.flatten(parts[n][0])
    both = [lax.optimization_barrier((leaf, read(leaf, *at))) for leaf in leaves]
    buffers, values = zip(*both, strict=True) if both else ((), ())
    return put(parts, n, [jax.tree.unflatten(tree, buffers)]), jax.tree.unflatten(tree, values)
