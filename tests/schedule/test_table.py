import dataclasses
import inspect
import os
from pathlib import Path

import numpy as np
import pytest
from documented import GUIDE
from refusals import pattern_of

from meshtrain.config import ConfigError
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulation import simulate
from meshtrain.schedule.table import (
    B,
    F,
    IllegalTable,
    Op,
    Table,
    W,
    parse_csv,
    read_csv,
)
from meshtrain.schedule.validate import validate

ONE_F_ONE_B = """\
# schedule=1f1b stages=2 microbatches=2 chunks=1 split=no placement=loop
stage 0,stage 1
F0,
F1,F0 B0
B0,F1 B1
B1,
"""


def empty(stages=4, microbatches=2, chunks=2, split=False, placement="loop"):
    return Table(
        "empty",
        stages,
        microbatches,
        chunks,
        split,
        placement,
        np.full((1, stages, 3, 2), -1),
    )


def test_virtual_stages_are_assigned_round_robin_or_in_a_v():
    loop, v = (
        empty(chunks=3, placement=placement).stage_of(np.arange(12)).tolist()
        for placement in ("loop", "v")
    )
    assert loop == 3 * [0, 1, 2, 3] and v == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_virtual_is_the_inverse_of_stage_and_chunk(placement):
    table, k = empty(chunks=3, placement=placement), np.arange(12)
    assert (table.virtual(table.stage_of(k), table.chunk_of(k)) == k).all()


def test_the_format_is_shown_to_people_as_it_is():
    assert f"```\n{ONE_F_ONE_B}```\n" in GUIDE
    assert inspect.cleandoc(ONE_F_ONE_B) in inspect.cleandoc(
        Table.to_csv.__doc__
    ).replace("\n    ", "\n")


def test_a_file_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.csv").write_text(ONE_F_ONE_B)
    assert (
        read_csv("~/mine.csv")
        == make_table("~/mine.csv", 2, 2)
        == make_table("1f1b", 2, 2)
    )
    # What has changed is read again.
    (tmp_path / "mine.csv").write_text(
        ONE_F_ONE_B.replace("schedule=1f1b", "schedule=another")
    )
    assert make_table("~/mine.csv", 2, 2).name == "another"


def test_csv_is_what_a_person_would_write():
    assert make_table("1f1b", 2, 2).to_csv() == ONE_F_ONE_B


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", [(1, 1), (1, 5), (3, 2), (4, 11)])
def test_csv_round_trips(schedule, stages, microbatches):
    table = make_table(schedule, stages, microbatches, legal_chunks(schedule) or 3)
    assert parse_csv(table.to_csv()) == table


PAIRS = """\
# schedule=paired stages=2 microbatches=3 chunks=1 split=no placement=loop
stage 0,stage 1
F0,
F1,F0
F2,F1+B0
B0,F2+B1
B1,B2
B2,
"""


def test_a_cell_that_is_a_pair_is_joined():
    assert make_table("paired", 2, 3).to_csv() == PAIRS
    table = parse_csv(PAIRS.replace("F1+B0", " F1 + B0 "))
    assert table.paired and table == make_table("paired", 2, 3)
    # without + the same cells are another table, in which B follows F
    apart = parse_csv(PAIRS.replace("+", " "))
    assert not apart.paired and apart != table and (apart.cells == table.cells).all()
    split = make_table("zb_paired", 2, 3)
    cells = [split.cell_text(clock, 1) for clock in range(split.clocks)]
    # a W stands with I where no stage has an F any more
    assert cells == ["", "F0", "F1+I0", "F2+I1", "I2+W0", "W1", "W2"]
    assert parse_csv(split.to_csv()) == split


@pytest.mark.parametrize(
    "cell, says",
    [
        ("F1 B0", "row 5, column 2 (stage 1): 'F1 B0' ... 'F1+B0' ... pairs"),
        ("F1+", "'F1+' must be 'F1' in a table with pairs"),
        ("B0+F1", "'B0+F1' ... once, ... order F B"),
    ],
)
def test_a_pair_that_is_none_is_refused(cell, says):
    with pytest.raises(IllegalTable, match=pattern_of(says)):
        parse_csv(PAIRS.replace("F1+B0", cell))


