"""Places where every value waits in the stages' buffers, computed once from a legal table.

A stage has up to four buffers, each exactly as deep as the table needs:

    forward inbox     activations that arrived and wait for F
    backward inbox    cotangents that arrived (or that the loss head left) and wait for B
    stash             what F leaves for B (for W when B is split)
    cotangent stash   what I leaves for W (only when B is split)

Within a clock things happen in this order, and a place is free again after the last read of what it held:

    F                   reads its inbox, writes the stash
    the loss head       writes the backward inbox of the last virtual stage
    B                   reads inbox and stash, writes the cotangent stash
    W                   reads both stashes
    messages            arrive in the inboxes

Where the table has pairs, F and B are one moment, and the loss head comes after it.

In the executor (`compile_table`) messages and the vocabulary are a slot off, so that a whole slot is there for them to
travel in: a cotangent arrives one B later than it is sent (of pairs, which begin at once, at the end of its clock, when
an embedding's gradient is computed too); a microbatch's embedding is looked up one F before it enters, and its gradient
returns one B after it left.

Where idle slots are computed all the same (on accelerators), a write that had to look whether it counts would copy the
old content out and back. So it does not look: what an idle F or B leaves goes to a place that is free just then, which
nobody reads,

    place 0   ■ ■ ■ ■ ■ . . x        ■ held    x what an idle slot leaves
    place 1   . ■ ■ ■ ■ ■ x .

or to one more place, where at such a moment none is free: with gpipe, and with no more microbatches than stages.
"""

import heapq
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import numpy as np

from meshtrain.schedule.phases import (
    Ops,
    Phase,
    one_earlier,
    one_later,
    ops_per_clock,
    phases,
)
from meshtrain.schedule.table import B, F, Numbers, Slot, Table, W

# The moments of a clock in which a buffer is read or written.
FORWARD, HEAD, BACKWARD, WEIGHT, ARRIVAL = range(5)


class Depths(NamedTuple):
    """Places of each buffer: the most entries in any stage at once, 0 where it is never used."""

    stash: int
    f_inbox: int = 0
    b_inbox: int = 0
    cot: int = 0


@dataclass(frozen=True, eq=False)
class Arrival(Generic[Numbers]):
    """Messages of one kind that come one way, at the end of a clock: activations (`slot` F) or cotangents (B).

    They come from the stage before (`shift` 1), from the one after (-1), or from this stage itself (0). With the
    placement `loop` activations travel by 1 and cotangents by -1, around the ring; in a `v` all six may.
    """

    slot: int
    shift: int
    active: Numbers  # bool
    place: Numbers  # where the inbox keeps it; 0 where none arrives


@dataclass(frozen=True, eq=False)
class Buffers:
    """The ops of each stage in each clock, with the places of its buffers that they read and write.

    Arrays are int32 [clocks, stages]; `active`, `first` and `last` are bool [clocks, stages]; `enter`, `exit`,
    `head_out` and `leave` are int32 [clocks], the same for all stages, -1 for none.
    """

    f: Slot[np.ndarray]
    b: Slot[np.ndarray]
    w: Slot[np.ndarray]
    first: np.ndarray  # this F is virtual stage 0
    last: np.ndarray  # this F is the last virtual stage
    # Microbatch whose F runs on virtual stage 0: its embedding is needed
    enter: np.ndarray
    # Microbatch whose F runs on the last virtual stage: the loss head follows in the same clock
    exit: np.ndarray
    # Backward inbox of the last virtual stage's stage: where the head leaves the cotangent
    head_out: np.ndarray
    leave: (
        np.ndarray
    )  # microbatch whose B runs on virtual stage 0: its cotangent is the embedding's
    arrivals: tuple[Arrival[np.ndarray], ...]  # every way that a message takes at all
    depths: Depths


class Life(NamedTuple):
    """From when to when each entry of a buffer is held: moments, [virtual stage, microbatch]; `end` < 0: never."""

    start: np.ndarray
    end: np.ndarray


def lives(table: Table, when: np.ndarray) -> tuple[Life, Life, Life, Life]:
    """Returns the lives of the entries of stash, forward inbox, backward inbox and cotangent stash."""
    last = table.virtual_stages - 1
    arrives = np.zeros_like(
        when
    )  # moment from which the input of F, and that of B, is in the inbox
    arrives[F, 1:] = 5 * when[F, :-1] + ARRIVAL
    arrives[B, :-1] = 5 * when[B, 1:] + ARRIVAL
    # Of a pair both are done before the head.
    arrives[B, last] = 5 * when[F, last] + (WEIGHT if table.paired else HEAD)
    f = 5 * when[F] + FORWARD
    b = 5 * when[B] + BACKWARD
    w = 5 * when[W] + WEIGHT if table.split else b
    never = np.full_like(f, -1)
    waits = f.copy()
    waits[0] = -1  # virtual stage 0 takes the embedding
    return (
        Life(f, w),
        Life(arrives[F], waits),
        Life(arrives[B], b),
        Life(b, w if table.split else never),
    )


