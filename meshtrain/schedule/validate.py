"""Proof that a table can be run: every op once, every input there in time.

A legal table cannot deadlock: every op waits only for ops of earlier clocks, or of earlier slots of its own clock and
stage. Its buffers follow from it (`buffers.allocate`, which tests replay).
"""

import numpy as np

from meshtrain.schedule.table import (
    SENT,
    B,
    F,
    G,
    IllegalTable,
    Table,
    W,
    check_is_table,
)


def validate(table: Table) -> None:
    """Returns if the table is legal. Raises IllegalTable, naming clock, stage, cell and reason, if it is not."""
    check_is_table(table, "validate")
    _check_cells(table)
    _check_once(table)
    _check_order(table)
    _check_sends(table)


def _word(table: Table, slot: int, virtual: int, microbatch: int) -> str:
    chunk = f".{table.chunk_of(virtual)}" if table.chunks > 1 else ""
    return f"{table.letters[slot]}{microbatch}{chunk}"


def describe_place(table: Table, clock: int, stage: int) -> str:
    # In CSV, two rows stand above clock 0, and rows are counted from 1.
    return (
        f"schedule {table.name}: clock {clock} (CSV row {clock + 3}), stage {stage}, cell "
        f"'{table.cell_text(clock, stage)}'"
    )


def _check_cells(table: Table) -> None:
    stray = (table.cells[:, :, W] >= 0).any(axis=-1)
    if not table.split and stray.any():
        clock, stage = np.argwhere(stray)[0].tolist()
        raise IllegalTable(
            f"schedule {table.name}: clock {clock}, stage {stage}: a W, which only a split table can have"
        )
    limits = np.array([table.microbatches, table.chunks])
    idle = (table.cells == -1).all(axis=-1)
    outside = ((table.cells < 0) | (table.cells >= limits)).any(axis=-1)
    for clock, stage, slot in np.argwhere(~idle & outside).tolist():
        microbatch, chunk = table.cells[clock, stage, slot].tolist()
        raise IllegalTable(
            f"schedule {table.name}: clock {clock}, stage {stage}, {table.letters[slot]} slot: microbatch "
            f"{microbatch} of chunk "
            f"{chunk}; microbatches are 0 to {table.microbatches - 1}, chunks 0 to {table.chunks - 1}, and -1, -1 is "
            "idle"
        )


def _check_once(table: Table) -> None:
    seen: dict[tuple[int, int, int], int] = {}
    for op in table.ops():
        virtual = int(table.virtual(op.stage, op.chunk))
        key = (op.slot, virtual, op.microbatch)
        if key in seen:
            word = _word(table, *key)
            raise IllegalTable(
                f"{describe_place(table, op.clock, op.stage)}: {word} stands in clock {seen[key]} already, and each "
                "op must stand once"
            )
        seen[key] = op.clock
    never = table.when()[: len(table.letters)] < 0
    for slot, virtual, microbatch in np.argwhere(never).tolist():
        raise IllegalTable(
            f"schedule {table.name}: stage {table.stage_of(virtual)} never does "
            f"{_word(table, slot, virtual, microbatch)}, and each op must stand once"
        )


def _check_order(table: Table) -> None:
    when = table.when()
    last = table.virtual_stages - 1
    sent = "it reads what {0} of stage {1} sends in clock {2}, and that is there from clock {3} on"
    # (op, the op it waits for, clocks it must come later, why), ops as (slot, virtual stage)
    waits = [((F, k), (F, k - 1), 1, sent) for k in range(1, last + 1)]
    waits += [((B, k), (B, k + 1), 1, sent) for k in range(last)]
    # Halves of a pair run at once.
    gap = int(table.paired)
    there = "there for pairs from clock {3} on" if table.paired else "done in clock {2}"
    waits += [
        ((B, last), (F, last), gap, f"it needs the loss of {{0}}, which is {there}")
    ]
    if table.split:
        waits += [
            ((W, k), (B, k), gap, f"it needs what {{0}} leaves, which is {there}")
            for k in range(last + 1)
        ]
    late = [
        (int(when[op][j]), op, need, why, int(j))
        for op, need, gap, why in waits
        for j in np.flatnonzero(when[op] < when[need] + gap)
    ]
    if late:
        clock, op, need, why, j = min(late)
        done = int(when[need][j])
        needed = _word(table, *need, j)
        reason = why.format(needed, table.stage_of(need[1]), done, done + 1)
        place = describe_place(table, clock, int(table.stage_of(op[1])))
        raise IllegalTable(f"{place}: {_word(table, *op, j)} is too early: {reason}")


def _check_sends(table: Table) -> None:
    """A chunk's weights must be there before its first F, its gradient complete before it is reduced; one of a kind
    begins with a clock.
    """
    when = table.when()
    chunks = table.chunk_of(np.arange(table.virtual_stages))
    last_slot = W if table.split else B
    _check_clocks(table)
    for kind, chunk in np.argwhere(table.sends >= 0).tolist():
        clock = int(table.sends[kind, chunk])
        mine = np.flatnonzero(chunks == chunk)
        if kind == G:
            slot = F
            pick = np.argmin
        else:
            slot = last_slot
            pick = np.argmax
        clocks = when[slot, mine]
        row, microbatch = np.unravel_index(pick(clocks), clocks.shape)
        virtual = int(mine[row])
        other = int(clocks[row, microbatch])
        word = f"{SENT[kind]}{chunk}"
        place = describe_place(table, clock, int(table.stage_of(virtual)))
        op = _word(table, slot, virtual, int(microbatch))
        if kind == G and clock >= other:
            raise IllegalTable(
                f"{place}: {word} is too late: {op} needs the weights in clock {other} already"
            )
        if kind != G and clock <= other:
            raise IllegalTable(
                f"{place}: {word} is too early: {op} adds to the gradient in clock {other}"
            )
        if (table.sends[kind] == clock).sum() > 1:
            raise IllegalTable(
                f"{place}: of one kind only one collective may begin with a clock"
            )


def _check_clocks(table: Table) -> None:
    """Checks that the table has a clock of its own, or none, for the G and the R of each chunk."""
    if (
        table.sends.shape != (2, table.chunks)
        or not ((table.sends >= -1) & (table.sends < table.clocks)).all()
    ):
        raise IllegalTable(
            f"schedule {table.name}: sends must be a G and an R for each of the {table.chunks} chunks, clocks from 0 "
            "to "
            f"{table.clocks - 1}, or -1 for none"
        )
