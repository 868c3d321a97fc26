import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.schedule.buffers import allocate
from meshtrain.schedule.facts import facts_of
from meshtrain.schedule.generators import (
    MOST_CHUNKS,
    SCHEDULES,
    chosen_chunks,
    legal_chunks,
    make_table,
)
from meshtrain.schedule.simulation import Durations, simulate
from meshtrain.schedule.table import B, F, IllegalTable, W
from meshtrain.schedule.validate import validate

SPLIT = ("zb_h1", "zb_interleaved", "zb_paired")
LOOPED = [name for name in SCHEDULES if legal_chunks(name) is None]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_legal_for_any_number_of_microbatches_and_chunks(
    schedule, stages
):
    for chunks in [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 3]:
        for microbatches in {
            1,
            2,
            stages - 1,
            stages,
            stages + 1,
            2 * stages + 1,
            3 * stages,
        } - {0}:
            table = make_table(schedule, stages, microbatches, chunks)
            sizes = table.name, table.stages, table.microbatches, table.chunks
            assert sizes == (schedule, stages, microbatches, chunks)
            validate(table)


def test_1f1b_does_forward_s_clocks_after_the_first_stage_and_backward_in_mirror_image():
    stages, microbatches = 4, 9
    when = make_table("1f1b", stages, microbatches).when()
    for s in range(stages):
        for m in range(microbatches):
            assert when[F, s, m] == m + s
            assert when[B, s, m] == m + 2 * (stages - 1) - s


def test_the_last_stage_turns_a_microbatch_around_in_one_clock():
    for schedule, chunks in (
        ("1f1b", 1),
        ("interleaved", 3),
        ("zb_interleaved", 2),
        ("v_1f1b", 2),
    ):
        when = make_table(schedule, 4, 8, chunks).when()
        assert (when[F, -1] == when[B, -1]).all(), schedule


def test_pairs_turn_a_microbatch_around_in_the_next_clock_and_are_else_the_same():
    for paired, plain in (("paired", "interleaved"), ("zb_paired", "zb_interleaved")):
        for v in (1, 3):
            after, before = (
                make_table(name, 4, 8, v).when() for name in (paired, plain)
            )
            assert (after[F] == before[F]).all() and (after[B] == before[B] + 1).all()


def test_with_one_chunk_interleaved_is_1f1b_and_looped_bfs_is_gpipe():
    for looped, plain in (
        ("interleaved", "1f1b"),
        ("looped_bfs", "gpipe"),
        ("zb_interleaved", "zb_h1"),
    ):
        assert (make_table(looped, 3, 7).cells == make_table(plain, 3, 7).cells).all()


@pytest.mark.parametrize("schedule", ["gpipe", "looped_bfs"])
def test_no_backward_before_the_last_forward_has_begun(schedule):
    when = make_table(schedule, 3, 5, legal_chunks(schedule) or 2).when()
    assert when[F].max() <= when[B].min()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_entries_in_flight_are_those_of_the_docstring(schedule):
    p, m = 4, 16
    for v in [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 4]:
        expected = {
            "gpipe": m,
            "looped_bfs": v * m,
            "1f1b": 2 * p - 1,
            "zb_h1": 2 * p - 1,
            "interleaved": (v + 1) * p - 1,
            "zb_interleaved": (v + 1) * p - 1,
            "v_1f1b": 2 * p,
            "paired": (v + 1) * p,
            "zb_paired": (v + 1) * p + 1,
        }[schedule]
        assert allocate(make_table(schedule, p, m, v)).depths.stash == expected


@pytest.mark.parametrize(
    "schedule, chunks, entries",
    [("1f1b", 1, [7, 5, 3, 1]), ("v_1f1b", 2, [8, 8, 8, 8])],
)
def test_entries_in_flight_by_stage(schedule, chunks, entries):
    assert (
        simulate(
            make_table(schedule, 4, 16, chunks), Durations()
        ).peak_in_flight.tolist()
        == entries
    )


