import dataclasses
import random

import numpy as np
import pytest

from meshtrain.schedule.facts import NotExact, facts, facts_of
from meshtrain.schedule.generators import SCHEDULES, Schedule, legal_chunks, make_table
from meshtrain.schedule.simulate import EXECUTIONS, Durations, simulate


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formulas_say_what_the_tables_say(schedule, stages):
    for microbatches in (*range(1, 14), 16, 17, 23):
        for chunks in [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 3, 5]:
            sizes = schedule, stages, microbatches, chunks
            assert facts_of(*sizes) == facts(make_table(*sizes)), sizes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seconds_are_those_of_the_simulator(schedule):
    durations = Durations(1.0, 0.7, 1.3, head=0.5, head_spread=False)
    for microbatches in (1, 3, 8, 13):
        table = make_table(schedule, 4, microbatches, legal_chunks(schedule) or 3)
        assert facts(table).seconds(durations) == pytest.approx(simulate(table, durations).makespan)


def test_a_name_changes_nothing_and_idle_clocks_only_what_they_cost():
    table = make_table("zb_h1", 3, 9)
    assert facts(dataclasses.replace(table, name="mine")) == facts(table)
    late = dataclasses.replace(table, cells=np.insert(table.cells, table.clocks, -1, axis=0))
    assert facts(late) == facts(table)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formulas_are_what_the_simulator_finds(schedule, execution):
    rng, entry = random.Random(schedule + execution), SCHEDULES[schedule]
    exact = 0
    for _ in range(80):
        p, m, v = rng.randint(1, 6), rng.randint(1, 15), legal_chunks(schedule) or rng.randint(1, 4)
        durations = Durations(
            rng.uniform(0.1, 3), rng.uniform(0.1, 3), rng.uniform(0.05, 2), message=rng.choice([0, 0, rng.uniform(0, 2)]),
            head=rng.choice([0, 0, rng.uniform(0, 3)]), head_spread=rng.random() < 0.5, optimizer=rng.choice([0, 1.5]),
        )  # fmt: skip
        try:
            idle, total = (f(p, m, v, durations, execution) for f in (entry.bubble, entry.makespan))
        except NotExact:
            continue
        exact += 1
        timeline = simulate(make_table(schedule, p, m, v), durations, execution)
        assert timeline.makespan == pytest.approx(total, abs=1e-9)
        if not durations.head or durations.head_spread:
            assert timeline.idle == pytest.approx(idle, abs=1e-9)
    assert exact >= 8  # there were cases to compare


@pytest.mark.parametrize(
    "schedule, sizes, durations, execution, why",
    [
        ("1f1b", (4, 8, 1), Durations(message=0.1), "lockstep", "messages that take no time"),
        ("1f1b", (4, 8, 1), Durations(1, 0.5, 0.5, message=1.5), "asynchronous", "messages up to half"),
        ("1f1b", (4, 8, 1), Durations(head=1.0), "asynchronous", "wait for the loss head"),
        ("1f1b", (4, 8, 1), Durations(forward=np.ones(4)), "lockstep", "stages of equal length"),
        ("zb_h1", (4, 8, 1), Durations(1, 1, 1.1), "asynchronous", "weight gradient no longer than"),
        ("zb_interleaved", (4, 3, 2), Durations(), "asynchronous", "at least as many microbatches as stages"),
        ("v_1f1b", (4, 3, 2), Durations(1, 1, 1), "asynchronous", "at least as many microbatches as stages"),
        ("interleaved", (4, 8, 2), Durations(message=0.1), "asynchronous", "several chunks"),
        ("mine", (4, 8, 1), Durations(), "asynchronous", "no formula for schedule 'mine'"),
    ],
)
def test_where_no_formula_is_exact_it_says_why(schedule, sizes, durations, execution, why):
    p, m, v = sizes
    entry = SCHEDULES.get(schedule) or Schedule(schedule, SCHEDULES["1f1b"].clocks)
    with pytest.raises(NotExact, match=why):
        entry.bubble(p, m, v, durations, execution)


@pytest.mark.parametrize(
    "schedule, sizes, inside, outside",
    [
        ("1f1b", (4, 12, 1), Durations(1, 0.5, 0.5, message=1.0), Durations(1, 0.5, 0.5, message=1.5)),
        ("zb_h1", (4, 12, 1), Durations(1, 1, 1), Durations(1, 1, 1.5)),
        ("v_1f1b", (4, 4, 2), Durations(1, 1, 1), Durations(1, 1, 1, message=0.5)),
    ],
)
def test_beyond_their_conditions_the_formulas_would_be_wrong(schedule, sizes, inside, outside):
    p, m, v = sizes
    table = make_table(schedule, p, m, v)
    assert simulate(table, inside, "asynchronous").idle == pytest.approx(
        SCHEDULES[schedule].bubble(p, m, v, inside, "asynchronous")
    )
    f, i, w, c = (x * v for x in (outside.forward, outside.input_grad, outside.weight_grad, outside.message / v))
    formula = {
        "1f1b": (p - 1) * (f + i + w + 2 * c), "zb_h1": (p - 1) * (f + i - w), "v_1f1b": (p - 1) * max(f, i + w),
    }[schedule]  # fmt: skip
    assert (simulate(table, outside, "asynchronous").idle > formula + 0.1).all()


def test_another_execution_is_refused():
    with pytest.raises(ValueError, match="execution 'wall' is not one of asynchronous, lockstep"):
        SCHEDULES["1f1b"].bubble(2, 2, 1, Durations(), "wall")
