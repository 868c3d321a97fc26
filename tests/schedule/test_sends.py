"""G and R: chunks' weights gathered and gradients reduced over data, as cells of the table."""

import dataclasses
import itertools

import numpy as np
import pytest

from meshtrain.schedule.draw import gantt_svg, gantt_text, picture
from meshtrain.schedule.generators import SCHEDULES, make_table, with_sends
from meshtrain.schedule.phases import ops_per_clock, phases, sections, table_ops
from meshtrain.schedule.simulation import Durations, simulate
from meshtrain.schedule.table import B, F, G, IllegalTable, R, W, parse_csv
from meshtrain.schedule.validate import validate

CHUNKED = [name for name, schedule in SCHEDULES.items() if schedule.chunks != 1]
SIZES = [(2, 2), (4, 4), (4, 8), (4, 10), (3, 2), (8, 12)]


def tables(name):
    chunks = SCHEDULES[name].chunks
    for (p, m), v in itertools.product(SIZES, [chunks] if chunks else [2, 3, 5]):
        yield with_sends(make_table(name, p, m, v))


@pytest.mark.parametrize("name", CHUNKED)
def test_all_chunks_but_one_have_both_and_as_many_clocks_to_travel_as_there_are_stages(
    name,
):
    for table in tables(name):
        validate(table)
        assert (table.sends >= 0).sum(axis=1).tolist() == [table.chunks - 1] * 2
        when = table.when().reshape(3, table.chunks, table.stages, -1)
        for chunk in range(table.chunks):
            if table.sends[G, chunk] >= 0:
                assert table.sends[G, chunk] <= when[F, chunk].min() - table.stages
            if table.sends[R, chunk] >= 0:
                assert (
                    table.sends[R, chunk] > when[W if table.split else B, chunk].max()
                )
                assert table.sends[R, chunk] <= table.clocks - table.stages


def test_with_one_chunk_nothing_could_travel():
    assert not with_sends(make_table("1f1b", 4, 8)).has_sends


@pytest.mark.parametrize("name", CHUNKED)
def test_csv_round_trips(name):
    for table in tables(name):
        assert (
            parse_csv(table.to_csv()) == table != dataclasses.replace(table, sends=None)
        )


TEXT = """# schedule=x stages=2 microbatches=2 chunks=2
stage 0,stage 1
F0.0 G1,G1
F1.0,F0.0
F0.1,F1.0
F1.1,F0.1 B0.1
B0.1,F1.1 B1.1
B1.1,B0.0
B0.0 R1,B1.0 R1
B1.0,
"""


def test_it_is_written_as_a_person_would():
    table = with_sends(make_table("interleaved", 2, 2, 2))
    assert parse_csv(TEXT) == dataclasses.replace(table, name="x")


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "G1,G1",
            "G1,",
            "row 3, column 2 .*'' .*same G and R .*other stages",
        ),
        (
            "F1.0,F0.0",
            "F1.0 G1,F0.0 G1",
            "row 4, column 1 .*'G1' stands in row 3 already",
        ),
        ("G1,G1", "G2,G2", "'G2' must be G and a chunk, .* 0 to 1"),
        ("G1,G1", "G1.0,G1.0", "'G1.0' must be G and a chunk"),
        ("F0.0 G1,G1", "G1 F0.0,G1", "'G1 F0.0' must .* once, .*order F B G R"),
        ("G1,G1", "R1 R0,R1 R0", "'F0.0 R1 R0' must have each letter once"),
        (
            "G1,G1",
            "X1,G1",
            "'X1' must .*F, B .*microbatch, as 'F3\\.1', or G or R .*chunk",
        ),
    ],
)
def test_a_wrong_cell_is_named(old, new, says):
    with pytest.raises(IllegalTable, match=says):
        parse_csv(TEXT.replace(old, new))


