"""A table played through its buffers, as the executor does it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from meshtrain.schedule.buffers import Buffers
from meshtrain.schedule.table import B, F, IllegalTable, Op, Table, W
from meshtrain.schedule.validate import describe_place


@dataclass
class _Buffer:
    """Places of one buffer of one stage, each empty (None) or holding (virtual stage, microbatch)."""

    name: str
    places: list
    live: int = 0
    peak: int = 0

    def put(self, place: int, entry: tuple[int, int]) -> None:
        if not 0 <= place < len(self.places):
            raise IllegalTable(
                f"place {place} of the {self.name}, which has {len(self.places)}"
            )
        if self.places[place] is not None:
            raise IllegalTable(
                f"place {place} of the {self.name} still holds {self.places[place]} when {entry} is put there"
            )
        self.places[place] = entry
        self.live += 1
        self.peak = max(self.peak, self.live)

    def see(self, place: int, entry: tuple[int, int]) -> None:
        if not 0 <= place < len(self.places) or self.places[place] != entry:
            raise IllegalTable(
                f"place {place} of the {self.name} must hold {entry}; the places are {self.places}"
            )

    def take(self, place: int, entry: tuple[int, int]) -> None:
        self.see(place, entry)
        self.places[place] = None
        self.live -= 1


@dataclass
class _Stage:
    buffers: dict[str, _Buffer]
    # In this clock, by slot F or B
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> _Buffer:
        return self.buffers[name]


def replay(table: Table, buffers: Buffers) -> dict[str, list[int]]:
    """Plays the table through its buffers as the executor will, watching what each place holds.

    Returns the most entries that each stage held at once, by buffer (`f_inbox`, `b_inbox`, `stash`, `cot`).
    Raises IllegalTable where a place does not hold what is read, or still holds what is needed.
    """
    _check_idle(table, buffers)
    depths = buffers.depths._asdict()
    stages = [
        _Stage({n: _Buffer(n, [None] * depth) for n, depth in depths.items()})
        for _ in range(table.stages)
    ]
    ops: list[list[Op]] = [[] for _ in range(table.clocks)]
    for op in table.ops():
        ops[op.clock].append(op)
    for clock in range(table.clocks):
        stage = -1
        try:
            heads = []
            for op in ops[clock]:  # in the order of the slots
                stage = op.stage
                leaves = _replay_op(table, buffers, op, stages[stage])
                if not table.paired:
                    leaves()
                heads.append(leaves)
            for leaves in heads if table.paired else ():  # once both of a pair are done
                leaves()
            for stage in range(table.stages):
                _replay_arrivals(table, buffers, clock, stage, stages)
            for stage in range(table.stages):
                if stages[stage].sent:
                    raise IllegalTable(
                        f"nobody keeps what was sent: {stages[stage].sent}"
                    )
        except IllegalTable as error:
            raise IllegalTable(
                f"{describe_place(table, clock, stage)}: {error}"
            ) from None
    for stage, state in enumerate(stages):
        for name in depths:
            if state[name].live:
                raise IllegalTable(
                    f"schedule {table.name}: stage {stage}: the {name} is not empty at the end"
                )
    return {name: [state[name].peak for state in stages] for name in depths}


def _check_idle(table: Table, buffers: Buffers) -> None:
    """Where the table does nothing, the arrays must say so; where it does something, the replay looks."""
    when = table.when()
    idle = table.cells[..., 0] < 0
    quiet = np.ones((3, table.clocks), bool)  # nothing enters, exits, leaves
    for i, clocks in enumerate((when[F, 0], when[F, -1], when[B, 0])):
        quiet[i, clocks] = False
    wrong = {
        "f_active": buffers.f.active & idle[:, :, F],
        "b_active": buffers.b.active & idle[:, :, B],
        "w_active": buffers.w.active & idle[:, :, W],
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


def _replay_op(
    table: Table, buffers: Buffers, op: Op, state: _Stage
) -> Callable[[], None]:
    """Plays an op; returns what the loss head does behind it."""
    head = lambda: None
    at = (op.clock, op.stage)
    virtual = int(table.virtual(op.stage, op.chunk))
    first, last = virtual == 0, virtual == table.virtual_stages - 1
    entry = (virtual, op.microbatch)
    arrays = (
        (buffers.f.active, buffers.f.microbatch, buffers.f.chunk),
        (buffers.b.active, buffers.b.microbatch, buffers.b.chunk),
        (buffers.w.active, buffers.w.microbatch, buffers.w.chunk),
    )
    found = [array[at] for array in arrays[op.slot]]
    if found != [True, op.microbatch, op.chunk]:
        raise IllegalTable(
            f"the buffers' arrays have {found} in slot {table.letters[op.slot]}"
        )
    if op.slot == F:
        if (buffers.first[at], buffers.last[at]) != (first, last):
            raise IllegalTable("first or last is wrong")
        if not first:
            state["f_inbox"].take(buffers.f.inbox[at], entry)
        elif buffers.enter[op.clock] != op.microbatch:
            raise IllegalTable(f"enter is {buffers.enter[op.clock]}")
        state["stash"].put(buffers.f.stash[at], entry)
        if last:
            if buffers.exit[op.clock] != op.microbatch:
                raise IllegalTable(f"exit is {buffers.exit[op.clock]}")
            head = lambda: state["b_inbox"].put(buffers.head_out[op.clock], entry)
        else:
            state.sent[F] = entry
    elif op.slot == B:
        state["b_inbox"].take(buffers.b.inbox[at], entry)
        state["stash"].see(buffers.b.stash[at], entry)
        if table.split:
            state["cot"].put(buffers.b.cot[at], entry)
        else:
            state["stash"].take(buffers.b.stash[at], entry)
        if not first:
            state.sent[B] = entry
        elif buffers.leave[op.clock] != op.microbatch:
            raise IllegalTable(f"leave is {buffers.leave[op.clock]}")
    else:
        state["stash"].take(buffers.w.stash[at], entry)
        state["cot"].take(buffers.w.cot[at], entry)
    return head


def _replay_arrivals(
    table: Table, buffers: Buffers, clock: int, stage: int, stages: list[_Stage]
) -> None:
    for arrival in buffers.arrivals:
        if not arrival.active[clock, stage]:
            continue
        name = f"what comes by {arrival.shift:+d} for {table.letters[arrival.slot]}"
        sender = stages[(stage - arrival.shift) % table.stages]
        if arrival.slot not in sender.sent:
            raise IllegalTable(f"{name} is a message that nobody sent")
        virtual, microbatch = sender.sent.pop(arrival.slot)
        virtual += 1 if arrival.slot == F else -1
        if table.stage_of(virtual) != stage:
            raise IllegalTable(
                f"{name} is a message for stage {table.stage_of(virtual)}"
            )
        inbox = stages[stage]["f_inbox" if arrival.slot == F else "b_inbox"]
        inbox.put(arrival.place[clock, stage], (virtual, microbatch))
