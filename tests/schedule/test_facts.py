import dataclasses

import numpy as np
import pytest

from meshtrain.schedule.facts import facts, facts_of
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulation import Durations, simulate


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formulas_say_what_the_tables_say(schedule, stages):
    for microbatches in (*range(1, 14), 16, 17, 23):
        for chunks in [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 3, 5]:
            sizes = schedule, stages, microbatches, chunks
            assert facts_of(*sizes) == facts(make_table(*sizes)), sizes


@pytest.mark.parametrize("schedule", ["paired", "zb_paired"])
def test_the_formulas_say_what_the_tables_of_one_stage_say(schedule):
    for microbatches in (1, 2, 3, 9):
        sizes = schedule, 1, microbatches, 1
        assert facts_of(*sizes) == facts(make_table(*sizes)), sizes
    assert facts_of("paired", 1, 9).spare.stash == -1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seconds_are_those_of_the_simulator(schedule):
    durations = Durations(1.0, 0.7, 1.3, head=0.5, head_spread=False)
    for microbatches in (1, 3, 8, 13):
        table = make_table(schedule, 4, microbatches, legal_chunks(schedule) or 3)
        assert facts(table).seconds(durations) == pytest.approx(
            simulate(table, durations).makespan
        )


def test_a_name_changes_nothing_and_idle_clocks_only_what_they_cost():
    table = make_table("zb_h1", 3, 9)
    assert facts(dataclasses.replace(table, name="mine")) == facts(table)
    late = dataclasses.replace(
        table, cells=np.insert(table.cells, table.clocks, -1, axis=0)
    )
    assert facts(late) == facts(table)
