"""A table as the executor takes it.

Messages and the vocabulary are a slot off, so that a whole slot is there for them to travel in: a cotangent arrives one B later
than it is sent; a microbatch's embedding is looked up one F before it enters, and its gradient returns one B after it left.

Where idle slots are computed all the same (on accelerators), a write that had to look whether it counts would copy the old content
out and back. So it does not look: what an idle F or B leaves goes to a place that is free just then, which nobody reads,

    place 0   ■ ■ ■ ■ ■ . . x        ■ held    x what an idle slot leaves
    place 1   . ■ ■ ■ ■ ■ x .

or to one more place, where at such a moment none is free: with gpipe, and with no more microbatches than stages.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshtrain.schedule.buffers import BACKWARD, FORWARD, Arrival, Buffers, Life, allocate, lives
from meshtrain.schedule.shifted import one_earlier, one_later
from meshtrain.schedule.table import B, F, Table


@dataclass(frozen=True, eq=False)
class Executed(Buffers):
    """`Buffers` of which the arrivals of cotangents are late, and what of the vocabulary is done when: int32 [ticks], -1 for nothing."""

    entering: np.ndarray  # microbatch that the next F on virtual stage 0 takes, in the tick of an F
    leaving: np.ndarray  # microbatch that the last B on virtual stage 0 was of, in the tick of a B
    enters_first: int  # the microbatch whose embedding is needed before all ticks
    leaves_last: int  # whose gradient is there after all of them, -1: none


def executed(table: Table, work: np.ndarray | None = None) -> Executed:
    """What the executor does of a legal table. `work`: bool [ticks, 6], what is computed in each tick, by whom it may (see
    `segments.work_per_tick`); None where idle slots are skipped."""
    buffers = allocate(table)
    forward, backward = (np.flatnonzero((table.cells[:, :, slot, 0] >= 0).any(axis=1)) for slot in (F, B))
    entering, leaving = one_earlier(buffers.enter, forward, -1), one_later(buffers.leave, backward, -1)
    late = replace(buffers, arrivals=tuple(_late(arrival, backward) for arrival in buffers.arrivals))
    first, last = int(buffers.enter[forward[0]]), int(buffers.leave[backward[-1]])
    found = Executed(
        **vars(late), entering=entering, leaving=leaving, enters_first=first, leaves_last=last,
    )  # fmt: skip
    return found if work is None else unmasked(table, found, work)


def _late(arrival: Arrival, backward: np.ndarray) -> Arrival:
    """A cotangent is kept by the next of the ticks with a B."""
    if arrival.slot == F:
        return arrival
    return replace(
        arrival, active=one_later(arrival.active, backward, False), place=one_later(arrival.place, backward, 0)
    )


def unmasked(table: Table, buffers: Executed, work: np.ndarray) -> Executed:
    """`f_stash` and `b_cot` of idle cells at places that hold nothing then, and as many places as that takes."""
    stash, _, _, cot = lives(table, table.when())
    depths = buffers.depths
    f_stash, deep = _idle(table, stash, FORWARD, F, buffers.f_stash, depths.stash, work[:, 0])
    b_cot, deeper = buffers.b_cot, 0
    if table.split:
        b_cot, deeper = _idle(table, cot, BACKWARD, B, buffers.b_cot, depths.cot, work[:, 2])
    return replace(buffers, f_stash=f_stash, b_cot=b_cot, depths=depths._replace(stash=deep, cot=deeper))


def _idle(
    table: Table, life: Life, moment: int, slot: int, places: np.ndarray, depth: int, done: np.ndarray
) -> tuple[np.ndarray, int]:
    """Places [ticks, stages] of what a slot writes, where it is idle too, and how many there are then.

    `life` is of the buffer, [virtual stage, microbatch]; `places` [ticks, stages] those of the cells that are not idle; `moment` is
    that of the write; `done`: bool [ticks], whether the slot is computed at all.
    """
    when = table.when()[slot]
    virtual, microbatch = np.nonzero(life.end >= 0)
    stage = table.stage_of(virtual)
    at = places[when[virtual, microbatch], stage]
    start, end = life.start[virtual, microbatch], life.end[virtual, microbatch]
    # From the first tick at whose moment the entry is there to the first at which it no longer is.
    change = np.zeros((table.ticks + 1, table.stages, depth), np.int32)
    np.add.at(change, (-((moment - start) // 5), stage, at), 1)
    np.add.at(change, ((end - moment) // 5 + 1, stage, at), -1)
    held = change.cumsum(axis=0)[:-1] > 0
    active = table.cells[:, :, slot, 0] >= 0
    free = np.where(held.all(axis=2), depth, held.argmin(axis=2)).astype(np.int32)
    found = np.where(active, places, np.where(done[:, None], free, 0))
    return found, max(depth, int(found.max()) + 1)
