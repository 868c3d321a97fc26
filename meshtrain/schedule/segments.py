"""Which ticks are compiled together: a schedule as a few segments, each a loop over ticks with the same work.

    interleaved, 4 stages, 16 microbatches, 2 chunks:      F is forward, H the loss head, B backward

    F F F F F F F   HB HB HB HB  . . . .  HB HB HB HB ... HB HB HB HB   B B B B B B B
    7 x F           3 x ( 4 x FHB        4 x FB )         4 x FHB       7 x B

The head stands beside the slots because with chunks most ticks have none, and it may cost as much as several layers.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from meshtrain.schedule.table import F, Table

Work = tuple[bool, bool, bool, bool]  # whether any stage does F, the loss head, B, W


@dataclass(frozen=True)
class Segment:
    """`body`, done `repeats` times, from tick `first` on: a sequence of (number of ticks, work in each of them)."""

    first: int
    repeats: int
    body: tuple[tuple[int, Work], ...]

    @property
    def period(self) -> int:
        return sum(ticks for ticks, _ in self.body)


def segments(table: Table, limit: int = 8) -> list[Segment]:
    """The table's ticks in order, in segments with `limit` bodies at most, so that code size does not grow with the
    number of microbatches. A table too irregular for that does some work idly: neighbours are joined, those first
    that waste least.
    """
    used = (table.cells[..., 0] >= 0).any(axis=1)
    head = np.zeros(table.ticks, bool)
    head[table.when()[F, -1]] = True
    work = np.insert(used, 1, head, axis=1)
    weights = (1, 1, 1 if table.split else 2, 1)
    runs = [(end - start, mask) for start, end, mask in _merge_runs(work, weights, table.ticks)]
    found = _repeats(runs)
    if sum(len(segment.body) for segment in found) > limit:
        found = _repeats([(end - start, mask) for start, end, mask in _merge_runs(work, weights, limit)])
    return found


def _repeats(runs: list[tuple[int, Work]]) -> list[Segment]:
    """Folds runs that come again and again, up to four at a time."""
    found, i, tick = [], 0, 0
    while i < len(runs):
        repeats, length = max(
            ((_count(runs, i, q), q) for q in range(1, 5)), key=lambda rq: ((rq[0] - 1) * rq[1], -rq[1])
        )
        segment = Segment(tick, repeats, tuple(runs[i : i + length]))
        found.append(segment)
        i += repeats * length
        tick += repeats * segment.period
    return found


def _count(runs: list[tuple[int, Work]], i: int, length: int) -> int:
    repeats = 1
    while runs[i + repeats * length : i + (repeats + 1) * length] == runs[i : i + length]:
        repeats += 1
    return repeats


def work_per_tick(found: list[Segment]) -> np.ndarray:
    """bool [ticks, 4]: what the compiled program does in each tick, idly or not (F, head, B, W)."""
    once = [[mask for ticks, mask in segment.body for _ in range(ticks)] for segment in found]
    return np.array([mask for masks, segment in zip(once, found, strict=True) for mask in masks * segment.repeats])


def _merge_runs(work: np.ndarray, weights: tuple[int, ...], limit: int) -> list:
    """Runs of equal rows of `work` (bool [ticks, kinds]) as (first tick, one past the last, row), at most `limit`.

    Joined neighbours do the union of their work; `weights` is the relative cost of each kind in one tick.
    """
    rows = [tuple(row) for row in work.tolist()]
    starts = [t for t in range(len(rows)) if t == 0 or rows[t] != rows[t - 1]]
    runs = [(a, b, rows[a]) for a, b in itertools.pairwise([*starts, len(rows)])]

    def waste(i: int) -> int:
        (a, b, left), (_, c, right) = runs[i : i + 2]
        return sum(
            weight * ((b - a) * (y and not x) + (c - b) * (x and not y))
            for weight, x, y in zip(weights, left, right, strict=True)
        )

    wastes = [waste(i) for i in range(len(runs) - 1)]
    while wastes and (len(runs) > limit or min(wastes) == 0):
        i = wastes.index(min(wastes))
        (first, _, left), (_, end, right) = runs[i : i + 2]
        runs[i : i + 2] = [(first, end, tuple(x or y for x, y in zip(left, right, strict=True)))]
        wastes[max(i - 1, 0) : i + 2] = [waste(j) for j in range(max(i - 1, 0), min(i + 1, len(runs) - 1))]
    return runs