def test_csv_as_a_spreadsheet_saves_it_is_read_the_same():
    first, names, *rows = ONE_F_ONE_B.splitlines()
    saved = "\r\n".join(
        [
            f"{first},",
            names,
            *(",".join(f'" {c}"' for c in row.split(",")) for row in rows),
            "",
            "",
        ]
    )
    assert parse_csv(saved) == parse_csv(ONE_F_ONE_B)


def test_tables_are_equal_by_content_and_hash_alike():
    a = make_table("1f1b", 3, 4)
    b = dataclasses.replace(a)
    assert a == b and hash(a) == hash(b) and a is not b
    assert a != make_table("1f1b", 3, 5)
    assert a != make_table("gpipe", 3, 4)


def test_cells_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        make_table("1f1b", 2, 2).cells[0, 0, 0] = 1


def test_ops_come_in_an_order_in_which_they_can_be_done():
    ops = list(make_table("1f1b", 2, 2).ops())
    assert ops[:4] == [
        Op(0, 0, F, 0, 0),
        Op(1, 0, F, 1, 0),
        Op(1, 1, F, 0, 0),
        Op(1, 1, B, 0, 0),
    ]
    assert [(op.clock, op.slot, op.stage) for op in ops] == sorted(
        (op.clock, op.slot, op.stage) for op in ops
    )
    assert len(ops) == 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_at_is_the_inverse_of_when(schedule):
    table = make_table(schedule, 3, 5, legal_chunks(schedule) or 2)
    again = Table.place(
        table.when(),
        name=schedule,
        stages=3,
        chunks=table.chunks,
        split=table.split,
        placement=table.placement,
        paired=table.paired,
    )
    assert again == table


def test_two_ops_in_one_slot_are_refused():
    when = make_table("1f1b", 2, 2).when().copy()
    when[F, 0] = 0
    with pytest.raises(IllegalTable, match="share one slot"):
        Table.place(when, name="double", stages=2)


