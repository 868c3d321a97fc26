"""Clocks that are compiled together: a schedule as a few phases (warm-up, steady state, cool-down), each a loop over
clocks with the same ops.

    interleaved, 4 stages, 16 microbatches, 2 chunks:      F is forward, H the loss head, B backward

    F F F F F F F   HB HB HB HB  . . . .  HB HB HB HB ... HB HB HB HB   B B B B B B B
    7 x F           3 x ( 4 x FHB        4 x FB )         4 x FHB       7 x B

The head stands beside the slots because with chunks most clocks have none, and it may cost as much as several layers.
So do the embedding and its gradient, which all stages may share. The embedding of a microbatch is looked up one F
before it enters, and its gradient is computed one B after the microbatch left virtual stage 0. With pairs, whose last B
come a clock later, it is computed in that clock. So they fall into the clocks that have a head.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from meshtrain.schedule.table import B, F, G, R, Table, W

Run = tuple[int, "Ops"]  # a number of clocks, and the ops in each of them


class Ops(NamedTuple):
    """Whether any stage does F, the loss head, B, W; whether the next F's embedding is looked up, and the last B's
    gradient given to it.
    """

    forward: bool
    head: bool
    backward: bool
    weight: bool
    enter: bool
    leave: bool


@dataclass(frozen=True)
class Phase:
    """`body`, done `repeats` times, from clock `first` on."""

    first: int
    repeats: int
    body: tuple[Run, ...]

    @property
    def period(self) -> int:
        return sum(clocks for clocks, _ in self.body)


def phases(table: Table, limit: int = 13) -> list[Phase]:
    """Returns the table's clocks in order, in phases with `limit` bodies at most, so that code size does not grow with
    the number of microbatches. A table too irregular for that does some ops idly: first embeddings, in all clocks that
    are alike but for them; then neighbours are joined, those first that waste least. Collectives over data
    cut phases, and may have four bodies more.
    """
    ops = table_ops(table)
    limit = limit + 4 * table.has_sends
    bounds = list(itertools.pairwise([*boundaries(table), table.clocks]))

    def folded(ops: np.ndarray) -> list[Phase]:
        return [
            phase
            for first, end in bounds
            for phase in _fold(_runs(ops[first:end]), first)
        ]

    def bodies(phases: list[Phase]) -> int:
        return sum(
            len(phase.body)
            for section in sections(table, phases)
            for phase in section.phases
        )

    for first, end in bounds:
        # What travels should find a loop to travel beside, of all the clocks.
        if (table.sends == first).any():
            _embed_alike(ops[first:end])
    if bodies(folded(ops)) > limit:
        _embed_alike(ops)
    if bodies(folded(ops)) > limit:
        weights = (8, 8, 8 if table.split else 16, 8, 1, 1)
        joined = _join(_runs(ops), weights, limit)
        ops = np.array([row for clocks, row in joined for _ in range(clocks)])
    return folded(ops)


def _embed_alike(ops: np.ndarray) -> None:
    """Has clocks that are alike but for embeddings, bool [clocks, 6], all compute those that one of them does."""
    for alike in np.unique(ops[:, :4], axis=0):
        clocks = (ops[:, :4] == alike).all(axis=1)
        ops[clocks, 4:] = ops[clocks, 4:].any(axis=0)


def boundaries(table: Table) -> list[int]:
    """Returns the clocks before which something over data begins, or has to be there, and clock 0."""
    chunk = table.chunk_of(np.arange(table.virtual_stages))
    begin = table.sends
    needed = [
        int(table.when()[F, chunk == c].min()) for c in np.flatnonzero(begin[G] >= 0)
    ]
    return sorted({0, *begin[begin >= 0].tolist(), *needed})


class ClockSection(NamedTuple):
    """Clocks beside which collectives over data travel, `repeats` times as many clocks with the same ops."""

    phases: list[Phase]  # of the first time
    # the chunk whose weights are gathered meanwhile, each time; empty: none
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]  # likewise whose gradient is reduced
    repeats: int
    clocks: int  # of each time


def sections(table: Table, phases: list[Phase]) -> list[ClockSection]:
    """Returns the `phases` of a table in sections that begin at its boundaries; neighbours that are alike become
    one.
    """
    found: list[ClockSection] = []
    for first, end in itertools.pairwise([*boundaries(table), table.clocks]):
        inside = [phase for phase in phases if first <= phase.first < end]
        sent = [
            tuple(np.flatnonzero(table.sends[kind] == first).tolist())
            for kind in (G, R)
        ]
        section = ClockSection(inside, sent[0], sent[1], 1, end - first)
        if found and _alike(found[-1], section):
            last = found.pop()
            section = last._replace(
                gathers=last.gathers + section.gathers,
                reduces=last.reduces + section.reduces,
                repeats=last.repeats + 1,
            )
        found.append(section)
    return found


def _alike(left: ClockSection, right: ClockSection) -> bool:
    def shape(section: ClockSection) -> Any:
        sent = bool(section.gathers), bool(section.reduces)
        return sent, [(phase.repeats, phase.body) for phase in section.phases]

    return shape(left) == shape(right)


def forward_only_phases(phases: list[Phase]) -> list[Phase]:
    """Returns the same clocks with their forwards, heads and embeddings alone; without the phases that have none."""
    forward = [
        replace(
            phase,
            body=tuple(
                (n, ops._replace(backward=False, weight=False, leave=False))
                for n, ops in phase.body
            ),
        )
        for phase in phases
    ]
    return [phase for phase in forward if any(ops.forward for _, ops in phase.body)]


def ops_per_clock(phases: list[Phase]) -> np.ndarray:
    """Returns bool [clocks, 6]: what the compiled program does in each clock, idly or not, as `Ops` has it."""
    turns = [
        (phase.repeats, [ops for clocks, ops in phase.body for _ in range(clocks)])
        for phase in phases
    ]
    return np.array([ops for repeats, turn in turns for ops in turn * repeats])


def idle_fractions(table: Table) -> dict[str, float]:
    """Returns the share that the table leaves idle of the slots that a program without conditionals computes: of
    forward, backward (with the weights' gradients where the table splits them) and the loss head, which all stages
    share.
    """
    computed = ops_per_clock(phases(table)).sum(axis=0)
    used = table.microbatches * table.chunks
    return {
        "forward": 1 - used / computed[0],
        "backward": 1 - used * (2 if table.split else 1) / (computed[2] + computed[3]),
        "head": 1 - table.microbatches / computed[1],
    }


def table_ops(table: Table) -> np.ndarray:
    """Returns bool [clocks, 6]: what any stage does in each clock, as `Ops` has it."""
    used = np.asarray((table.cells[..., 0] >= 0).any(axis=1))
    when = table.when()

    def mark(clocks: np.ndarray) -> np.ndarray:
        mask = np.zeros(table.clocks, bool)
        mask[clocks] = True
        return mask

    enter = one_earlier(mark(when[F, 0]), np.flatnonzero(used[:, F]), False)
    leave = mark(when[B, 0])
    if not table.paired:
        leave = one_later(leave, np.flatnonzero(used[:, B]), False)
    return np.stack(
        [used[:, F], mark(when[F, -1]), used[:, B], used[:, W], enter, leave], axis=1
    )


def one_earlier(array: np.ndarray, clocks: np.ndarray, nothing: Any) -> np.ndarray:
    """Returns `array` [all clocks, ..] with what is done in each of `clocks` moved to the one before it among them, and
    `nothing` elsewhere: so a message has a whole slot to travel in.
    """
    moved = np.full_like(array, nothing)
    moved[clocks[:-1]] = array[clocks[1:]]
    return moved


def one_later(array: np.ndarray, clocks: np.ndarray, nothing: Any) -> np.ndarray:
    """Returns an array whose entries at `clocks` are moved, each to the next one of `clocks`."""
    moved = np.full_like(array, nothing)
    moved[clocks[1:]] = array[clocks[:-1]]
    return moved


def _runs(ops: np.ndarray) -> list[Run]:
    """Returns runs of equal rows of `ops`, bool [clocks, 6]."""
    return [
        (len(list(same)), row)
        for row, same in itertools.groupby(Ops(*row) for row in ops.tolist())
    ]


def _fold(runs: list[Run], clock: int) -> list[Phase]:
    """Folds runs, the first of which begins with `clock`, that come again and again, up to four at a time."""

    def repetitions(length: int) -> int:
        n = 1
        while runs[i + n * length : i + (n + 1) * length] == runs[i : i + length]:
            n += 1
        return n

    folded = []
    i = 0
    while i < len(runs):
        folds = [(repetitions(length), length) for length in range(1, 5)]
        repeats, length = max(
            folds, key=lambda fold: ((fold[0] - 1) * fold[1], -fold[1])
        )
        phase = Phase(clock, repeats, tuple(runs[i : i + length]))
        folded.append(phase)
        i += repeats * length
        clock += repeats * phase.period
    return folded


def _join(runs: list[Run], weights: tuple[int, ...], limit: int) -> list[Run]:
    """Joins neighbours, which then do the union of their ops, until there are `limit`; `weights` is the relative cost
    of each op in a clock.
    """

    def waste(i: int) -> int:
        (left_clocks, left), (right_clocks, right) = runs[i : i + 2]
        kinds = zip(weights, left, right, strict=True)
        return sum(
            weight * (left_clocks * (y and not x) + right_clocks * (x and not y))
            for weight, x, y in kinds
        )

    wastes = [waste(i) for i in range(len(runs) - 1)]
    while wastes and (len(runs) > limit or min(wastes) == 0):
        i = wastes.index(min(wastes))
        (left_clocks, left), (right_clocks, right) = runs[i : i + 2]
        union = Ops(*(x or y for x, y in zip(left, right, strict=True)))
        runs[i : i + 2] = [(left_clocks + right_clocks, union)]
        wastes[max(i - 1, 0) : i + 2] = [
            waste(j) for j in range(max(i - 1, 0), min(i + 1, len(runs) - 1))
        ]
    return runs
