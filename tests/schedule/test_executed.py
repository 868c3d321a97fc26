"""The table as the executor takes it: late messages and embeddings are still there in time, and idle writes hit nothing that is held."""

import numpy as np
import pytest

from meshtrain.schedule.buffers import allocate
from meshtrain.schedule.executed import executed
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.segments import segments, work_per_tick
from meshtrain.schedule.table import B, F, W


def tables(schedule):
    for p, m in ((2, 1), (3, 2), (3, 8), (4, 4), (4, 13), (6, 12), (5, 3)):
        yield make_table(schedule, p, m, legal_chunks(schedule) or 3)


def held(table, buffers):
    """Of each stage and place of the stash and of what I leaves: the (first, last) ticks of what is held, as the table has them."""
    when, found = table.when(), {"stash": [], "left": []}
    for op in table.ops():
        virtual, at = table.virtual(op.stage, op.chunk), (op.tick, op.stage)
        if op.slot == F:
            last = when[W if table.split else B, virtual, op.microbatch]
            found["stash"].append((op.stage, buffers.f_stash[at], op.tick, last))
        if op.slot == B and table.split:
            found["left"].append((op.stage, buffers.b_cot[at], op.tick, when[W, virtual, op.microbatch]))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_an_idle_slot_leaves_goes_where_nothing_is_held(schedule):
    for table in tables(schedule):
        work = work_per_tick(segments(table))
        buffers = executed(table, work)
        of = {"stash": (F, 0, buffers.f_stash, buffers.depths.stash), "left": (B, 2, buffers.b_cot, buffers.depths.cot)}
        for name, entries in held(table, buffers).items():
            slot, done, places, depth = of[name]
            if not entries:
                continue
            for tick, stage in np.argwhere((table.cells[:, :, slot, 0] < 0) & work[:, done, None]).tolist():
                place = places[tick, stage]
                assert place < depth
                # What is read in this tick is read after F and before B write.
                wrong = [e for e in entries if e[:2] == (stage, place) and e[2] < tick <= e[3]]
                assert not wrong, (name, tick, stage, wrong)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_there_is_one_more_place_only_where_all_are_held_when_a_stage_is_idle(schedule):
    for table in tables(schedule):
        exact, buffers = allocate(table).depths, executed(table, work_per_tick(segments(table))).depths
        everything = table.microbatches * table.chunks
        assert buffers.stash - exact.stash in ((0, 1) if exact.stash == everything else (0,))
        assert buffers._replace(stash=0, cot=0) == exact._replace(stash=0, cot=0)
        assert executed(table).depths == exact


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_embeddings_come_one_forward_early_and_leave_one_backward_late(schedule):
    for table in tables(schedule):
        buffers, when = executed(table), table.when()
        ticks = {s: sorted({op.tick for op in table.ops() if op.slot == s}) for s in (F, B)}
        for m in range(table.microbatches):
            enters = ticks[F].index(when[F, 0, m])
            assert (buffers.enters_first if enters == 0 else buffers.entering[ticks[F][enters - 1]]) == m
            leaves = ticks[B].index(when[B, 0, m]) + 1
            assert (buffers.leaves_last if leaves == len(ticks[B]) else buffers.leaving[ticks[B][leaves]]) == m
        assert (buffers.entering >= 0).sum() == (buffers.leaving >= 0).sum() == table.microbatches - 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cotangent_arrives_with_the_next_backward(schedule):
    for table in tables(schedule):
        sent, late = allocate(table).arrivals, executed(table).arrivals
        backward = np.flatnonzero((table.cells[:, :, B, 0] >= 0).any(axis=1))
        for before, after in zip(sent, late, strict=True):
            if before.slot == F:
                assert (before.active == after.active).all() and (before.place == after.place).all()
            else:
                assert (after.active[backward[1:]] == before.active[backward[:-1]]).all()
                assert (after.place[backward[1:]] == before.place[backward[:-1]]).all()
                assert after.active.sum() == before.active.sum()