def depths(table: Table) -> Depths:
    """Returns the depths of a legal table's buffers, without places."""
    stage = np.broadcast_to(
        table.stage_of(np.arange(table.virtual_stages))[:, None], table.when()[F].shape
    )
    return Depths(
        *(_most_alive(table, life, stage) for life in lives(table, table.when()))
    )


def _most_alive(table: Table, life: Life, stage: np.ndarray) -> int:
    used = life.end >= 0
    change = np.zeros((table.stages, 5 * table.clocks + 1), np.int32)
    np.add.at(change, (stage[used], life.start[used]), 1)
    np.add.at(change, (stage[used], life.end[used] + 1), -1)
    return int(change.cumsum(axis=1).max())


def allocate(table: Table) -> Buffers:
    """Returns places for a legal table (see `validate`), each buffer of a stage coloured as an interval graph: no
    deeper than the most entries in it at once.
    """
    when = table.when()
    last = table.virtual_stages - 1
    stage = table.stage_of(np.arange(table.virtual_stages))
    (stash, f_in, b_in, cot), deep = zip(
        *(_colour(table, life, stage) for life in lives(table, when)), strict=True
    )

    def spread(slot: int, values: np.ndarray) -> np.ndarray:
        """Puts values [virtual stage, microbatch] where that op stands in the table."""
        return _scatter(table, when[slot], stage, values)

    def make_slot(slot: int, **places: np.ndarray) -> Slot[np.ndarray]:
        values = {"microbatch": microbatch, "chunk": chunk, "stash": stash, **places}
        numbers = {name: spread(slot, value) for name, value in values.items()}
        return Slot(active=table.cells[:, :, slot, 0] >= 0, **numbers)

    shape = (table.virtual_stages, table.microbatches)
    microbatches = np.arange(table.microbatches)
    virtual = np.broadcast_to(np.arange(table.virtual_stages)[:, None], shape)
    microbatch = np.broadcast_to(microbatches, shape)
    chunk = table.chunk_of(virtual)
    f = make_slot(F, inbox=f_in)
    return Buffers(
        f=f,
        b=make_slot(B, inbox=b_in, cot=cot),
        w=make_slot(W, cot=cot),
        first=f.active & (spread(F, virtual) == 0),
        last=f.active & (spread(F, virtual) == last),
        enter=_per_clock(table, when[F, 0], microbatches),
        exit=_per_clock(table, when[F, last], microbatches),
        head_out=_per_clock(table, when[F, last], b_in[last]),
        leave=_per_clock(table, when[B, 0], microbatches),
        arrivals=_arrivals(table, when, f_in, b_in),
        depths=Depths(*deep),
    )


