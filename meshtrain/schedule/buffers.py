"""Where every value waits: slots of the stages' buffers, computed once from a legal table.

A stage has up to four buffers, each exactly as deep as the table needs:

    forward inbox     activations that arrived and wait for F
    backward inbox    cotangents that arrived (or that the loss head left) and wait for B
    stash             what F leaves for B (for W when B is split)
    cotangent stash   what I leaves for W (only when B is split)

Within a tick things happen in this order, and a slot is free again after the last read of what it held:

    F reads its inbox, writes the stash | the loss head writes the backward inbox of the last virtual stage |
    B reads inbox and stash, writes the cotangent stash | W reads both stashes | messages arrive in the inboxes
"""

import heapq
from dataclasses import dataclass

import numpy as np

from meshtrain.schedule.table import B, F, Table, W

# The moments of a tick in which a buffer is read or written.
_FORWARD, _HEAD, _BACKWARD, _WEIGHT, _ARRIVAL = range(5)


@dataclass(frozen=True, eq=False)
class Buffers:
    """What each stage does in each tick, with the buffer slots it reads and writes.

    Arrays are int32 [ticks, stages] and 0 where the slot is idle; `*_active`, `first` and `last` are bool
    [ticks, stages]; `enter`, `exit`, `head_out` and `leave` are int32 [ticks], the same for all stages, -1 for none.
    """

    f_active: np.ndarray
    f_microbatch: np.ndarray
    f_chunk: np.ndarray
    f_in: np.ndarray  # forward inbox: what F reads; 0 and unused on virtual stage 0, which takes the embedding
    f_stash: np.ndarray  # stash: where F leaves what the backward needs
    b_active: np.ndarray
    b_microbatch: np.ndarray
    b_chunk: np.ndarray
    b_in: np.ndarray  # backward inbox: cotangent of the chunk's output
    b_stash: np.ndarray  # stash: what B reads
    b_cot: np.ndarray  # cotangent stash: where I leaves what W needs
    w_active: np.ndarray
    w_microbatch: np.ndarray
    w_chunk: np.ndarray
    w_stash: np.ndarray
    w_cot: np.ndarray
    # At the end of the tick a message arrives here, to be kept in this slot of the inbox. Activations (f) and
    # cotangents (b) come from the stage before (down), from the stage after (up), or from this stage itself (local).
    # `loop`: f comes down and b comes up, around the ring, and nothing else happens. `v`: all six may.
    recv_f_active: np.ndarray  # f down
    recv_f: np.ndarray
    recv_f_up_active: np.ndarray
    recv_f_up: np.ndarray
    recv_f_local_active: np.ndarray
    recv_f_local: np.ndarray
    recv_b_active: np.ndarray  # b up
    recv_b: np.ndarray
    recv_b_down_active: np.ndarray
    recv_b_down: np.ndarray
    recv_b_local_active: np.ndarray
    recv_b_local: np.ndarray
    first: np.ndarray  # this F is virtual stage 0
    last: np.ndarray  # this F is the last virtual stage
    enter: np.ndarray  # microbatch whose F runs on virtual stage 0: its embedding is needed
    exit: np.ndarray  # microbatch whose F runs on the last virtual stage: the loss head follows in the same tick
    head_out: np.ndarray  # backward inbox of the last virtual stage's stage: where the head leaves the cotangent
    leave: np.ndarray  # microbatch whose B runs on virtual stage 0: its cotangent is the embedding's
    # Depths: the most entries that any stage holds at once; 0 where a buffer is never used.
    f_inbox: int
    b_inbox: int
    stash: int
    cot: int


