import numpy as np
import pytest

from meshtrain.schedule.buffers import Depths, allocate, depths
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulate import Durations, simulate
from meshtrain.schedule.table import B, F, W
from meshtrain.schedule.validate import replay


def tables(schedule):
    for p, m in ((1, 1), (1, 6), (2, 1), (3, 2), (3, 8), (4, 4), (4, 13), (6, 12)):
        yield make_table(schedule, p, m, legal_chunks(schedule) or 3)


def arriving(buffers):
    return {(arrival.slot, arrival.shift): arrival.active for arrival in buffers.arrivals}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_buffer_is_exactly_as_deep_as_the_most_entries_any_stage_holds(schedule):
    for table in tables(schedule):
        buffers = allocate(table)
        held = replay(table, buffers)
        assert buffers.depths == depths(table) == Depths(**{name: max(stages) for name, stages in held.items()})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_entries_held_are_those_that_the_simulator_has_in_flight(schedule):
    for table in tables(schedule):
        held = replay(table, allocate(table))["stash"]
        for clock in ("asynchronous", "lockstep"):
            timeline = simulate(table, Durations(1.0, 0.7, 1.3, message=0.4, head=0.5), clock)
            assert timeline.peak_in_flight.tolist() == held
            assert [timeline.in_flight(stage)[1].max() for stage in range(table.stages)] == held


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrays_are_int32_or_bool_and_zero_where_idle(schedule):
    buffers = allocate(make_table(schedule, 3, 5, legal_chunks(schedule) or 2))
    assert all(isinstance(depth, int) for depth in buffers.depths)
    for arrival in buffers.arrivals:
        assert (arrival.active.dtype, arrival.place.dtype) == (bool, np.int32)
        assert arrival.active.shape == arrival.place.shape == buffers.f_active.shape
        assert not arrival.place[~arrival.active].any()
    for name, array in vars(buffers).items():
        if name in ("arrivals", "depths"):
            continue
        if name in ("enter", "exit", "head_out", "leave"):
            assert array.dtype == np.int32 and array.ndim == 1 and array.min() == -1
        else:
            assert array.dtype == (bool if name.endswith("active") or name in ("first", "last") else np.int32), name
            assert array.shape == buffers.f_active.shape
            active = {"f": buffers.f_active, "b": buffers.b_active, "w": buffers.w_active}.get(name[0])
            if active is not None and not name.endswith("active"):
                assert not array[~active].any(), name


def test_messages_of_a_loop_go_down_and_come_back_up_only():
    buffers = allocate(make_table("zb_interleaved", 3, 6, 2))
    sent = 6 * (2 * 3 - 1)  # each microbatch between virtual stages
    assert {ways: active.sum() for ways, active in arriving(buffers).items()} == {(F, 1): sent, (B, -1): sent}


def test_messages_of_a_v_go_down_turn_on_the_last_stage_and_go_up():
    p, m = 3, 6
    buffers = allocate(make_table("v_1f1b", p, m, 2))
    for slot in (F, B):
        down, up, local = (arriving(buffers)[slot, shift] for shift in (1, -1, 0))
        assert down.sum(axis=0).tolist() == [0] + [m] * (p - 1)
        assert up.sum(axis=0).tolist() == [m] * (p - 1) + [0]
        assert local.sum(axis=0).tolist() == [0] * (p - 1) + [m]


def test_with_one_stage_a_loop_sends_to_itself():
    buffers = allocate(make_table("interleaved", 1, 4, 3))
    assert {ways: active.sum() for ways, active in arriving(buffers).items()} == {(F, 1): 4 * 2, (B, -1): 4 * 2}


def test_with_one_virtual_stage_nothing_is_sent_and_no_forward_inbox_is_needed():
    buffers = allocate(make_table("1f1b", 1, 4))
    assert not buffers.arrivals
    assert buffers.depths == Depths(stash=1, f_inbox=0, b_inbox=1, cot=0)


def test_1f1b_keeps_one_message_at_a_time():
    held = allocate(make_table("1f1b", 4, 32)).depths
    assert (held.f_inbox, held.b_inbox) == (1, 1)


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
