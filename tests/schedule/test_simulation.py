import dataclasses
import random

import numpy as np
import pytest

from meshtrain.schedule.facts import facts
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulation import (
    EXECUTIONS,
    HEAD,
    OPTIMIZER,
    Durations,
    simulate,
)
from meshtrain.schedule.table import B, F, W

EXACT = 1e-9


def drawn(seed, schedule):
    """A table of random size, and random durations of F, I and W of one chunk."""
    rng = random.Random(f"{seed} {schedule}")
    p, v = rng.randint(1, 6), legal_chunks(schedule) or rng.randint(1, 4)
    table = make_table(schedule, p, rng.randint(1, 14), v)
    return rng, table, [rng.uniform(0.1, 3.0) for _ in range(3)]


def test_where_nothing_is_said_every_slot_takes_one():
    table = make_table("1f1b", 2, 3)
    assert (
        simulate(table).makespan == simulate(table, Durations()).makespan == 3 * 3 + 3
    )


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(15))
def test_gpipe_and_1f1b_idle_for_p_minus_1_forwards_and_backwards(
    schedule, execution, seed
):
    _, table, (f, i, w) = drawn(seed, schedule)
    timeline = simulate(table, Durations(f, i, w), execution)
    assert timeline.idle == pytest.approx((table.stages - 1) * (f + i + w), abs=EXACT)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs"])
@pytest.mark.parametrize("seed", range(15))
def test_chunks_divide_the_idle_time(schedule, execution, seed):
    rng, table, (f, i, w) = drawn(seed, schedule)
    p, v = table.stages, table.chunks
    table = make_table(schedule, p, p + rng.randint(0, 2 * p), v)
    timeline = simulate(table, Durations(f / v, i / v, w / v), execution)
    assert timeline.idle == pytest.approx((p - 1) * (f + i + w) / v, abs=EXACT)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_interleaved"])
@pytest.mark.parametrize("seed", range(25))
def test_zero_bubble_idles_for_f_plus_i_minus_w_where_w_is_shortest(schedule, seed):
    rng, table, (f, i, _) = drawn(seed, schedule)
    p, v, w = table.stages, table.chunks, rng.uniform(0.0, min(f, i))
    table = make_table(schedule, p, p + rng.randint(0, 2 * p), v)
    alone = simulate(table, Durations(f / v, i / v, w / v), "asynchronous")
    assert alone.idle == pytest.approx((p - 1) * (f + i - w) / v, abs=EXACT)
    lockstep = simulate(table, Durations(f / v, i / v, w / v), "lockstep")
    assert lockstep.idle == pytest.approx((p - 1) * (f + i) / v, abs=EXACT)


@pytest.mark.parametrize("f, i, w", [(0.5, 2.0, 1.9), (2.0, 1.0, 1.9)])
def test_zero_bubble_idles_longer_where_w_is_longer_than_f_or_i(f, i, w):
    idle = simulate(make_table("zb_h1", 4, 12), Durations(f, i, w), "asynchronous").idle
    assert (idle > 3 * (f + i - w) + 0.1).all()


