import numpy as np
import pytest
from replayed import replay

from meshtrain.schedule.buffers import Depths, allocate, compile_table, depths
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.phases import ops_per_clock
from meshtrain.schedule.simulation import Durations, simulate
from meshtrain.schedule.table import B, F, W


def tables(schedule):
    for p, m in ((1, 1), (1, 6), (2, 1), (3, 2), (3, 8), (4, 4), (4, 13), (6, 12)):
        yield make_table(schedule, p, m, legal_chunks(schedule) or 3)


def arriving(buffers):
    return {
        (arrival.slot, arrival.shift): arrival.active for arrival in buffers.arrivals
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_buffer_is_exactly_as_deep_as_the_most_entries_any_stage_holds(schedule):
    for table in tables(schedule):
        buffers = allocate(table)
        held = replay(table, buffers)
        assert (
            buffers.depths
            == depths(table)
            == Depths(**{name: max(stages) for name, stages in held.items()})
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_entries_held_are_those_that_the_simulator_has_in_flight(schedule):
    for table in tables(schedule):
        held = replay(table, allocate(table))["stash"]
        for execution in ("asynchronous", "lockstep"):
            timeline = simulate(
                table, Durations(1.0, 0.7, 1.3, message=0.4, head=0.5), execution
            )
            assert timeline.peak_in_flight.tolist() == held
            assert [
                timeline.count_in_flight(stage)[1].max()
                for stage in range(table.stages)
            ] == held


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrays_are_int32_or_bool_and_zero_where_idle(schedule):
    buffers = allocate(make_table(schedule, 3, 5, legal_chunks(schedule) or 2))
    assert all(isinstance(depth, int) for depth in buffers.depths)
    for arrival in buffers.arrivals:
        assert (arrival.active.dtype, arrival.place.dtype) == (bool, np.int32)
        assert arrival.active.shape == arrival.place.shape == buffers.f.active.shape
        assert not arrival.place[~arrival.active].any()
    for array in (buffers.enter, buffers.exit, buffers.head_out, buffers.leave):
        assert array.dtype == np.int32 and array.ndim == 1 and array.min() == -1
    for array in (buffers.first, buffers.last):
        assert array.dtype == bool and array.shape == buffers.f.active.shape
    for slot in (buffers.f, buffers.b, buffers.w):
        for name, array in vars(slot).items():
            if array is None:
                continue
            assert array.dtype == (bool if name == "active" else np.int32), name
            assert array.shape == buffers.f.active.shape
            assert not array[~slot.active].any(), name


@pytest.mark.parametrize(
    "sizes", [("zb_interleaved", 3, 6, 2), ("interleaved", 1, 4, 3), ("1f1b", 1, 4, 1)]
)
def test_messages_of_a_loop_go_down_and_come_back_up_only(sizes):
    """With one stage to itself; with one virtual stage there are none."""
    _, stages, microbatches, chunks = sizes
    buffers, sent = allocate(make_table(*sizes)), microbatches * (stages * chunks - 1)
    found = {way: active.sum() for way, active in arriving(buffers).items()}
    assert found == ({(F, 1): sent, (B, -1): sent} if sent else {})
    assert sent or buffers.depths == Depths(stash=1, f_inbox=0, b_inbox=1, cot=0)


def test_messages_of_a_v_go_down_turn_on_the_last_stage_and_go_up():
    p, m = 3, 6
    buffers = allocate(make_table("v_1f1b", p, m, 2))
    for slot in (F, B):
        down, up, local = (arriving(buffers)[slot, shift] for shift in (1, -1, 0))
        assert down.sum(axis=0).tolist() == [0] + [m] * (p - 1)
        assert up.sum(axis=0).tolist() == [m] * (p - 1) + [0]
        assert local.sum(axis=0).tolist() == [0] * (p - 1) + [m]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_enter_exit_and_leave_when_the_table_says(schedule):
    table = make_table(schedule, 3, 5, legal_chunks(schedule) or 2)
    buffers, when = allocate(table), table.when()
    for m in range(table.microbatches):
        assert buffers.enter[when[F, 0, m]] == m
        assert buffers.exit[when[F, -1, m]] == m
        assert buffers.leave[when[B, 0, m]] == m
        assert buffers.first[when[F, 0, m], 0]
        assert buffers.last[when[F, -1, m], table.stage_of(table.virtual_stages - 1)]
    for array in (buffers.enter, buffers.exit, buffers.leave):
        assert (array >= 0).sum() == table.microbatches
    assert buffers.first.sum() == buffers.last.sum() == table.microbatches


def test_what_i_leaves_for_w_waits_until_stage_0_is_there():
    p = 4
    table = make_table("zb_h1", p, 12)
    assert replay(table, allocate(table))["cot"] == [s + 1 for s in range(p)]
    assert (table.when()[W] - table.when()[B]).tolist() == [[s] * 12 for s in range(p)]


# --- as the executor takes it


def executed_tables(schedule):
    for p, m in ((2, 1), (3, 2), (3, 8), (4, 4), (4, 13), (6, 12), (5, 3)):
        yield make_table(schedule, p, m, legal_chunks(schedule) or 3)


def held_clocks(table, buffers):
    """Of each stage and place of the stash and of what I leaves: the (first, last) clocks of what is held, as the table
    has them.
    """
    when, found = table.when(), {"stash": [], "left": []}
    for op in table.ops():
        virtual, at = table.virtual(op.stage, op.chunk), (op.clock, op.stage)
        if op.slot == F:
            last = when[W if table.split else B, virtual, op.microbatch]
            found["stash"].append((op.stage, buffers.f.stash[at], op.clock, last))
        if op.slot == B and table.split:
            found["left"].append(
                (op.stage, buffers.b.cot[at], op.clock, when[W, virtual, op.microbatch])
            )
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_an_idle_slot_leaves_goes_where_nothing_is_held(schedule):
    for table in executed_tables(schedule):
        buffers = compile_table(table)
        work = ops_per_clock(buffers.phases)
        of = {
            "stash": (F, 0, buffers.f.stash, buffers.depths.stash),
            "left": (B, 2, buffers.b.cot, buffers.depths.cot),
        }
        for name, entries in held_clocks(table, buffers).items():
            slot, done, places, depth = of[name]
            if not entries:
                continue
            for clock, stage in np.argwhere(
                (table.cells[:, :, slot, 0] < 0) & work[:, done, None]
            ).tolist():
                place = places[clock, stage]
                assert place < depth
                # What is read in this clock is read after F and before B write.
                wrong = [
                    e
                    for e in entries
                    if e[:2] == (stage, place) and e[2] < clock <= e[3]
                ]
                assert not wrong, (name, clock, stage, wrong)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_there_is_one_more_place_only_where_all_are_held_when_a_stage_is_idle(schedule):
    for table in executed_tables(schedule):
        exact, buffers = (
            allocate(table).depths,
            compile_table(table).depths,
        )
        everything = table.microbatches * table.chunks
        assert buffers.stash - exact.stash in (
            (0, 1) if exact.stash == everything else (0,)
        )
        assert buffers._replace(stash=0, cot=0) == exact._replace(stash=0, cot=0)
        assert compile_table(table, skips=True).depths == exact


@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_on_one_stage_a_pair_leaves_each_layer_where_one_was_just_read(microbatches):
    layers = 5
    table = make_table("paired", 1, microbatches)
    buffers = compile_table(table)
    work = ops_per_clock(buffers.phases)
    assert buffers.alternates and buffers.depths.stash == 1
    for exact in (compile_table(table, alike=False), compile_table(table, skips=True)):
        assert exact.depths == depths(table)

    def turn(microbatch, layer):
        return layers - 1 - layer if microbatch % 2 else layer

    stash = {}
    for clock in range(table.clocks):
        forward, backward = (table.cells[clock, 0, slot, 0] >= 0 for slot in (F, B))
        assert work[clock, 0] == forward and work[clock, 2] == backward, (
            "none is computed idly"
        )
        for i in range(layers):
            if backward:
                b = buffers.b.microbatch[clock, 0]
                layer = layers - 1 - i
                assert stash[buffers.b.stash[clock, 0], turn(b, layer)] == (b, layer)
            if forward:
                f = buffers.f.microbatch[clock, 0]
                stash[buffers.f.stash[clock, 0], turn(f, i)] = f, i


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_embeddings_come_one_forward_early_and_leave_one_backward_late_but_for_pairs(
    schedule,
):
    for table in executed_tables(schedule):
        buffers, when = compile_table(table), table.when()
        clocks = {
            s: sorted({op.clock for op in table.ops() if op.slot == s}) for s in (F, B)
        }
        for m in range(table.microbatches):
            enters = clocks[F].index(when[F, 0, m])
            assert (
                buffers.enters_first
                if enters == 0
                else buffers.entering[clocks[F][enters - 1]]
            ) == m
            leaves = clocks[B].index(when[B, 0, m]) + (not table.paired)
            assert (
                buffers.leaves_last
                if leaves == len(clocks[B])
                else buffers.leaving[clocks[B][leaves]]
            ) == m
        assert (buffers.entering >= 0).sum() == table.microbatches - 1
        assert (buffers.leaving >= 0).sum() == table.microbatches - (not table.paired)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cotangent_arrives_with_the_next_backward(schedule):
    for table in executed_tables(schedule):
        sent, late = allocate(table).arrivals, compile_table(table).arrivals
        backward = np.flatnonzero((table.cells[:, :, B, 0] >= 0).any(axis=1))
        for before, after in zip(sent, late, strict=True):
            if before.slot == F or table.paired:
                assert (before.active == after.active).all() and (
                    before.place == after.place
                ).all()
            else:
                assert (
                    after.active[backward[1:]] == before.active[backward[:-1]]
                ).all()
                assert (after.place[backward[1:]] == before.place[backward[:-1]]).all()
                assert after.active.sum() == before.active.sum()
