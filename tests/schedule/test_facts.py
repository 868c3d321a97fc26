import dataclasses

import numpy as np
import pytest

from meshtrain.schedule.facts import facts
from meshtrain.schedule.generators import SCHEDULES, facts_of, legal_chunks, make_table
from meshtrain.schedule.simulate import Durations, simulate


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


@pytest.mark.parametrize(
    "schedule, sizes, expected",
    [  # (alone, beside, turns), as found by compiling for described GPUs
        ("1f1b", (2, 8, 1), (1, 0, False)),
        ("interleaved", (2, 8, 1), (1, 0, False)),
        ("zb_h1", (2, 4, 1), (1, 0, False)),
        ("v_1f1b", (4, 16, 2), (1, 1, False)),
        ("v_1f1b", (4, 2, 2), (0, 2, False)),
        ("gpipe", (4, 8, 1), (0, 0, True)),
        ("looped_bfs", (4, 8, 2), (0, 0, True)),
        ("gpipe", (4, 1, 1), (0, 0, False)),
        ("1f1b", (4, 8, 1), (0, 0, False)),
        ("zb_h1", (4, 4, 1), (1, 0, False)),
        ("zb_interleaved", (8, 16, 2), (0, 0, False)),
    ],
)
def test_ticks_that_the_compiler_sees_alone(schedule, sizes, expected):
    found = facts(make_table(schedule, *sizes))
    assert (found.alone, found.beside, found.turns) == expected


def test_a_name_changes_nothing_and_idle_ticks_only_what_they_cost():
    table = make_table("zb_h1", 3, 9)
    assert facts(dataclasses.replace(table, name="mine")) == facts(table)
    late = dataclasses.replace(table, cells=np.insert(table.cells, table.ticks, -1, axis=0))
    assert facts(late) == facts(table)
