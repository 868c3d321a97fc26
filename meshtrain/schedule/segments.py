"""Which ticks are compiled together: a schedule as a few segments, each a loop over ticks with the same work.

    interleaved, 4 stages, 16 microbatches, 2 chunks:      F is forward, H the loss head, B backward

    F F F F F F F   HB HB HB HB  . . . .  HB HB HB HB ... HB HB HB HB   B B B B B B B
    7 x F           3 x ( 4 x FHB        4 x FB )         4 x FHB       7 x B

The head stands beside the slots because with chunks most ticks have none, and it may cost as much as several layers. So do the
embedding and its gradient, which all stages may share: the embedding of a microbatch is looked up one F before it enters, and what
leaves virtual stage 0 returns to it one B later. So they fall into the ticks that have a head.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from meshtrain.schedule.shifted import one_earlier, one_later
from meshtrain.schedule.table import B, F, Table, W


class Work(NamedTuple):
    """Whether any stage does F, the loss head, B, W; whether the next F's embedding is looked up, and the last B's gradient given to it."""

    forward: bool
    head: bool
    backward: bool
    weight: bool
    enter: bool
    leave: bool


@dataclass(frozen=True)
class Segment:
    """`body`, done `repeats` times, from tick `first` on: a sequence of (number of ticks, work in each of them)."""

    first: int
    repeats: int
    body: tuple[tuple[int, Work], ...]

    @property
    def period(self) -> int:
        return sum(ticks for ticks, _ in self.body)


def segments(table: Table, limit: int = 13) -> list[Segment]:
    """The table's ticks in order, in segments with `limit` bodies at most, so that code size does not grow with the
    number of microbatches. A table too irregular for that does some work idly: first embeddings, in all ticks that are alike but for
    them; then neighbours are joined, those first that waste least.
    """
    work = needed(table)
    found = _repeats(_runs(work))
    if _bodies(found) > limit:
        for alike in np.unique(work[:, :4], axis=0):
            ticks = (work[:, :4] == alike).all(axis=1)
            work[ticks, 4:] = work[ticks, 4:].any(axis=0)
        found = _repeats(_runs(work))
    if _bodies(found) > limit:
        weights = (8, 8, 8 if table.split else 16, 8, 1, 1)
        found = _repeats(_merged(_runs(work), weights, limit))
    return found


def _bodies(found: list[Segment]) -> int:
    return sum(len(segment.body) for segment in found)


def needed(table: Table) -> np.ndarray:
    """bool [ticks, 6]: what any stage does in each tick, as `Work` has it."""
    used = np.asarray((table.cells[..., 0] >= 0).any(axis=1))
    when = table.when()

    def at(ticks: np.ndarray) -> np.ndarray:
        found = np.zeros(table.ticks, bool)
        found[ticks] = True
        return found

    forward, backward = np.flatnonzero(used[:, F]), np.flatnonzero(used[:, B])
    enter = one_earlier(at(when[F, 0]), forward, False)
    leave = one_later(at(when[B, 0]), backward, False)
    return np.stack([used[:, F], at(when[F, -1]), used[:, B], used[:, W], enter, leave], axis=1)


def _repeats(runs: list[tuple[int, Work]]) -> list[Segment]:
    """Folds runs that come again and again, up to four at a time."""
    found, i, tick = [], 0, 0
    while i < len(runs):
        folds = [(_count(runs, i, length), length) for length in range(1, 5)]
        repeats, length = max(folds, key=lambda fold: ((fold[0] - 1) * fold[1], -fold[1]))
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


def forward_alone(found: list[Segment]) -> list[Segment]:
    """The same ticks with their forwards, heads and embeddings alone; without the segments that have none."""

    def left(work: Work) -> Work:
        return Work(work.forward, work.head, False, False, work.enter, False)

    bodies = [tuple((ticks, left(work)) for ticks, work in segment.body) for segment in found]
    return [replace(s, body=body) for s, body in zip(found, bodies, strict=True) if any(w.forward for _, w in body)]


def work_per_tick(found: list[Segment]) -> np.ndarray:
    """bool [ticks, 6]: what the compiled program does in each tick, idly or not, as `Work` has it."""
    turns = [(segment.repeats, [work for ticks, work in segment.body for _ in range(ticks)]) for segment in found]
    return np.array([work for repeats, turn in turns for work in turn * repeats])


def idle_shares(table: Table) -> dict[str, float]:
    """Of the slots that a program without conditionals computes, the share that the table leaves idle: of forward, backward (with the
    weights' gradients where the table splits them) and the loss head, which all stages share."""
    done = work_per_tick(segments(table)).sum(axis=0)
    asked = table.microbatches * table.chunks
    backward = done[2] + done[3]
    return {
        "forward": 1 - asked / done[0],
        "backward": 1 - asked * (2 if table.split else 1) / backward,
        "head": 1 - table.microbatches / done[1],
    }


def _runs(work: np.ndarray) -> list[tuple[int, Work]]:
    """Runs of equal rows of `work` (bool [ticks, 6]) as (ticks, row)."""
    return [(len(list(same)), row) for row, same in itertools.groupby(Work(*row) for row in work.tolist())]


def _merged(runs: list[tuple[int, Work]], weights: tuple[int, ...], limit: int) -> list[tuple[int, Work]]:
    """At most `limit` of them. Joined neighbours do the union of their work; `weights` is the relative cost of each kind in one tick."""

    def waste(i: int) -> int:
        (left_ticks, left), (right_ticks, right) = runs[i : i + 2]
        kinds = zip(weights, left, right, strict=True)
        return sum(weight * (left_ticks * (y and not x) + right_ticks * (x and not y)) for weight, x, y in kinds)

    wastes = [waste(i) for i in range(len(runs) - 1)]
    while wastes and (len(runs) > limit or min(wastes) == 0):
        i = wastes.index(min(wastes))
        (left_ticks, left), (right_ticks, right) = runs[i : i + 2]
        union = Work(*(x or y for x, y in zip(left, right, strict=True)))
        runs[i : i + 2] = [(left_ticks + right_ticks, union)]
        wastes[max(i - 1, 0) : i + 2] = [waste(j) for j in range(max(i - 1, 0), min(i + 1, len(runs) - 1))]
    return runs
