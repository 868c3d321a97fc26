"""Two binary trees: who sends what to whom, step by step, on the way to the roots. No JAX. The drawing stands in `double_tree`."""

import functools
from collections import defaultdict
from typing import NamedTuple

TREES = 2
PIECE, MOST_PIECES = 2**18, 16  # bytes that are worth a message of their own; pieces beyond which a program grows long


class Edge(NamedTuple):
    tree: int
    child: int
    parent: int


class Message(NamedTuple):
    source: int
    target: int
    chunk: int  # tree x pieces + piece


def parents(n: int) -> dict[int, int]:
    """The first tree, by child: numbered from left to right, so that even numbers are leaves."""
    found: dict[int, int] = {}

    def build(first: int, count: int, parent: int | None) -> None:
        if not count:
            return
        # As many to the left as a full tree has: 2^l - 1.
        left = (1 << (count.bit_length() - 1)) - 1
        if parent is not None:
            found[first + left] = parent
        build(first, left, first + left)
        build(first + left + 1, count - left - 1, first + left)

    build(0, n, None)
    return found


def edges(n: int) -> list[Edge]:
    """Of both trees."""
    return [Edge(t, (c + t) % n, (p + t) % n) for t in range(TREES) for c, p in sorted(parents(n).items())]


@functools.cache
def colours(n: int) -> dict[Edge, int]:
    """0 or 1 for each edge, unlike that of the child's other edge up and that of the parent's other edge from below.

    Edges that must differ form paths and rings in which both reasons take turns, so that two colours do.
    """
    differ: dict[Edge, list[Edge]] = defaultdict(list)
    every = edges(n)
    for a in every:
        differ[a] = [b for b in every if b != a and (b.child == a.child or b.parent == a.parent)]
    found: dict[Edge, int] = {}
    for begin in every:
        waiting = [] if begin in found else [(begin, 0)]
        while waiting:
            edge, colour = waiting.pop()
            if edge not in found:
                found[edge] = colour
                waiting += [(other, 1 - colour) for other in differ[edge]]
    return found


@functools.lru_cache(maxsize=256)
def upwards(n: int, pieces: int) -> tuple[tuple[Message, ...], ...]:
    """Step by step what is sent to the roots: each edge of the step's colour carries its next piece, if that has come from all below."""
    coloured = colours(n)
    passed = dict.fromkeys(coloured, 0)
    below = {edge: [e for e in coloured if (e.tree, e.parent) == (edge.tree, edge.child)] for edge in coloured}
    steps: list[tuple[Message, ...]] = []
    while any(count < pieces for count in passed.values()):
        ready = [
            edge
            for edge, colour in coloured.items()
            if colour == len(steps) % 2
            and passed[edge] < pieces
            and all(passed[lower] > passed[edge] for lower in below[edge])
        ]
        steps.append(tuple(Message(e.child, e.parent, e.tree * pieces + passed[e]) for e in ready))
        for edge in ready:
            passed[edge] += 1
    return tuple(step for step in steps if step)


def pieces_of(nbytes: int) -> int:
    """Into how many pieces each half of an array of so many bytes is cut."""
    return min(max(nbytes // (TREES * PIECE), 1), MOST_PIECES)