@pytest.mark.parametrize("p, m, v", [(4, 5, 2), (4, 7, 3), (3, 11, 2)])
def test_uneven_groups_cost_memory_as_the_docstring_says(p, m, v):
    largest = -(-m // (m // p))
    assert allocate(make_table("interleaved", p, m, v)).depths.stash == min(
        (v - 1) * largest + 2 * p - 1, m * v
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_gpipe_and_looped_bfs_need_memory_that_grows_with_the_microbatches(
    schedule,
):
    few, many = (
        allocate(make_table(schedule, 4, m, legal_chunks(schedule) or 2)).depths
        for m in (8, 64)
    )
    assert (few == many) == (schedule not in ("gpipe", "looped_bfs"))


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize(
    "p, m, v", [(4, 4, 2), (4, 5, 3), (4, 7, 2), (3, 13, 4), (1, 3, 2), (5, 2, 1)]
)
def test_forward_and_backward_take_the_fewest_clocks_possible(schedule, p, m, v):
    when = make_table(schedule, p, m, v).when()
    assert len(np.unique(when[F])) == len(np.unique(when[B])) == m * v + p - 1


@pytest.mark.parametrize("schedule", SPLIT)
def test_all_stages_do_w_in_the_same_clocks(schedule):
    p, m, v = 4, 10, legal_chunks(schedule) or 3
    table = make_table(schedule, p, m, v)
    assert len(np.unique(table.when()[W])) == m * v
    assert ((table.cells[:, :, W, 0] >= 0).sum(axis=1) % p == 0).all()


@pytest.mark.parametrize("schedule", SPLIT)
def test_splitting_the_backward_takes_no_more_memory(schedule):
    whole = {"zb_h1": "1f1b", "zb_paired": "paired"}.get(schedule, "interleaved")
    chunks = legal_chunks(schedule) or 3
    split, together = (
        allocate(make_table(name, 4, 12, chunks)).depths for name in (schedule, whole)
    )
    # of pairs it is held a clock longer, until W
    assert split.stash == together.stash + (schedule == "zb_paired")


@pytest.mark.parametrize(
    "asked, says",
    [
        (
            ("1f1B", 2, 2),
            r"schedule '1f1B' .* gpipe, .* path .*\.csv; did you mean 1f1b",
        ),
        (
            ("1f1b", 2, 2, 2),
            "1f1b has 1 .* 2 asked for; with 2 .* interleaved, looped_bfs",
        ),
        (
            ("v_1f1b", 2, 2),
            "v_1f1b has 2 .* 1 asked for; with 1 .* gpipe",
        ),
        (("interleaved", 0, 1, 1), "stages is 0, .* at least 1"),
        (("interleaved", 1, 0, 1), "microbatches is 0, .* at least 1"),
        (("interleaved", 1, 1, 0), "chunks is 0, .* at least 1"),
    ],
)
def test_what_no_schedule_can_have_is_refused(asked, says):
    with pytest.raises(ValueError, match=says):
        make_table(*asked)


def test_a_csv_file_is_a_schedule(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(make_table("interleaved", 2, 4, 2).to_csv())
    assert make_table(str(path), 2, 4, 2) == make_table("interleaved", 2, 4, 2)
    with pytest.raises(
        ValueError, match=r"mine\.csv is for microbatches=4, .*microbatches=8"
    ):
        make_table(str(path), 2, 8, 2)


def test_a_csv_file_that_was_edited_is_read_again(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(make_table("1f1b", 2, 2).to_csv())
    assert make_table(str(path), 2, 2) is make_table(str(path), 2, 2)
    path.write_text(make_table("gpipe", 2, 2).to_csv())
    assert make_table(str(path), 2, 2) == make_table("gpipe", 2, 2)
    path.unlink()
    with pytest.raises(ConfigError, match="there is no schedule's table"):
        make_table(str(path), 2, 2)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("microbatches", "microbatch", r"did you mean microbatches\?$"),
        ("F1,", "F9,", r"microbatches are 0 to 1\.$"),
        (
            "F1,F0 B0\nB0,",
            "F1 B0,F0 B0\n,",
            r"mine\.csv: .*1f1b: clock 1 .*row 4\), stage 0, .*'F1 B0': B0 is",
        ),
    ],
)
def test_a_csv_file_is_refused_in_a_sentence_with_one_end(old, new, says, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(make_table("1f1b", 2, 2).to_csv().replace(old, new))
    with pytest.raises(IllegalTable, match=says):
        make_table(str(path), 2, 2)


@pytest.mark.parametrize(
    ("layers", "stages", "microbatches", "chunks"),
    [
        (32, 4, 8, 8),
        (80, 8, 8, 5),  # 10 layers a stage: 10 chunks are more than are taken
        (
            126,
            16,
            32,
            4,
            # 8 layers on the longest stage: 8 chunks would leave virtual stages without any
        ),
        (7, 2, 4, 2),  # 4 and 3 layers: 2, 2, 2 and 1
        (9, 2, 4, 1),  # 5 and 4 layers: 5 chunks would leave virtual stages without any
        (8, 8, 8, 1),  # a layer a stage
        (8, 2, 1, 1),  # one microbatch gains nothing
        (8, 1, 4, 1),
    ],
)
def test_chunks_are_chosen_that_divide_the_layers_of_a_stage(
    layers, stages, microbatches, chunks
):
    assert chosen_chunks(layers, stages, microbatches) == chunks


def test_chosen_chunks_are_fewer_where_a_table_would_be_too_large():
    assert [chosen_chunks(8, 2, m) for m in (2**16, 2**17, 2**18, 2**19)] == [
        4,
        2,
        1,
        1,
    ]


@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
def test_chosen_chunks_cost_neither_time_nor_memory_in_lockstep(stages):
    """Also where the microbatches are fewer than the stages, or no multiple of them."""
    for microbatches in range(2, 3 * stages + 2):
        v = chosen_chunks(MOST_CHUNKS * stages, stages, microbatches)
        assert v == MOST_CHUNKS
        plain, chunked = (
            facts_of("1f1b", stages, microbatches),
            facts_of("interleaved", stages, microbatches, v),
        )
        assert chunked.seconds(Durations(1 / v, 1 / v, 1 / v)) < plain.seconds(
            Durations()
        )
        assert chunked.depths.stash / v <= plain.depths.stash


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "schedule, chunks",
    [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_interleaved", 4)],
)
def test_no_table_has_fewer_clocks_with_a_forward_or_a_backward(
    schedule, chunks, stages
):
    """The last stage cannot begin before clock p - 1, the last microbatch not before clock m - 1."""
    for microbatches in range(1, 3 * stages):
        least = max(
            microbatches * chunks + stages - 1, stages * chunks + microbatches - 1
        )
        used = (
            make_table(schedule, stages, microbatches, chunks).cells[..., 0] >= 0
        ).any(axis=1)
        assert used[:, F].sum() == used[:, B].sum() == least
        assert used[:, W].sum() == (microbatches * chunks if schedule in SPLIT else 0)
