import random

import numpy as np
import pytest

from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.segments import Segment, segments, work_per_tick
from meshtrain.schedule.table import F, Table

FWD, FHB, FB, BWD = (
    (True, False, False, False),
    (True, True, True, False),
    (True, False, True, False),
    (False, False, True, False),
)


def needed(table):
    """bool [ticks, 4]: what any stage does in each tick (F, head, B, W)."""
    work = np.zeros((table.ticks, 4), bool)
    work[:, [0, 2, 3]] = (table.cells[..., 0] >= 0).any(axis=1)
    work[table.when()[F, -1], 1] = True
    return work


def bodies(found):
    return [work for segment in found for _, work in segment.body]


def test_1f1b_is_three_segments():
    assert segments(make_table("1f1b", 4, 32)) == [
        Segment(0, 1, ((3, FWD),)),
        Segment(3, 1, ((32, FHB),)),
        Segment(35, 1, ((3, BWD),)),
    ]


def test_interleaved_does_the_head_only_where_a_microbatch_comes_out():
    assert segments(make_table("interleaved", 4, 16, 2)) == [
        Segment(0, 1, ((7, FWD),)),
        Segment(7, 3, ((4, FHB), (4, FB))),
        Segment(31, 1, ((4, FHB),)),
        Segment(35, 1, ((7, BWD),)),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_every_schedule_needs_few_bodies_and_does_nothing_idly(schedule, stages):
    for microbatches in (1, 2, 3, 4, 7, 8, 13, 16, 27, 64):
        for chunks in [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 3, 4]:
            table = make_table(schedule, stages, microbatches, chunks)
            found = segments(table)
            assert len(bodies(found)) <= 8
            assert (work_per_tick(found) == needed(table)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bodies_do_not_depend_on_the_number_of_microbatches(schedule):
    chunks = legal_chunks(schedule) or 2
    few, many = (bodies(segments(make_table(schedule, 4, m, chunks))) for m in (16, 256))
    assert few == many


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_an_irregular_table_is_joined_to_as_many_bodies_as_allowed_and_leaves_nothing_out(limit):
    rng = random.Random(limit)
    regular = make_table("zb_interleaved", 3, 12, 2)
    cells = np.insert(regular.cells, sorted(rng.choices(range(regular.ticks), k=20)), -1, axis=0)
    table = Table("irregular", 3, 12, 2, True, "loop", cells)
    found = segments(table, limit)
    assert len(bodies(found)) <= limit
    work = work_per_tick(found)
    assert work.shape == (table.ticks, 4)
    assert (work | ~needed(table)).all()


def test_neighbours_that_waste_least_are_joined_first():
    # 2 ticks F, 9 of FHB, 1 of B: with two bodies the B goes with the FHB, which costs 2, and not the F, which costs 6.
    table = make_table("1f1b", 3, 9)
    cells = np.delete(table.cells, -1, axis=0)
    when = table.when()
    assert (when[F, -1] == np.arange(2, 11)).all()
    joined = segments(Table("short", 3, 9, 1, False, "loop", cells), limit=2)
    assert joined == [Segment(0, 1, ((2, FWD),)), Segment(2, 1, ((10, FHB),))]


def test_segments_follow_one_another_without_gap_or_overlap():
    found = segments(make_table("zb_interleaved", 4, 18, 2))
    tick = 0
    for segment in found:
        assert segment.first == tick
        tick += segment.repeats * segment.period
    assert tick == make_table("zb_interleaved", 4, 18, 2).ticks