def test_a_table_without_split_has_no_w():
    assert (make_table("1f1b", 2, 2).when()[W] == -1).all()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("F0 B0", "F0 W0", "row 4, column 2 .stage 1.: 'W0' .* letters F, B"),
        (
            "F0 B0",
            "B0 F0",
            "row 4, column 2 .stage 1.: 'B0 F0' .* once, .*order F B",
        ),
        ("F0 B0", "F0 F1", "row 4, column 2 .stage 1.: 'F0 F1' .*letter once"),
        ("F0 B0", "F0 B2", "row 4, column 2 .stage 1.: 'B2': microbatches are 0 to 1"),
        ("F0 B0", "F0 B0.1", "row 4, column 2 .stage 1.: 'B0.1': chunks are 0 to 0"),
        ("F0 B0", "f0", "row 4, column 2 .stage 1.: 'f0' .*letters F, B"),
        ("F1,F0 B0", "F1", "row 4: 1 columns, and there must be 2"),
        ("F1,F0 B0", "F1,,F0 B0", "row 4: 3 columns, and there must be 2"),
        ("stage 0,stage 1", "stage 0", "row 2: .*2 comma-separated stage names"),
        (
            "stage 0,stage 1\nF0,",
            "F0,",
            "row 2: .*names, .*'stage 0,stage 1', .*'F0,' holds ops",
        ),
        (
            "stage 0,stage 1",
            "F0 B0,F1",
            "row 2: .*names, .*'stage 0,stage 1', .*'F0 B0,F1' holds ops",
        ),
        (
            "F0 B0",
            "F" + "9" * 5000,
            "row 4, column 2 .stage 1.: 'F999.*…999.*' .*letters F, B",
        ),
        (
            "F0 B0",
            "F" + "9" * 17,
            "row 4, column 2 .stage 1.: 'F99999999999999999': microbatches are 0 to 1",
        ),
        ("F0 B0", "F0.5 B0", "row 4, column 2 .stage 1.: 'F0.5': chunks are 0 to 0"),
        ("F0 B0", "F-1", "row 4, column 2 .stage 1.: 'F-1' .*letters F, B"),
        ("F0 B0", "F\u0663", "row 4, column 2 .stage 1.: 'F\u0663' .*letters F, B"),
        (
            "microbatches=2",
            "microbatches=" + "9" * 5000,
            "row 1: microbatches is '999.*…999.*', .*whole number",
        ),
        ("microbatches=2", "microbatches=999999999", "row 1: so many microbatches"),
        (
            "microbatches=2",
            "microbatches=9000",
            "4 rows .* one a clock; .* legal are 9000 to 36000",
        ),
        ("F0 B0", "x" * 200_000, " ?is not CSV: field larger"),
        (
            "stages=2",
            "stages=two",
            "row 1: stages is 'two', .*at least 1",
        ),
        ("stages=2", "stages=0", "row 1: stages is '0', .*at least 1"),
        ("split=no", "split=maybe", "row 1: split .*'maybe', .* yes or no"),
        ("placement=loop", "placement=w", "row 1: placement is 'w', .* loop or v"),
        ("stages=2", "stages=", "row 1: stages is '', .*whole number"),
        ("stages=2 ", "", "row 1: .*not say stages; .*'# schedule=.* stages=2"),
        ("microbatches=2 ", "", "row 1: .*not say microbatches; "),
        ("stages=2", "stages 2", "row 1: .*not say stages; "),
        (
            "microbatches=2",
            "microbatch=2",
            "row 1: .*microbatch; did you mean microbatches.$",
        ),
        (
            "split=no",
            "qqq=no",
            "row 1: .*qqq; .*schedule, stages, .*chunks, .*placement$",
        ),
        ("stages=2", "stages=2 stages=3", "row 1: says stages twice$"),
        (
            "# schedule",
            "schedule",
            "row 1: must begin with '#' .*'# schedule=mine",
        ),
    ],
)
def test_csv_errors_name_row_column_and_what_is_legal(old, new, message, tmp_path):
    assert old in ONE_F_ONE_B
    path = tmp_path / "mine.csv"
    path.write_text(ONE_F_ONE_B.replace(old, new, 1))
    with pytest.raises(IllegalTable, match=f"mine.csv[,:]? ?{message}"):
        read_csv(path)


@pytest.mark.parametrize("names", ["first,second", ",", "F0 and more,B1", "S0,S1"])
def test_the_stages_may_have_any_names_that_are_no_work(names):
    assert parse_csv(ONE_F_ONE_B.replace("stage 0,stage 1", names)) == parse_csv(
        ONE_F_ONE_B
    )


@pytest.mark.parametrize(
    "text, says",
    [
        (
            "# stages=1 microbatches=1\nF0 B0\n",
            "row 2: .*names, .*'stage 0', .*'F0 B0' holds ops",
        ),
        (
            make_table("interleaved", 2, 2, 2).to_csv().replace("F0.0", "F0", 1),
            r"row 3, column 1 .stage 0.: 'F0' .*chunk .*'F0\.0', .*chunks=2",
        ),
        (
            "# stages=2 microbatches=2 schedule=mine.csv",
            "row 2: .*2 comma-separated stage names",
        ),
    ],
    ids=["names of a single stage", "a chunk", "a title that ends like a file's name"],
)
def test_what_a_text_lacks_is_named(text, says):
    with pytest.raises(IllegalTable, match=says):
        parse_csv(text)


@pytest.mark.parametrize(
    "title",
    [
        "# schedule=1f1b, stages=2, microbatches=2",
        "# schedule = 1f1b stages = 2 microbatches= 2",
        "#schedule=1f1b,stages=2,microbatches=2",
        "# by hand: stages=2; microbatches=2; schedule=1f1b",
    ],
)
def test_a_title_may_have_commas_and_spaces(title):
    assert parse_csv("\n".join([title, *ONE_F_ONE_B.splitlines()[1:]])) == parse_csv(
        ONE_F_ONE_B
    )


