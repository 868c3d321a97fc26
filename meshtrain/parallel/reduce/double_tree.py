"""Two binary trees, each for half of the array (Sanders, Speck & Träff 2009; NCCL 2.4).

A number goes up a tree, summed on the way, and comes down again: few steps. But half of a tree are leaves, which send
one message up and none down. So there are two trees, the second the first moved on by one: whoever is a leaf of one is
within the other.

    n = 8     first tree   7          second tree   0
                           │                        │
                           3                        4
                        ┌──┴──┐                  ┌──┴──┐
                        1     5                  2     6
                       ┌┴┐   ┌┴┐                ┌┴┐   ┌┴┐
                       0 2   4 6                1 3   5 7

Each half goes in p pieces, one behind the other, so that all levels work at once. A device sends up in both trees, and
hears from two below in the tree that it is within. The edges are coloured so that neither the two up nor the two from
below are alike; then those of a colour make one permutation, in which each device sends one message and receives one:

    step          1         2         3         4         5         6         7         8
    first tree    0 ─0► 1   2 ─0► 1   0 ─1► 1   2 ─1► 1   1 ─1► 3   3 ─0► 7             3 ─1► 7    n = 8, pieces 0 and 1
                  6 ─0► 5   4 ─0► 5   6 ─1► 5   4 ─1► 5             5 ─1► 3
                                      1 ─0► 3   5 ─0► 3

and down the same backwards. It has no reduce-scatter: sums end at the roots.

    steps   at most 4 (p + log2 n), messages of S/2p
    sent    at most 2 S by a device, 2 S (n-1)/n on average
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.allreduce import TREES, pieces_of
from meshtrain.parallel.reduce.algorithms import Axes, Programs, cut, joined


class Edge(NamedTuple):
    tree: int
    child: int
    parent: int


class Message(NamedTuple):
    source: int
    target: int
    chunk: int  # tree x pieces + piece


def all_reduce(x: jax.Array, axes: Axes, pieces: int | None = None) -> jax.Array:
    """The sum over all devices, of any shape."""
    pieces = pieces or pieces_of(x.nbytes)
    up = messages_up(lax.axis_size(axes), pieces)
    # A list, since XLA copies all of an array of which each device changes another part.
    chunks = list(cut(x, TREES * pieces))
    for step in up:
        came = _carried(chunks, axes, step)
        for number in sorted({m.chunk for m in step}):
            receives = _among(axes, [m.target for m in step if m.chunk == number])
            chunks[number] += jnp.where(receives, came, 0)
    for step in reversed(up):
        back = [Message(m.target, m.source, m.chunk) for m in step]
        came = _carried(chunks, axes, back)
        for number in sorted({m.chunk for m in back}):
            receives = _among(axes, [m.target for m in back if m.chunk == number])
            chunks[number] = jnp.where(receives, came, chunks[number])
    return joined(jnp.stack(chunks), x)


def _carried(
    chunks: Sequence[jax.Array], axes: Axes, messages: Sequence[Message]
) -> jax.Array:
    """Each device's message sent: what came, zeros where nothing did."""
    mine = chunks[messages[0].chunk]
    for number in sorted({m.chunk for m in messages}):
        sends = _among(axes, [m.source for m in messages if m.chunk == number])
        mine = jnp.where(sends, chunks[number], mine)
    return lax.ppermute(mine, axes, [(m.source, m.target) for m in messages])


def _among(axes: Axes, ranks: Sequence[int]) -> jax.Array:
    """Returns whether this device is one of them."""
    return jnp.asarray(np.isin(np.arange(lax.axis_size(axes)), ranks))[
        lax.axis_index(axes)
    ]


DOUBLE_TREE = Programs(all_reduce)


# --- who sends what to whom, step by step, on the way to the roots


def first_tree(n: int) -> dict[int, int]:
    """Parents by child: numbered from left to right, so that even numbers are leaves."""
    parents: dict[int, int] = {}

    def build(first: int, count: int, parent: int | None) -> None:
        if not count:
            return
        # As many to the left as a full tree has: 2^l - 1.
        left = (1 << (count.bit_length() - 1)) - 1
        if parent is not None:
            parents[first + left] = parent
        build(first, left, first + left)
        build(first + left + 1, count - left - 1, first + left)

    build(0, n, None)
    return parents


def edges(n: int) -> list[Edge]:
    """The edges of both trees."""
    return [
        Edge(t, (c + t) % n, (p + t) % n)
        for t in range(TREES)
        for c, p in sorted(first_tree(n).items())
    ]


@functools.cache
def colours(n: int) -> dict[Edge, int]:
    """0 or 1 for each edge, unlike that of the child's other edge up and that of the parent's other edge from below.

    Edges that must differ form paths and rings in which both reasons take turns, so that two colours do.
    """
    differ: dict[Edge, list[Edge]] = defaultdict(list)
    every = edges(n)
    for a in every:
        differ[a] = [
            b for b in every if b != a and (b.child == a.child or b.parent == a.parent)
        ]
    colour_of: dict[Edge, int] = {}
    for begin in every:
        waiting = [] if begin in colour_of else [(begin, 0)]
        while waiting:
            edge, colour = waiting.pop()
            if edge not in colour_of:
                colour_of[edge] = colour
                waiting += [(other, 1 - colour) for other in differ[edge]]
    return colour_of


@functools.lru_cache(maxsize=256)
def messages_up(n: int, pieces: int) -> tuple[tuple[Message, ...], ...]:
    """Messages to the roots, by step: each edge of the step's colour carries its next piece, if that has come from all
    below.
    """
    coloured = colours(n)
    passed = dict.fromkeys(coloured, 0)
    below = {
        edge: [e for e in coloured if (e.tree, e.parent) == (edge.tree, edge.child)]
        for edge in coloured
    }
    steps: list[tuple[Message, ...]] = []
    while any(count < pieces for count in passed.values()):
        ready = [
            edge
            for edge, colour in coloured.items()
            if colour == len(steps) % 2
            and passed[edge] < pieces
            and all(passed[lower] > passed[edge] for lower in below[edge])
        ]
        steps.append(
            tuple(
                Message(e.child, e.parent, e.tree * pieces + passed[e]) for e in ready
            )
        )
        for edge in ready:
            passed[edge] += 1
    return tuple(step for step in steps if step)
