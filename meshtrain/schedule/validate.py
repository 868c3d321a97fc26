"""Proof that a table can be run: every op once, every input there in time, no place of a buffer overwritten while it is needed.

A legal table cannot deadlock: every op waits only for ops of earlier ticks, or of earlier slots of its own tick and stage.
"""

from dataclasses import dataclass, field

import numpy as np

from meshtrain.schedule.buffers import Buffers, allocate
from meshtrain.schedule.table import B, F, IllegalTable, Op, Table, W, check_is_table


def validate(table: Table) -> None:
    """Returns if the table is legal. Raises IllegalTable, naming tick, stage, cell and reason, if it is not."""
    check_is_table(table, "validate")
    _check_cells(table)
    _check_once(table)
    _check_order(table)
    replay(table, allocate(table))


def _word(table: Table, slot: int, virtual: int, microbatch: int) -> str:
    chunk = f".{table.chunk_of(virtual)}" if table.chunks > 1 else ""
    return f"{table.letters[slot]}{microbatch}{chunk}"


def _where(table: Table, tick: int, stage: int) -> str:
    # In CSV, two rows stand above tick 0, and rows are counted from 1.
    return (
        f"schedule {table.name}: tick {tick} (CSV row {tick + 3}), stage {stage}, cell '{table.cell_text(tick, stage)}'"
    )


def _check_cells(table: Table) -> None:
    if not table.split and (table.cells[:, :, W] >= 0).any():
        tick, stage = np.argwhere((table.cells[:, :, W] >= 0).any(axis=-1))[0].tolist()
        raise IllegalTable(f"schedule {table.name}: tick {tick}, stage {stage}: a W, which only a split table can have")
    limits = np.array([table.microbatches, table.chunks])
    idle = (table.cells == -1).all(axis=-1)
    for tick, stage, slot in np.argwhere(~idle & ((table.cells < 0) | (table.cells >= limits)).any(axis=-1)).tolist():
        microbatch, chunk = table.cells[tick, stage, slot].tolist()
        raise IllegalTable(
            f"schedule {table.name}: tick {tick}, stage {stage}, {table.letters[slot]} slot: microbatch {microbatch} of chunk "
            f"{chunk}; microbatches are 0 to {table.microbatches - 1}, chunks 0 to {table.chunks - 1}, and -1, -1 is idle"
        )


def _check_once(table: Table) -> None:
    seen: dict[tuple[int, int, int], int] = {}
    for op in table.ops():
        virtual = int(table.virtual(op.stage, op.chunk))
        key = (op.slot, virtual, op.microbatch)
        if key in seen:
            word = _word(table, *key)
            raise IllegalTable(
                f"{_where(table, op.tick, op.stage)}: {word} stands in tick {seen[key]} already, and each op must stand once"
            )
        seen[key] = op.tick
    for slot, virtual, microbatch in np.argwhere(table.when()[: len(table.letters)] < 0).tolist():
        raise IllegalTable(
            f"schedule {table.name}: stage {table.stage_of(virtual)} never does "
            f"{_word(table, slot, virtual, microbatch)}, and each op must stand once"
        )


def _check_order(table: Table) -> None:
    when = table.when()
    last = table.virtual_stages - 1
    sent = "it reads what {0} of stage {1} sends in tick {2}, and that is there from tick {3} on"
    # (op, the op it waits for, ticks it must come later, why), ops as (slot, virtual stage)
    waits = [((F, k), (F, k - 1), 1, sent) for k in range(1, last + 1)]
    waits += [((B, k), (B, k + 1), 1, sent) for k in range(last)]
    waits += [((B, last), (F, last), 0, "it needs the loss of {0}, which is done in tick {2}")]
    if table.split:
        waits += [((W, k), (B, k), 0, "it needs what {0} leaves, which is done in tick {2}") for k in range(last + 1)]
    late = [
        (int(when[op][j]), op, need, why, int(j))
        for op, need, gap, why in waits
        for j in np.flatnonzero(when[op] < when[need] + gap)
    ]
    if late:
        tick, op, need, why, j = min(late)
        done = int(when[need][j])
        reason = why.format(_word(table, *need, j), table.stage_of(need[1]), done, done + 1)
        place = _where(table, tick, int(table.stage_of(op[1])))
        raise IllegalTable(f"{place}: {_word(table, *op, j)} is too early: {reason}")


@dataclass
class _Buffer:
    """Places of one buffer of one stage, each empty (None) or holding (virtual stage, microbatch)."""

    name: str
    places: list
    live: int = 0
    peak: int = 0

    def put(self, place: int, entry: tuple[int, int]) -> None:
        if not 0 <= place < len(self.places):
            raise IllegalTable(f"place {place} of the {self.name}, which has {len(self.places)}")
        if self.places[place] is not None:
            raise IllegalTable(
                f"place {place} of the {self.name} still holds {self.places[place]} when {entry} is put there"
            )
        self.places[place] = entry
        self.live += 1
        self.peak = max(self.peak, self.live)

    def see(self, place: int, entry: tuple[int, int]) -> None:
        if not 0 <= place < len(self.places) or self.places[place] != entry:
            raise IllegalTable(f"place {place} of the {self.name} must hold {entry}; the places are {self.places}")

    def take(self, place: int, entry: tuple[int, int]) -> None:
        self.see(place, entry)
        self.places[place] = None
        self.live -= 1


@dataclass
class _Stage:
    buffers: dict[str, _Buffer]
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # in this tick, by slot F or B

    def __getitem__(self, name: str) -> _Buffer:
        return self.buffers[name]