@pytest.mark.parametrize("seed", range(15))
def test_1f1b_through_a_v_idles_for_the_longer_of_f_and_b(seed):
    rng, table, (f, i, w) = drawn(seed, "v_1f1b")
    p = table.stages
    table = make_table("v_1f1b", p, p + rng.randint(0, 9), 2)
    idle = simulate(table, Durations(f / 2, i / 2, w / 2), "asynchronous").idle
    assert idle == pytest.approx((p - 1) * max(f, i + w), abs=EXACT)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_what_happens_can_happen(schedule, seed):
    rng, table, (f, i, w) = drawn(seed, schedule)
    k = table.virtual_stages
    durations = Durations(
        f * np.array([rng.uniform(0.5, 2) for _ in range(k)]),
        i,
        w * np.array([rng.uniform(0.5, 2) for _ in range(k)]),
        message=rng.uniform(0, 2),
        head=rng.choice([0.0, 1.7]),
        head_spread=rng.random() < 0.5,
        optimizer=2.5,
    )
    for execution in EXECUTIONS:
        timeline = simulate(table, durations, execution)
        for stage in range(table.stages):  # one thing at a time, in the table's order
            mine = timeline.stage == stage
            assert (timeline.start[mine][1:] >= timeline.end[mine][:-1] - EXACT).all()
        start, end = np.full((2, 3, k, table.microbatches), np.nan)
        head_end = np.full(table.microbatches, -np.inf)
        for n in range(len(timeline.kind)):
            kind, j = timeline.kind[n], timeline.microbatch[n]
            if kind <= W:
                virtual = table.virtual(timeline.stage[n], timeline.chunk[n])
                start[kind, virtual, j], end[kind, virtual, j] = (
                    timeline.start[n],
                    timeline.end[n],
                )
            elif kind == HEAD:
                head_end[j] = max(head_end[j], timeline.end[n])
        assert not np.isnan(start[: len(table.letters)]).any()
        stage = table.stage_of(np.arange(k))
        hop = np.where(stage[1:] != stage[:-1], durations.message, 0.0)[:, None]
        assert (start[F, 1:] >= end[F, :-1] + hop - EXACT).all()
        assert (start[B, :-1] >= end[B, 1:] + hop - EXACT).all()
        assert (start[B, -1] >= np.maximum(end[F, -1], head_end) - EXACT).all()
        if table.split:
            assert (start[W] >= end[B] - EXACT).all()
        last = timeline.kind == OPTIMIZER
        assert timeline.start[last].min() >= timeline.end[~last].max() - EXACT
        assert timeline.makespan == pytest.approx(timeline.end[~last].max() + 2.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_on_their_own_stages_are_never_slower_than_in_lockstep(schedule, seed):
    rng, table, (f, i, w) = drawn(seed, schedule)
    durations = Durations(f, i, w, message=rng.choice([0.0, 0.5, 2.0]))
    alone, lockstep = (
        simulate(table, durations, execution) for execution in EXECUTIONS
    )
    assert alone.makespan <= lockstep.makespan + EXACT


@pytest.mark.parametrize("seed", range(8))
def test_a_message_as_long_as_half_of_forward_and_backward_is_hidden_but_on_the_way_in_and_out(
    seed,
):
    rng, table, (f, i, w) = drawn(seed, "1f1b")
    p, message = table.stages, rng.uniform(0, (f + i + w) / 2)
    timeline = simulate(table, Durations(f, i, w, message=message), "asynchronous")
    assert timeline.idle == pytest.approx(
        (p - 1) * (f + i + w + 2 * message), abs=EXACT
    )


def test_in_lockstep_an_activation_travels_during_b_and_a_cotangent_during_the_next_f():
    table = make_table("1f1b", 2, 10)
    plain = simulate(table, Durations(1, 1, 1)).makespan
    # F-only and B-only clocks have nothing to hide a message behind: one each, and what is longer than an F in the
    # rest.
    assert simulate(table, Durations(1, 1, 1, message=1.0)).makespan == pytest.approx(
        plain + 2
    )
    assert simulate(table, Durations(1, 1, 1, message=1.5)).makespan == pytest.approx(
        plain + 2 * 1.5 + 9 * 0.5
    )


def test_with_one_stage_nothing_waits():
    for schedule in SCHEDULES:
        table = make_table(schedule, 1, 5, legal_chunks(schedule) or 2)
        for execution in EXECUTIONS:
            durations = Durations(message=9.0, head=1.0, optimizer=1.0)
            assert simulate(table, durations, execution).idle == pytest.approx(0.0)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_head_on_the_last_stage_keeps_all_others_waiting(execution):
    p, m, head = 4, 12, 2.0
    timeline = simulate(make_table("1f1b", p, m), Durations(head=head), execution)
    expected = (p - 1) * 3.0 + m * head
    assert timeline.idle == pytest.approx([expected] * (p - 1) + [expected - m * head])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_lockstep_a_spread_head_costs_its_share_and_no_idle_time(schedule):
    p, m, head = 4, 12, 2.0
    table = make_table(schedule, p, m, legal_chunks(schedule) or 2)
    without, spread = (
        simulate(table, Durations(head=h, head_spread=True)) for h in (0.0, head)
    )
    assert spread.idle == pytest.approx(without.idle)
    assert spread.makespan == pytest.approx(without.makespan + m * head / p)


def test_lockstep_takes_the_longest_stage():
    table = make_table("1f1b", 3, 6)
    assert simulate(
        table, Durations(forward=np.array([1.0, 3.0, 1.0]))
    ).makespan == pytest.approx(8 * (3 + 2))


def test_the_longest_stage_sets_the_pace_when_stages_run_on_their_own():
    timeline = simulate(
        make_table("1f1b", 3, 50),
        Durations(forward=np.array([1.0, 3.0, 1.0])),
        "asynchronous",
    )
    assert timeline.makespan == pytest.approx(
        timeline.busy[1] + 1 + 2
    )  # waits for one F in front, one B behind


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_critical_path_is_the_makespan_without_gaps(schedule, execution):
    table = make_table(schedule, 4, 7, legal_chunks(schedule) or 2)
    timeline = simulate(
        table, Durations(1.0, 0.7, 0.4, head=0.3, optimizer=2.0), execution
    )
    path = timeline.critical_path()
    assert timeline.start[path[0]] == 0 and timeline.kind[path[-1]] == OPTIMIZER
    assert timeline.start[path[1:]] == pytest.approx(timeline.end[path[:-1]])
    assert (timeline.end - timeline.start)[path].sum() == pytest.approx(
        timeline.makespan
    )


def test_the_critical_path_waits_for_messages():
    timeline = simulate(
        make_table("1f1b", 4, 4), Durations(message=0.5), "asynchronous"
    )
    path = timeline.critical_path()
    gaps = timeline.start[path[1:]] - timeline.end[path[:-1]]
    hops = np.diff(timeline.stage[path[:-1]]) != 0  # the last is the optimizer
    assert gaps == pytest.approx([*(0.5 * hops), 0.0])
    assert hops.sum() == 6  # three stages down and three up


def test_the_bubble_fraction_is_the_idle_share_of_all_stages():
    timeline = simulate(make_table("gpipe", 4, 8), Durations(1, 1, 1))
    assert timeline.bubble_fraction == pytest.approx(3 / 11)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_begins_with_one_and_ends_with_none(schedule):
    timeline = simulate(
        make_table(schedule, 3, 6, legal_chunks(schedule) or 2),
        Durations(),
        "asynchronous",
    )
    for stage in range(3):
        times, counts = timeline.count_in_flight(stage)
        assert (np.diff(times) > 0).all()
        assert counts[0] == 1 and counts[-1] == 0 and counts.min() >= 0


def test_no_schedule_named_idles_less_in_lockstep_than_zb_interleaved():
    v, p, m = 4, 8, 32
    idle = {}
    for schedule in SCHEDULES:
        chunks = legal_chunks(schedule) or v
        idle[schedule] = simulate(
            make_table(schedule, p, m, chunks),
            Durations(1 / chunks, 1 / chunks, 1 / chunks),
        ).idle.max()
    assert min(idle, key=lambda schedule: idle[schedule]) == "zb_interleaved"
    assert idle["zb_h1"] == pytest.approx(v * idle["zb_interleaved"])


def test_another_execution_is_refused():
    with pytest.raises(ValueError, match=r"execution 'wall' .* asynchronous, lockstep"):
        simulate(make_table("1f1b", 1, 1), Durations(), "wall")


def test_durations_for_another_number_of_virtual_stages_are_refused():
    with pytest.raises(
        ValueError,
        match=r"forward has 3 entries, .* number or .* 2 virtual stages",
    ):
        simulate(make_table("1f1b", 2, 2), Durations(forward=np.ones(3)))


def test_a_pair_takes_as_much_less_as_its_halves_hide_of_each_other():
    table, durations = (
        make_table("paired", 3, 9, 2),
        {"forward": 1.0, "input_grad": 0.7, "weight_grad": 1.3},
    )
    known, plain = facts(table), simulate(table, Durations(**durations)).makespan
    hidden = simulate(
        table, Durations(**durations, forward_hidden=0.2, backward_hidden=0.5)
    )
    assert known.together > 9
    assert hidden.makespan == pytest.approx(plain - 0.7 * known.together)
    # Only what stands in a pair is shorter: of the same table without pairs, nothing.
    apart = dataclasses.replace(table, paired=False)
    assert simulate(
        apart, Durations(**durations, forward_hidden=0.2)
    ).makespan == pytest.approx(plain)


def test_both_messages_of_a_pair_leave_at_its_end():
    """A forward and a backward of one unit each, and a message as long as the head, which hides it where there is
    one.
    """
    table = make_table("paired", 2, 8)
    clocks = simulate(table, Durations(1.0, 1.0, 0.0)).makespan
    hidden = simulate(
        table, Durations(1.0, 1.0, 0.0, head=0.5, message=0.5, head_spread=False)
    ).makespan
    shown = simulate(table, Durations(1.0, 1.0, 0.0, message=0.5)).makespan
    pairs = facts(table).together
    assert shown - clocks >= 0.5 * pairs
    # but for the first forward's and the last backward's but one
    assert hidden == pytest.approx(clocks + 8 * 0.5 + 2 * 0.5)