@pytest.mark.parametrize("name", ["a=b", "a,b", "knob(k=3)"])
def test_a_name_with_signs_of_the_title_round_trips(name):
    table = dataclasses.replace(make_table("1f1b", 2, 2), name=name)
    assert parse_csv(table.to_csv()) == table


def test_a_name_of_several_words_is_kept_whole():
    assert (
        parse_csv(ONE_F_ONE_B.replace("schedule=1f1b", "schedule=my own")).name
        == "my_own"
    )


def test_a_csv_with_no_schedule_is_named_after_its_file(tmp_path):
    path = tmp_path / "my own.csv"
    path.write_text(ONE_F_ONE_B.replace("schedule=1f1b ", ""))
    assert read_csv(path).name == "my_own"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, r"no schedule's table .*mine\.csv"),
        (lambda path: path.mkdir(), "mine.csv is a directory; .*CSV file"),
        (os.mkfifo, "mine.csv is a pipe"),
        (lambda path: path.symlink_to(path), "mine.csv"),
        (lambda path: path.symlink_to("gone"), "mine.csv"),
        (lambda path: path.touch(), "mine.csv, row 1: must begin with"),
        (lambda path: path.write_text("\n\n"), "mine.csv, row 1: must begin with"),
        (lambda path: path.write_bytes(b"\x89PNG\r\n\xff"), "mine.csv is not text"),
        (
            lambda path: path.write_bytes(ONE_F_ONE_B.encode("utf-16")),
            "mine.csv is UTF-16",
        ),
        (
            lambda path: path.write_text(
                ONE_F_ONE_B.replace("\nF1,", "\n" * 10**6 + "F1,")
            ),
            "1000003 rows after .* legal are 2 to 8",
        ),
    ],
)
def test_what_is_no_table_is_one_sentence(make, says, tmp_path):
    make(tmp_path / "mine.csv")
    with pytest.raises(ConfigError, match=says):
        read_csv(tmp_path / "mine.csv")


@pytest.mark.parametrize(
    "taker", [validate, simulate], ids=lambda taker: taker.__name__
)
@pytest.mark.parametrize(
    "given, says",
    [
        (
            "mine.csv",
            r"takes a table, .*mt\.schedule\.read_csv\('mine\.csv'\)$",
        ),
        (
            Path("mine.csv"),
            r"takes a table, .*mt\.schedule\.read_csv\('mine\.csv'\)$",
        ),
        (
            "1f1b",
            r"takes a table, not '1f1b'; .*make_table, read_csv ",
        ),
        (
            None,
            r"takes a table, not None; .*make_table, ",
        ),
    ],
)
def test_what_is_given_for_a_table_is_told_how_to_become_one(taker, given, says):
    with pytest.raises(IllegalTable, match=f"^{taker.__name__} {says}"):
        taker(given)


@pytest.mark.parametrize("given", ["mine.csv", Path("mine.csv")])
def test_parse_csv_leaves_files_to_read_csv(given):
    with pytest.raises(
        IllegalTable,
        match=r"^parse_csv takes .* text, .*\.read_csv\('mine\.csv'\)$",
    ):
        parse_csv(given)


def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path):
    (tmp_path / "mine.csv").write_text(ONE_F_ONE_B, encoding="utf-8-sig")
    assert read_csv(tmp_path / "mine.csv") == parse_csv(ONE_F_ONE_B)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stages": 0}, "stages is 0"),
        ({"placement": "w"}, "placement is 'w', .* loop, v"),
        ({"stages": 3}, r"cells have shape .1, 2, 3, 2., .*.clocks, 3, 3, 2."),
        ({"name": "two words"}, "name must be one word"),
    ],
)
def test_facts_that_contradict_the_cells_are_refused(change, message):
    facts = {
        "name": "x",
        "stages": 2,
        "microbatches": 1,
        "chunks": 1,
        "split": False,
        "placement": "loop",
    } | change
    with pytest.raises(IllegalTable, match=message):
        Table(**facts, cells=np.full((1, 2, 3, 2), -1))