@pytest.mark.parametrize(
    "kind, chunk, clock, says",
    [
        (
            G,
            1,
            2,
            r"clock 2 .*row 5\), stage 0.*: G1 .*too late: F0\.1 .* clock 2",
        ),
        (G, 1, 3, r"G1 is too late: F0\.1 .*weights in clock 2"),
        (
            R,
            1,
            5,
            r"clock 5 .*row 8\), stage 0.*: R1 .*too early: B1\.1 .* clock 5",
        ),
        (R, 0, 7, r"clock 7 .*stage 0.*: R0 is too early: B1\.0 .* clock 7"),
        (R, 1, 8, "clocks from 0 to 7, or -1 for none"),
    ],
)
def test_what_cannot_be_there_in_time_is_named_with_what_it_misses(
    kind, chunk, clock, says
):
    table = parse_csv(TEXT)
    sends = table.sends.copy()
    sends[kind, chunk] = clock
    with pytest.raises(IllegalTable, match=says):
        validate(dataclasses.replace(table, sends=sends))


def test_of_one_kind_only_one_begins_with_a_clock():
    table = with_sends(make_table("interleaved", 2, 2, 3))
    sends = table.sends.copy()
    sends[G, 2] = sends[G, 1]
    with pytest.raises(IllegalTable, match=r"only one collective .* with a clock"):
        validate(dataclasses.replace(table, sends=sends))


@pytest.mark.parametrize("name", CHUNKED)
def test_sections_have_all_clocks_and_begin_with_what_is_sent(name):
    for table in tables(name):
        alone = dataclasses.replace(table, sends=None)
        found, clock, sent = phases(table), 0, []
        done, before = ops_per_clock(found), ops_per_clock(phases(alone))
        assert (done[:, :4] == before[:, :4]).all() and (done >= table_ops(table)).all()
        for section in sections(table, found):
            assert section.phases[0].first == clock
            assert (
                sum(phase.repeats * phase.period for phase in section.phases)
                == section.clocks
            )
            for chunks, kind in ((section.gathers, G), (section.reduces, R)):
                starts = clock + np.arange(section.repeats) * section.clocks
                sent += [
                    (kind, chunk, int(start))
                    for chunk, start in zip(chunks, starts, strict=bool(chunks))
                ]
            clock += section.repeats * section.clocks
        assert clock == table.clocks
        assert sorted(sent) == sorted(
            (k, c, int(table.sends[k, c]))
            for k, c in np.argwhere(table.sends >= 0).tolist()
        )


def test_sections_that_are_alike_are_one_loop():
    table = with_sends(make_table("interleaved", 16, 16, 8))
    assert [section.repeats for section in sections(table, phases(table))] == [
        1,
        6,
        1,
        6,
        1,
    ]


@pytest.mark.parametrize("execution", ["lockstep", "asynchronous"])
def test_what_travels_costs_nothing_until_it_is_longer_than_what_stands_beside_it(
    execution,
):
    table = with_sends(make_table("interleaved", 4, 4, 3))
    alone = simulate(table, Durations(), execution).makespan
    # beside each G stand four F of 1, beside each R four B of 2
    assert simulate(table, Durations(gather=4, reduce=8), execution).makespan == alone
    found = simulate(table, Durations(gather=5, reduce=8), execution)
    assert alone < found.makespan <= alone + 2
    assert (
        simulate(table, Durations(gather=4, reduce=11), execution).makespan
        == alone + 2 * 3
    )


def test_a_lane_carries_one_after_the_other_where_the_table_says():
    table = with_sends(make_table("interleaved", 4, 4, 3))
    found = simulate(table, Durations(gather=3, reduce=5))
    of_stage = [sent for sent in found.transfers if sent.stage == 2]
    assert [(sent.kind, sent.chunk) for sent in of_stage] == [
        (G, 1),
        (G, 2),
        (R, 2),
        (R, 1),
    ]
    for sent in of_stage:
        begun = found.clock >= table.sends[sent.kind, sent.chunk]
        assert sent.start == found.start[
            begun & (found.kind < 3)
        ].min() and sent.end - sent.start in (3, 5)


def test_pictures_show_them():
    table = with_sends(make_table("interleaved", 2, 2, 2))
    drawn = picture(table)
    assert (
        "G1" in str(drawn) and "R1" in str(drawn) and "over data" in drawn._repr_html_()
    )
    found = simulate(table, Durations(gather=1, reduce=2))
    svg = gantt_svg(found)
    assert (
        svg.count("<title>weights gathered over data (G) 1, stage")
        == 2
        == svg.count("(R) 1, stage")
    )
    row = next(
        line for line in gantt_text(found).splitlines() if line.startswith("over data")
    )
    assert "G1" in row and "R1" in row
    assert "over data" not in gantt_text(simulate(table))
