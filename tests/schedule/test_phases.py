import random

import numpy as np
import pytest

from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.phases import Ops, Phase, idle_fractions, ops_per_clock, phases
from meshtrain.schedule.table import B, F, Table, W

# Of the fields of Ops: e an embedding to come, l the gradient of one that left
LETTERS = "FHBWel"


def work(letters):
    return Ops(*(letter in letters for letter in LETTERS))


def table_ops(table):
    """bool [clocks, 6]: what any stage does in each clock, counted op by op."""
    found = np.zeros((table.clocks, 6), bool)
    last = table.virtual_stages - 1
    clocks = {
        slot: sorted({op.clock for op in table.ops() if op.slot == slot})
        for slot in (F, B)
    }
    for op in table.ops():
        virtual = table.virtual(op.stage, op.chunk)
        found[op.clock, {F: 0, B: 2, W: 3}[op.slot]] = True
        if op.slot == F and virtual == last:
            found[op.clock, 1] = True
        if op.slot == F and virtual == 0 and op.clock > clocks[F][0]:
            found[max(t for t in clocks[F] if t < op.clock), 4] = True
        if op.slot == B and virtual == 0 and table.paired:
            found[op.clock, 5] = True
        elif op.slot == B and virtual == 0 and op.clock < clocks[B][-1]:
            found[min(t for t in clocks[B] if t > op.clock), 5] = True
    return found


def bodies(found):
    return [work for phase in found for _, work in phase.body]


def test_1f1b_embeds_while_microbatches_come_and_returns_while_they_leave():
    assert phases(make_table("1f1b", 4, 32)) == [
        Phase(0, 1, ((3, work("Fe")),)),
        Phase(3, 1, ((4, work("FHBe")),)),
        Phase(7, 1, ((24, work("FHBel")),)),
        Phase(31, 1, ((4, work("FHBl")),)),
        Phase(35, 1, ((3, work("Bl")),)),
    ]


def test_interleaved_has_the_vocabulary_only_where_a_microbatch_comes_in_or_out():
    assert phases(make_table("interleaved", 4, 16, 2)) == [
        Phase(0, 1, ((3, work("Fe")),)),
        Phase(3, 1, ((4, work("F")),)),
        Phase(7, 1, ((4, work("FHBe")),)),
        Phase(11, 2, ((4, work("FB")), (4, work("FHBel")))),
        Phase(27, 1, ((4, work("FB")),)),
        Phase(31, 1, ((4, work("FHBl")),)),
        Phase(35, 1, ((4, work("B")),)),
        Phase(39, 1, ((3, work("Bl")),)),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_every_schedule_needs_few_bodies_and_does_nothing_idly_but_embeddings_where_groups_are_uneven(
    schedule, stages
):
    for microbatches in (1, 2, 3, 4, 7, 8, 13, 16, 27, 64):
        for chunks in [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 3, 4]:
            table = make_table(schedule, stages, microbatches, chunks)
            found = phases(table)
            assert len(bodies(found)) <= 13
            does, needs = ops_per_clock(found), table_ops(table)
            assert (does[:, :4] == needs[:, :4]).all() and (does | ~needs).all()
            if microbatches % stages == 0 or chunks == 1:
                assert (does == needs).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bodies_do_not_depend_on_the_number_of_microbatches(schedule):
    chunks = legal_chunks(schedule) or 2
    few, many = (bodies(phases(make_table(schedule, 4, m, chunks))) for m in (16, 256))
    assert few == many


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_an_irregular_table_is_joined_to_as_many_bodies_as_allowed_and_leaves_nothing_out(
    limit,
):
    rng = random.Random(limit)
    regular = make_table("zb_interleaved", 3, 12, 2)
    cells = np.insert(
        regular.cells, sorted(rng.choices(range(regular.clocks), k=20)), -1, axis=0
    )
    table = Table("irregular", 3, 12, 2, True, "loop", cells)
    found = phases(table, limit)
    assert len(bodies(found)) <= limit
    does = ops_per_clock(found)
    assert does.shape == (table.clocks, 6)
    assert (does | ~table_ops(table)).all()


def test_neighbours_that_waste_least_are_joined_first():
    # 2 clocks F, 9 of FHB, 1 of B: with two bodies the B goes with the FHB, for an F and a head, and not the F for two
    # more heads and Bs.
    table = make_table("1f1b", 3, 9)
    cells = np.delete(table.cells, -1, axis=0)
    when = table.when()
    assert (when[F, -1] == np.arange(2, 11)).all()
    joined = phases(Table("short", 3, 9, 1, False, "loop", cells), limit=2)
    assert joined == [
        Phase(0, 1, ((2, work("Fe")),)),
        Phase(2, 1, ((10, work("FHBel")),)),
    ]


def test_phases_follow_one_another_without_gap_or_overlap():
    found = phases(make_table("zb_interleaved", 4, 18, 2))
    clock = 0
    for phase in found:
        assert phase.first == clock
        clock += phase.repeats * phase.period
    assert clock == make_table("zb_interleaved", 4, 18, 2).clocks


def test_idle_fractions_are_those_of_the_slots_that_no_stage_asked_for():
    # 1F1B on 4 stages with 8 microbatches: 11 clocks have a forward and 11 a backward; the last stage's 8 have a loss
    shares = idle_fractions(make_table("1f1b", 4, 8, 1))
    assert shares == pytest.approx({"forward": 3 / 11, "backward": 3 / 11, "head": 0})


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_idle_fractions_count_what_the_phases_compute(name):
    table = make_table(name, 4, 4, 1)
    done = ops_per_clock(phases(table))
    slots = [F, *([B, W] if table.split else [B])]
    asked = {slot: int((table.cells[:, :, slot, 0] >= 0).sum()) for slot in slots}
    computed = {
        F: done[:, 0].sum() * 4,
        B: done[:, 2].sum() * 4,
        W: done[:, 3].sum() * 4,
    }
    shares = idle_fractions(table)
    assert shares["forward"] == pytest.approx(1 - asked[F] / computed[F])
    assert shares["backward"] == pytest.approx(
        1 - sum(asked[s] for s in slots[1:]) / sum(computed[s] for s in slots[1:])
    )