def replay(table: Table, buffers: Buffers) -> dict[str, list[int]]:
    """Plays the table through its buffers as the executor will, watching what each place holds.

    Returns the most entries that each stage held at once, by buffer (`f_inbox`, `b_inbox`, `stash`, `cot`).
    Raises IllegalTable where a place does not hold what is read, or still holds what is needed.
    """
    _check_idle(table, buffers)
    depths = buffers.depths._asdict()
    stages = [_Stage({n: _Buffer(n, [None] * depth) for n, depth in depths.items()}) for _ in range(table.stages)]
    ops: list[list[Op]] = [[] for _ in range(table.ticks)]
    for op in table.ops():
        ops[op.tick].append(op)
    for tick in range(table.ticks):
        stage = -1
        try:
            for op in ops[tick]:  # in the order of the slots
                stage = op.stage
                _replay_op(table, buffers, op, stages[stage])
            for stage in range(table.stages):
                _replay_arrivals(table, buffers, tick, stage, stages)
            for stage in range(table.stages):
                if stages[stage].sent:
                    raise IllegalTable(f"nobody keeps what was sent: {stages[stage].sent}")
        except IllegalTable as error:
            raise IllegalTable(f"{_where(table, tick, stage)}: {error}") from None
    for stage, state in enumerate(stages):
        for name in depths:
            if state[name].live:
                raise IllegalTable(f"schedule {table.name}: stage {stage}: the {name} is not empty at the end")
    return {name: [state[name].peak for state in stages] for name in depths}


def _check_idle(table: Table, buffers: Buffers) -> None:
    """Where the table does nothing, the arrays must say so; where it does something, the replay looks."""
    when = table.when()
    idle = table.cells[..., 0] < 0
    quiet = np.ones((3, table.ticks), bool)  # nothing enters, exits, leaves
    for i, ticks in enumerate((when[F, 0], when[F, -1], when[B, 0])):
        quiet[i, ticks] = False
    wrong = {
        "f_active": buffers.f_active & idle[:, :, F],
        "b_active": buffers.b_active & idle[:, :, B],
        "w_active": buffers.w_active & idle[:, :, W],
        "first": buffers.first & idle[:, :, F],
        "last": buffers.last & idle[:, :, F],
        "enter": (buffers.enter != -1) & quiet[0],
        "exit": (buffers.exit != -1) & quiet[1],
        "head_out": (buffers.head_out != -1) & quiet[1],
        "leave": (buffers.leave != -1) & quiet[2],
    }
    for name, places in wrong.items():
        if places.any():
            raise IllegalTable(
                f"schedule {table.name}: {name} is set at {np.argwhere(places)[0].tolist()}, and nothing is done"
            )


def _replay_op(table: Table, buffers: Buffers, op: Op, state: _Stage) -> None:
    at = (op.tick, op.stage)
    virtual = int(table.virtual(op.stage, op.chunk))
    first, last = virtual == 0, virtual == table.virtual_stages - 1
    entry = (virtual, op.microbatch)
    arrays = (
        (buffers.f_active, buffers.f_microbatch, buffers.f_chunk),
        (buffers.b_active, buffers.b_microbatch, buffers.b_chunk),
        (buffers.w_active, buffers.w_microbatch, buffers.w_chunk),
    )
    found = [array[at] for array in arrays[op.slot]]
    if found != [True, op.microbatch, op.chunk]:
        raise IllegalTable(f"the buffers' arrays have {found} in slot {table.letters[op.slot]}")
    if op.slot == F:
        if (buffers.first[at], buffers.last[at]) != (first, last):
            raise IllegalTable("first or last is wrong")
        if not first:
            state["f_inbox"].take(buffers.f_in[at], entry)
        elif buffers.enter[op.tick] != op.microbatch:
            raise IllegalTable(f"enter is {buffers.enter[op.tick]}")
        state["stash"].put(buffers.f_stash[at], entry)
        if last:
            if buffers.exit[op.tick] != op.microbatch:
                raise IllegalTable(f"exit is {buffers.exit[op.tick]}")
            state["b_inbox"].put(buffers.head_out[op.tick], entry)
        else:
            state.sent[F] = entry
    elif op.slot == B:
        state["b_inbox"].take(buffers.b_in[at], entry)
        state["stash"].see(buffers.b_stash[at], entry)
        if table.split:
            state["cot"].put(buffers.b_cot[at], entry)
        else:
            state["stash"].take(buffers.b_stash[at], entry)
        if not first:
            state.sent[B] = entry
        elif buffers.leave[op.tick] != op.microbatch:
            raise IllegalTable(f"leave is {buffers.leave[op.tick]}")
    else:
        state["stash"].take(buffers.w_stash[at], entry)
        state["cot"].take(buffers.w_cot[at], entry)


def _replay_arrivals(table: Table, buffers: Buffers, tick: int, stage: int, stages: list[_Stage]) -> None:
    for arrival in buffers.arrivals:
        if not arrival.active[tick, stage]:
            continue
        name = f"what comes by {arrival.shift:+d} for {table.letters[arrival.slot]}"
        sender = stages[(stage - arrival.shift) % table.stages]
        if arrival.slot not in sender.sent:
            raise IllegalTable(f"{name} is a message that nobody sent")
        virtual, microbatch = sender.sent.pop(arrival.slot)
        virtual += 1 if arrival.slot == F else -1
        if table.stage_of(virtual) != stage:
            raise IllegalTable(f"{name} is a message for stage {table.stage_of(virtual)}")
        inbox = stages[stage]["f_inbox" if arrival.slot == F else "b_inbox"]
        inbox.put(arrival.place[tick, stage], (virtual, microbatch))