def allocate(table: Table) -> Buffers:
    """Buffer slots for a legal table (see `validate`), each buffer of a stage coloured as an interval graph: no deeper
    than the most entries it holds at once."""
    when = table.when()
    inner = np.arange(table.virtual_stages - 1)  # virtual stages that send activations on and get cotangents back
    last = table.virtual_stages - 1

    arrives = np.zeros_like(when)  # moment from which the input of F, and that of B, is in the inbox
    arrives[F, 1:] = 5 * when[F, inner] + _ARRIVAL
    arrives[B, :-1] = 5 * when[B, inner + 1] + _ARRIVAL
    arrives[B, last] = 5 * when[F, last] + _HEAD
    f, b = 5 * when[F] + _FORWARD, 5 * when[B] + _BACKWARD
    w = 5 * when[W] + _WEIGHT if table.split else b

    stage = table.stage_of(np.arange(table.virtual_stages))
    f_in, f_inbox = _colour(table, arrives[F], f, stage, skip_first=True)
    b_in, b_inbox = _colour(table, arrives[B], b, stage)
    stash, stash_depth = _colour(table, f, w, stage)
    cot, cot_depth = _colour(table, b, w, stage) if table.split else (np.zeros_like(stash), 0)

    def at(slot: int, values: np.ndarray) -> np.ndarray:
        """Puts values [virtual stage, microbatch] where that op stands in the table."""
        return _scatter(table, when[slot], stage, values)

    microbatch = np.broadcast_to(np.arange(table.microbatches), stash.shape)
    chunk = np.broadcast_to(table.chunk_of(np.arange(table.virtual_stages))[:, None], stash.shape)
    arrays = {}
    for letter, slot in (("f", F), ("b", B), ("w", W)):
        arrays[f"{letter}_active"] = table.cells[:, :, slot, 0] >= 0
        arrays[f"{letter}_microbatch"] = at(slot, microbatch)
        arrays[f"{letter}_chunk"] = at(slot, chunk)
    virtual_stage = np.broadcast_to(np.arange(table.virtual_stages)[:, None], stash.shape)
    arrays["first"] = arrays["f_active"] & (at(F, virtual_stage) == 0)
    arrays["last"] = arrays["f_active"] & (at(F, virtual_stage) == last)

    return Buffers(
        **arrays,
        **_arrivals(table, when, f_in, b_in),
        f_in=at(F, f_in),
        f_stash=at(F, stash),
        b_in=at(B, b_in),
        b_stash=at(B, stash),
        b_cot=at(B, cot),
        w_stash=at(W, stash),
        w_cot=at(W, cot),
        enter=_per_tick(table, when[F, 0], np.arange(table.microbatches)),
        exit=_per_tick(table, when[F, last], np.arange(table.microbatches)),
        head_out=_per_tick(table, when[F, last], b_in[last]),
        leave=_per_tick(table, when[B, 0], np.arange(table.microbatches)),
        f_inbox=f_inbox,
        b_inbox=b_inbox,
        stash=stash_depth,
        cot=cot_depth,
    )


def _colour(
    table: Table, start: np.ndarray, end: np.ndarray, stage: np.ndarray, skip_first: bool = False
) -> tuple[np.ndarray, int]:
    """Slot of each entry that lives from `start` to `end` (moments, [virtual stage, microbatch]), and the depth.

    Entries of one stage share its buffer. Taking them by start, and the lowest free slot for each, uses no more slots
    than there are entries alive at one moment.
    """
    slots = np.zeros(start.shape, np.int32)
    depth = 0
    for s in range(table.stages):
        rows = np.flatnonzero((stage == s) & ~(skip_first & (np.arange(len(stage)) == 0)))
        entries = sorted((start[k, j], end[k, j], k, j) for k in rows.tolist() for j in range(table.microbatches))
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (end, slot)
        used = 0
        for begin, finish, k, j in entries:
            while busy and busy[0][0] < begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, used)
                used += 1
            slots[k, j] = heapq.heappop(free)
            heapq.heappush(busy, (finish, slots[k, j]))
        depth = max(depth, used)
    return slots, depth


def _arrivals(table: Table, when: np.ndarray, f_in: np.ndarray, b_in: np.ndarray) -> dict[str, np.ndarray]:
    """The `recv_*` arrays: each message at its tick, on the stage that gets it, by the way it comes."""
    k = np.arange(table.virtual_stages - 1)  # messages go between k and k + 1
    low, high = table.stage_of(k), table.stage_of(k + 1)
    if table.placement == "loop":
        down, up, local = np.ones_like(k, bool), np.zeros_like(k, bool), np.zeros_like(k, bool)
    else:
        down, up, local = high == low + 1, high == low - 1, high == low
    arrays = {}
    for name, way in (("", down), ("_up", up), ("_local", local)):
        sent = when[F, k[way]]
        arrays[f"recv_f{name}"] = _scatter(table, sent, high[way], f_in[k[way] + 1])
        arrays[f"recv_f{name}_active"] = _scatter(table, sent, high[way], np.ones_like(sent)) > 0
    for name, way in (
        ("", down),
        ("_down", up),
        ("_local", local),
    ):  # a cotangent goes back the way the activation came
        sent = when[B, k[way] + 1]
        arrays[f"recv_b{name}"] = _scatter(table, sent, low[way], b_in[k[way]])
        arrays[f"recv_b{name}_active"] = _scatter(table, sent, low[way], np.ones_like(sent)) > 0
    return arrays


def _scatter(table: Table, tick: np.ndarray, stage: np.ndarray, values: np.ndarray) -> np.ndarray:
    """int32 [ticks, stages] with values [virtual stage, microbatch] at their ticks (-1: nowhere) and stages."""
    out = np.zeros((table.ticks, table.stages), np.int32)
    there = tick >= 0
    out[tick[there], np.broadcast_to(stage[:, None], tick.shape)[there]] = values[there]
    return out


def _per_tick(table: Table, tick: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.full(table.ticks, -1, np.int32)
    out[tick] = values
    return out
