"""A table as the executor takes it: cotangents that arrive one B later, and places that an idle stage may write to.

Where idle slots are computed all the same (on accelerators), a write that had to look whether it counts would copy the old content
out and back. So it does not look: what an idle F or B leaves goes to a place that is free just then, which nobody reads,

    place 0   ■ ■ ■ ■ ■ . . x        ■ held    x what an idle slot leaves
    place 1   . ■ ■ ■ ■ ■ x .

or to one more place, where at such a moment none is free: with gpipe, and with no more microbatches than stages.
"""

from dataclasses import replace

import numpy as np

from meshtrain.schedule.buffers import BACKWARD, FORWARD, Arrival, Buffers, Life, lives
from meshtrain.schedule.table import B, F, Table


def received_late(buffers: Buffers, does_b: np.ndarray) -> Buffers:
    """Cotangents kept one B later than they are sent: by the next of the ticks in which `does_b` holds."""
    ticks = np.flatnonzero(does_b)

    def late(array: np.ndarray) -> np.ndarray:
        later = np.zeros_like(array)
        later[ticks[1:]] = array[ticks[:-1]]
        return later

    def one(arrival: Arrival) -> Arrival:
        if arrival.slot == F:
            return arrival
        return replace(arrival, active=late(arrival.active), place=late(arrival.place))

    return replace(buffers, arrivals=tuple(map(one, buffers.arrivals)))


def unmasked(table: Table, buffers: Buffers, work: np.ndarray) -> Buffers:
    """`f_stash` and `b_cot` of idle cells at places that hold nothing then, and as many places as that takes.

    `work`: bool [ticks, 4], what is computed in each tick (see `segments.work_per_tick`).
    """
    stash, _, _, cot = lives(table, table.when())
    depths = buffers.depths
    f_stash, deep = _idle(table, stash, FORWARD, F, buffers.f_stash, depths.stash, work)
    b_cot, deeper = (buffers.b_cot, 0)
    if table.split:
        b_cot, deeper = _idle(table, cot, BACKWARD, B, buffers.b_cot, depths.cot, work)
    return replace(buffers, f_stash=f_stash, b_cot=b_cot, depths=depths._replace(stash=deep, cot=deeper))


def _idle(
    table: Table, life: Life, moment: int, slot: int, places: np.ndarray, depth: int, work: np.ndarray
) -> tuple[np.ndarray, int]:
    """Places [ticks, stages] of what a slot writes, where it is idle too, and how many there are then.

    `life` and `places` are of the buffer, [virtual stage, microbatch] and [ticks, stages]; `moment` is that of the write.
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
    found = np.where(active, places, np.where(work[:, {F: 0, B: 2}[slot], None], free, 0))
    return found, max(depth, int(found.max()) + 1)