def _colour(table: Table, life: Life, stage: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the place of each entry, [virtual stage, microbatch], and the depth.

    Entries of one stage share its buffer. Taking them by start, and the lowest free place for each, uses no more
    places than there are entries alive at one moment.
    """
    places = np.zeros(life.start.shape, np.int32)
    depth = 0
    for s in range(table.stages):
        rows = np.flatnonzero((stage == s) & (life.end >= 0).all(axis=1))
        entries = sorted(
            (life.start[k, j], life.end[k, j], k, j)
            for k in rows.tolist()
            for j in range(table.microbatches)
        )
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (end, place)
        used = 0
        for begin, end, k, j in entries:
            while busy and busy[0][0] < begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, used)
                used += 1
            places[k, j] = heapq.heappop(free)
            heapq.heappush(busy, (end, places[k, j]))
        depth = max(depth, used)
    return places, depth


def _arrivals(
    table: Table, when: np.ndarray, f_in: np.ndarray, b_in: np.ndarray
) -> tuple[Arrival[np.ndarray], ...]:
    """Returns each message at its clock, on the stage that receives it, by the way it comes."""
    k = np.arange(table.virtual_stages - 1)  # messages go between k and k + 1
    low = table.stage_of(k)
    high = table.stage_of(k + 1)
    shift = np.ones_like(k) if table.placement == "loop" else high - low
    arrivals = []
    for slot in (F, B):
        for step in (
            (1, -1, 0) if slot == F else (-1, 1, 0)
        ):  # a cotangent goes back the way the activation came
            way = k[shift == (step if slot == F else -step)]
            if not len(way):
                continue
            sent = when[F, way] if slot == F else when[B, way + 1]
            to, places = (
                (high[way], f_in[way + 1]) if slot == F else (low[way], b_in[way])
            )
            active = _scatter(table, sent, to, np.ones_like(sent)) > 0
            arrivals.append(
                Arrival(slot, step, active, _scatter(table, sent, to, places))
            )
    return tuple(arrivals)


def _scatter(
    table: Table, clock: np.ndarray, stage: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """int32 [clocks, stages] with values [virtual stage, microbatch] at their clocks (-1: nowhere) and stages."""
    out = np.zeros((table.clocks, table.stages), np.int32)
    there = clock >= 0
    out[clock[there], np.broadcast_to(stage[:, None], clock.shape)[there]] = values[
        there
    ]
    return out


def _per_clock(table: Table, clock: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.full(table.clocks, -1, np.int32)
    out[clock] = values
    return out


@dataclass(frozen=True, eq=False)
class CompiledTable(Buffers):
    """A table as the executor runs it: its phases, and `Buffers` with cotangents that arrive one B later.

    `entering` and `leaving` are int32 [clocks], -1 for none.
    """

    table: Table
    phases: list[Phase]
    # microbatch that the next F on virtual stage 0 takes, in the clock of an F
    entering: np.ndarray
    # microbatch that the last B on virtual stage 0 was of, in the clock of a B; of pairs this clock's
    leaving: np.ndarray
    enters_first: int  # the microbatch whose embedding is needed before all clocks
    leaves_last: int  # whose gradient is there after all of them, -1: none
    alternates: bool = False  # see `compile_table`


def compile_table(
    table: Table, skips: bool = False, alike: bool = True
) -> CompiledTable:
    """Returns what the executor does of a legal table.

    If it `skips` idle slots, all clocks are one phase. Else phases compute slots idly, and these need places too. Where
    layers are `alike`, the pairs of a single stage need one place: microbatches alternate in it between the order of
    the layers and the other one (see `pipeline.paired`).
    """
    buffers = allocate(table)
    forward, backward = (
        np.flatnonzero(slot.active.any(axis=1)) for slot in (buffers.f, buffers.b)
    )

    def late(arrival: Arrival[np.ndarray]) -> Arrival[np.ndarray]:
        if arrival.slot == F or table.paired:
            return arrival
        return replace(
            arrival,
            active=one_later(arrival.active, backward, False),
            place=one_later(arrival.place, backward, 0),
        )

    every_op = Ops(
        forward=True,
        head=True,
        backward=True,
        weight=table.split,
        enter=True,
        leave=True,
    )
    all_clocks = Phase(first=0, repeats=1, body=((table.clocks, every_op),))
    compiled = CompiledTable(
        **vars(
            replace(
                buffers, arrivals=tuple(late(arrival) for arrival in buffers.arrivals)
            )
        ),
        table=table,
        phases=[all_clocks] if skips else phases(table),
        entering=one_earlier(buffers.enter, forward, -1),
        leaving=buffers.leave
        if table.paired
        else one_later(buffers.leave, backward, -1),
        enters_first=int(buffers.enter[forward[0]]),
        leaves_last=-1 if table.paired else int(buffers.leave[backward[-1]]),
    )
    if skips:
        return compiled
    if (
        alike
        and table.paired
        and not table.split
        and table.microbatches > table.virtual_stages == 1
    ):
        first = np.zeros_like(compiled.f.stash)
        return replace(
            compiled,
            f=replace(compiled.f, stash=first),
            b=replace(compiled.b, stash=first),
            depths=compiled.depths._replace(stash=1),
            alternates=True,
        )
    return _unmasked(compiled)


def _unmasked(compiled: CompiledTable) -> CompiledTable:
    """Gives the places that idle F and B write numbers that hold nothing then, and as many places as that takes."""
    table = compiled.table
    depths = compiled.depths
    ops = ops_per_clock(compiled.phases)
    stash, _, _, cot = lives(table, table.when())
    f = compiled.f
    b = compiled.b
    f_stash, deep = _idle(table, stash, FORWARD, f.stash, depths.stash, ops)
    b_cot = b.cot
    deeper = 0
    if table.split:
        b_cot, deeper = _idle(table, cot, BACKWARD, b.cot, depths.cot, ops)
    return replace(
        compiled,
        f=replace(f, stash=f_stash),
        b=replace(b, cot=b_cot),
        depths=depths._replace(stash=deep, cot=deeper),
    )


def _idle(
    table: Table,
    life: Life,
    moment: int,
    places: np.ndarray,
    depth: int,
    ops: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Returns places [clocks, stages] of what a slot writes, where it is idle too, and how many there are then.

    `life` is of the buffer, [virtual stage, microbatch]; `places` [clocks, stages] those of the cells that are not
    idle; `moment` is that of the write; `ops`: what is computed in each clock, by moments (see `ops_per_clock`).
    """
    slot = F if moment == FORWARD else B
    when = table.when()[slot]
    virtual, microbatch = np.nonzero(life.end >= 0)
    stage = table.stage_of(virtual)
    at = places[when[virtual, microbatch], stage]
    start = life.start[virtual, microbatch]
    end = life.end[virtual, microbatch]
    # From the first clock at whose moment the entry is there to the first at which it no longer is.
    change = np.zeros((table.clocks + 1, table.stages, depth), np.int32)
    np.add.at(change, (-((moment - start) // 5), stage, at), 1)
    np.add.at(change, ((end - moment) // 5 + 1, stage, at), -1)
    occupied = change.cumsum(axis=0)[:-1] > 0
    active = table.cells[:, :, slot, 0] >= 0
    free = np.where(occupied.all(axis=2), depth, occupied.argmin(axis=2)).astype(
        np.int32
    )
    every = np.where(active, places, np.where(ops[:, moment, None], free, 0))
    return every, max(depth, int(every.max()) + 1)
