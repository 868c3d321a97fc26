"""Two binary trees, each for half of the array (Sanders, Speck & Träff 2009; NCCL 2.4).

A number goes up a tree, summed on the way, and comes down again: few steps. But half of a tree are leaves, which send one message up
and none down. So there are two trees, the second the first moved on by one: whoever is a leaf of one is within the other.

    n = 8     first tree   7          second tree   0
                           │                        │
                           3                        4
                        ┌──┴──┐                  ┌──┴──┐
                        1     5                  2     6
                       ┌┴┐   ┌┴┐                ┌┴┐   ┌┴┐
                       0 2   4 6                1 3   5 7

Each half goes in p pieces, one behind the other, so that all levels work at once. A device sends up in both trees, and hears from two
below in the tree that it is within. The edges are coloured so that neither the two up nor the two from below are alike; then those of
a colour make one permutation, in which each device sends one message and receives one:

    step          1         2         3         4         5         6         7         8
    first tree    0 ─0► 1   2 ─0► 1   0 ─1► 1   2 ─1► 1   1 ─1► 3   3 ─0► 7             3 ─1► 7       n = 8, pieces 0 and 1
                  6 ─0► 5   4 ─0► 5   6 ─1► 5   4 ─1► 5             5 ─1► 3
                                      1 ─0► 3   5 ─0► 3

and down the same backwards.

    steps   at most 4 (p + log2 n), messages of S/2p
    sent    at most 2 S by a device, 2 S (n-1)/n on average

It has no reduce-scatter: sums end at the roots. Who sends what is in `trees`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.parallel.reduce.algorithms.chunks import Axes, cut, joined
from meshtrain.parallel.reduce.algorithms.trees import TREES, Message, pieces_of, upwards


def all_reduce(x: jax.Array, axes: Axes, pieces: int | None = None) -> jax.Array:
    """The sum over all devices, of any shape."""
    pieces = pieces or pieces_of(x.nbytes)
    up = upwards(lax.axis_size(axes), pieces)
    # A list, since XLA copies all of an array of which each device changes another part.
    chunks = list(cut(x, TREES * pieces))
    for step in up:
        came = _carried(chunks, axes, step)
        for number in sorted({m.chunk for m in step}):
            here = _among(axes, [m.target for m in step if m.chunk == number])
            chunks[number] += jnp.where(here, came, 0)
    for step in reversed(up):
        back = [Message(m.target, m.source, m.chunk) for m in step]
        came = _carried(chunks, axes, back)
        for number in sorted({m.chunk for m in back}):
            here = _among(axes, [m.target for m in back if m.chunk == number])
            chunks[number] = jnp.where(here, came, chunks[number])
    return joined(jnp.stack(chunks), x)


def _carried(chunks: Sequence[jax.Array], axes: Axes, messages: Sequence[Message]) -> jax.Array:
    """Each device's message sent: what came, zeros where nothing did."""
    mine = chunks[messages[0].chunk]
    for number in sorted({m.chunk for m in messages}):
        here = _among(axes, [m.source for m in messages if m.chunk == number])
        mine = jnp.where(here, chunks[number], mine)
    return lax.ppermute(mine, axes, [(m.source, m.target) for m in messages])


def _among(axes: Axes, ranks: Sequence[int]) -> jax.Array:
    """Whether this device is one of them."""
    return jnp.asarray(np.isin(np.arange(lax.axis_size(axes)), ranks))[lax.axis_index(axes)]
