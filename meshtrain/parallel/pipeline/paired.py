"""A cell `F8+B4`: one microbatch's forward and another's backward in one loop over layers, so that each hides the other's messages.

    F        layer 0   layer 1   layer 2   layer 3          B        layer 3   layer 2   layer 1   layer 0

    turn              0           1           2           3
    products        0F 3B       1F 2B       2F 1B       3F 0B
    messages       of 0F under the products of 3B, and the other way round

The two need nothing of each other: what DualPipe builds by hand (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1) XLA's
scheduler does of itself where both stand in the body of one loop. Each chain's last message has nothing left to travel under.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain import xla
from meshtrain.parallel.pipeline.stage import Slot, Stage, read

Tree = Any


def pair(
    stage: Stage, x: jax.Array, cotangent: jax.Array, stash: list[Tree], into: Tree, slots: tuple[Slot, Slot], w_place: jax.Array | None, skips: bool
) -> tuple[jax.Array, jax.Array, list[Tree], Tree]:  # fmt: skip
    """Returns the output of F's chunk for `x`, the input gradient of B's for `cotangent`, the stash, and `into` with what B adds: gradients of
    weights, or where the table splits it, at `w_place`, what W needs. `skips`: a half that is idle is skipped.
    """
    segments, (f, b) = stage.segments, slots
    edges = {0, stage.layers, *(s.first for s in segments), *(stage.layers - s.behind for s in segments)}

    for first, behind in itertools.pairwise(sorted(edges)):
        ahead = next(n for n, s in enumerate(segments) if s.first <= first < s.behind)
        back = next(n for n, s in enumerate(segments) if s.first <= stage.layers - 1 - first < s.behind)
        forward_layer = stage.forward_layer(segments[ahead], f)
        if w_place is None:
            backward_layer = stage.backward_layer(segments[back], b)
        else:
            backward_layer = stage.input_layer(segments[back], w_place, b)

        def turn(carry: tuple, i: jax.Array, ahead: int = ahead, back: int = back, forward_layer: Callable = forward_layer, backward_layer: Callable = backward_layer) -> tuple[tuple, None]:  # fmt: skip
            x, cotangent, stash, into = carry
            j = stage.layers - 1 - i - segments[back].first
            part, stashed = _read_first(stash[back], read(stash[back], b.place, j))
            stash = [*stash[:back], part, *stash[back + 1 :]]
            with jax.named_scope(xla.FORWARD):
                run = _if(skips, f.active, forward_layer)
                x, part = run((x, stash[ahead]), i - segments[ahead].first)
                stash = [*stash[:ahead], part, *stash[ahead + 1 :]]
            with jax.named_scope(xla.BACKWARD):
                run = _if(skips, b.active, lambda carry, i: backward_layer(carry, stashed, i))
                if w_place is None:
                    cotangent, into = run((cotangent, into), j)
                else:
                    cotangent, part = run((cotangent, into[back]), j)
                    into = [*into[:back], part, *into[back + 1 :]]
            return (x, cotangent, stash, into), None

        indices = jnp.arange(first, behind, dtype=jnp.int32)
        x, cotangent, stash, into = lax.scan(turn, (x, cotangent, stash, into), indices)[0]
    return x, cotangent, stash, into


def _read_first(stash: Tree, stashed: Tree) -> tuple[Tree, Tree]:
    """Barriers: what B takes of the stash is read before F writes there, or XLA would copy the stash. Of each array by itself, since what goes
    through one varies over all axes over which anything beside it does.
    """
    leaves, tree = jax.tree.flatten(stash)
    both = [lax.optimization_barrier(each) for each in zip(leaves, jax.tree.leaves(stashed), strict=True)]
    return jax.tree.unflatten(tree, [buffer for buffer, _ in both]), jax.tree.unflatten(
        tree, [value for _, value in both]
    )


def _if(skips: bool, active: jax.Array, run: Callable) -> Callable:
    """`run`, skipped where it is idle and that is worth a branch."""
    return partial(lax.cond, active, run, lambda carry, _: carry) if skips else run
