"""A cell `F8+B4`: one microbatch's forward and another's backward in one loop over layers, so that each hides the other's messages.

    F        layer 0   layer 1   layer 2   layer 3          B        layer 3   layer 2   layer 1   layer 0

    turn              0           1           2           3
    products        0F 3B       1F 2B       2F 1B       3F 0B
    messages       of 0F under the products of 3B, and the other way round

The two need nothing of each other: what DualPipe builds by hand (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1) XLA's
scheduler does of itself where both stand in the body of one loop. Where no stage has a forward any more, `I4+W3` does the same: the products
of a weight gradient, which sends nothing, hide the messages of an input gradient.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain import xla
from meshtrain.parallel.pipeline.stage import Slot, Stage, read

Tree = Any


class Pair(NamedTuple):
    """What the loop goes on with from layer to layer."""

    x: jax.Array  # F's stream; where there is no F, what it was
    cotangent: jax.Array  # B's
    stash: list[Tree]
    w_residuals: list[Tree]
    gradients: Tree


def run_pair(
    stage: Stage, pair: Pair, f: Slot | None, b: Slot, b_place: jax.Array | None, w: tuple[Slot, jax.Array] | None, skips: bool
) -> Pair:  # fmt: skip
    """Runs B's chunk, or where the table splits it I's, which leaves at `b_place` what W needs, in one loop with F's or W's; `w` is W's slot
    and its place in `w_residuals`. `skips`: a half that is idle is skipped.
    """
    segments = stage.segments
    edges = {0, stage.layers, *(s.first for s in segments), *(stage.layers - s.behind for s in segments)}
    for first, behind in itertools.pairwise(sorted(edges)):
        ahead = next(n for n, s in enumerate(segments) if s.first <= first < s.behind)
        back = next(n for n, s in enumerate(segments) if s.first <= stage.layers - 1 - first < s.behind)
        turn = _turn(stage, ahead, back, f, b, b_place, w, skips)
        pair = lax.scan(turn, pair, jnp.arange(first, behind, dtype=jnp.int32))[0]
    return pair


def _turn(stage: Stage, ahead: int, back: int, f: Slot | None, b: Slot, b_place: jax.Array | None, w: tuple[Slot, jax.Array] | None, skips: bool) -> Callable:  # fmt: skip
    """Returns the loop's body, for layers of the segments `ahead` forward and `back` backward."""
    segments = stage.segments
    forward_layer = stage.forward_layer(segments[ahead], f) if f else None
    backward_layer = (
        stage.backward_layer(segments[back], b) if b_place is None else stage.input_layer(segments[back], b_place, b)
    )
    weight_layer = stage.weight_layer(segments[back], w[0]) if w else None

    def turn(pair: Pair, i: jax.Array) -> tuple[Pair, None]:
        x, cotangent, stash, w_residuals, gradients = pair
        j = stage.layers - 1 - i - segments[back].first
        part, stashed = _read_first(stash[back], b.place, j)
        stash = [*stash[:back], part, *stash[back + 1 :]]
        if weight_layer:
            slot, place = w
            of_w = read(stash[back], slot.place, j)
            part, residuals = _read_first(w_residuals[back], place, j)
            w_residuals = [*w_residuals[:back], part, *w_residuals[back + 1 :]]
        if forward_layer:
            with jax.named_scope(xla.FORWARD):
                run = _if(skips, f.active, forward_layer)
                x, part = run((x, stash[ahead]), i - segments[ahead].first)
                stash = [*stash[:ahead], part, *stash[ahead + 1 :]]
        with jax.named_scope(xla.BACKWARD):
            run = _if(skips, b.active, lambda carry, i: backward_layer(carry, stashed, i))
            if b_place is None:
                cotangent, gradients = run((cotangent, gradients), j)
            else:
                cotangent, part = run((cotangent, w_residuals[back]), j)
                w_residuals = [*w_residuals[:back], part, *w_residuals[back + 1 :]]
            if weight_layer:
                run = _if(skips, slot.active, lambda gradients, i: weight_layer(gradients, of_w, residuals, i))
                gradients = run(gradients, j)
        return Pair(x, cotangent, stash, w_residuals, gradients), None

    return turn


def _read_first(buffers: Tree, *at: jax.Array) -> tuple[Tree, Tree]:
    """Barriers: what is at a place is read before anything is written in the buffers, or XLA would copy them. Of each array by itself, since
    what goes through a barrier varies over all axes over which anything beside it does.
    """
    leaves, tree = jax.tree.flatten(buffers)
    both = [lax.optimization_barrier((leaf, read(leaf, *at))) for leaf in leaves]
    first, second = zip(*both, strict=True) if both else ((), ())
    return jax.tree.unflatten(tree, first), jax.tree.unflatten(tree, second)


def _if(skips: bool, active: jax.Array, run: Callable) -> Callable:
    """`run`, skipped where it is idle and that is worth a branch."""
    return partial(lax.cond, active, run, lambda carry, _: carry) if skips else run
