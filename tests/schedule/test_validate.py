import dataclasses
import random

import numpy as np
import pytest
from refusals import pattern_of
from replayed import replay

from meshtrain.schedule.buffers import Depths, allocate
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.table import B, F, IllegalTable, W, parse_csv
from meshtrain.schedule.validate import validate


def changed(table, clock, stage, slot, value):
    cells = table.cells.copy()
    cells[clock, stage, slot] = value
    return dataclasses.replace(table, cells=cells)


NO_SUCH = (
    r"clock 1, stage 1, F slot: microbatch .*; microbatches are 0 to 1, chunks 0 to 0"
)


@pytest.mark.parametrize(
    "clock, stage, slot, value, says",
    [
        (3, 0, B, -1, "stage 0 never does B1, .*once"),
        (
            3,
            0,
            F,
            (1, 0),
            r"clock 3 \(CSV row 6\), stage 0, cell 'F1 B1': F1 .*clock 1 already",
        ),
        (3, 1, W, (0, 0), "clock 3, stage 1: a W, .*only a split table"),
        *(
            (1, 1, F, value, NO_SUCH)
            for value in ((2, 0), (0, 1), (-1, 0), (0, -1), (-2, -2))
        ),
    ],
)
def test_one_wrong_cell_is_named(clock, stage, slot, value, says):
    with pytest.raises(IllegalTable, match=says):
        validate(changed(make_table("1f1b", 2, 2), clock, stage, slot, value))


def test_a_missing_weight_gradient_is_named():
    table = make_table("zb_interleaved", 2, 2, 2)
    clock, stage, slot = np.argwhere(table.cells[:, :, W:, 0] >= 0)[-1]
    with pytest.raises(IllegalTable, match=f"stage {stage} never does W1.0"):
        validate(changed(table, clock, stage, slot + W, -1))


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "# stages=2 microbatches=1\na,b\nF0,F0 B0\nB0,\n",
            "clock 0 (CSV row 3), stage 1, cell 'F0 B0': F0 is too early: it reads what F0 of stage 0 sends in clock "
            "0, and that is there from clock 1 on",
        ),
        (
            "# stages=2 microbatches=1\na,b\nF0,\nB0,F0 B0\n",
            "row 4), ... B0 is too early: ... B0 ... clock 1, ... clock 2",
        ),
        (
            "# stages=1 microbatches=2\na\nF0 B1\nF1 B0\n",
            "'F0 B1': B1 is too early: ... loss of F1, ... clock 1",
        ),
        (
            "# stages=1 microbatches=2\na\nF0\nF1+B1\nB0\n",
            "'F1+B1': B1 ... too early: ... loss of F1, ... pairs ... clock 2",
        ),
        (
            "# stages=1 microbatches=2 split=yes\na\nF0\nF1+I0\nI1+W1\nW0\n",
            "'I1+W1': W1 is too early: ... I1 leaves, ... pairs ... 3 on",
        ),
        (
            "# stages=1 microbatches=2 split=yes\na\nF0 I0 W1\nF1 I1 W0\n",
            "'F0 I0 W1': W1 is too early: ... I1 leaves, ... clock 1",
        ),
        (
            "# stages=2 microbatches=1 chunks=2\na,b\nF0.0,\nF0.1,F0.0\n,F0.1 B0.1\nB0.1,\n,B0.0\nB0.0,\n",
            "row 4), ... F0.1 ... too early: ... F0.0 ... stage 1 ... clock 1",
        ),
    ],
)
def test_what_comes_before_its_input_is_named_with_the_clock_from_which_it_could(
    text, message
):
    with pytest.raises(IllegalTable, match=pattern_of(message)):
        validate(parse_csv(text))


def is_legal(table):
    """The rules once more, as plainly as they can be said."""
    when = {}
    for op in table.ops():
        key = (op.slot, int(table.virtual(op.stage, op.chunk)), op.microbatch)
        if key in when:
            return False
        when[key] = op.clock
    last = table.virtual_stages - 1
    for m in range(table.microbatches):
        for k in range(last + 1):
            f, b, w = (when.get((slot, k, m)) for slot in (F, B, W))
            if f is None or b is None or (w is None) == table.split:
                return False
            if k > 0 and f <= when.get((F, k - 1, m), f):
                return False
            if b < f + table.paired if k == last else b <= when.get((B, k + 1, m), b):
                return False
            if w is not None and w < b + table.paired:
                return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_verdict_on_tables_with_two_cells_swapped_is_that_of_the_plain_rules(
    schedule,
):
    rng = random.Random(schedule)
    verdicts = []
    for _ in range(150):
        table = make_table(
            schedule,
            rng.randint(1, 3),
            rng.randint(1, 4),
            legal_chunks(schedule) or rng.randint(1, 2),
        )
        # Room at both ends, and a swap within one stage and slot: a change that may well leave the table legal.
        room = np.full((1, table.stages, 3, 2), -1)
        cells = np.concatenate([room, table.cells, room])
        stage, slot = (
            rng.randrange(table.stages),
            rng.choice([F, B, W] if table.split else [F, B]),
        )
        a, b = rng.randrange(len(cells)), rng.randrange(len(cells))
        cells[[a, b], stage, slot] = cells[[b, a], stage, slot]
        table = dataclasses.replace(table, cells=cells)
        try:
            validate(table)
            verdicts.append(True)
        except IllegalTable:
            verdicts.append(False)
        else:
            replay(table, allocate(table))
        assert verdicts[-1] == is_legal(table), table.to_csv()
    assert 10 < sum(verdicts) < 140  # both verdicts were put to the test


PLACES = ["active", "microbatch", "chunk", "stash"]
ARRAYS = [
    *(f"f.{name}" for name in [*PLACES, "inbox"]),
    *(f"b.{name}" for name in [*PLACES, "inbox", "cot"]),
    *(f"w.{name}" for name in [*PLACES, "cot"]),
    *("first", "last", "enter", "exit", "head_out", "leave"),
]


def test_all_arrays_of_the_buffers_are_put_to_the_test():
    buffers = vars(allocate(make_table("zb_interleaved", 3, 7, 2)))
    arrays = {name for name, value in buffers.items() if isinstance(value, np.ndarray)}
    for letter in "fbw":
        slot = vars(buffers[letter])
        arrays |= {
            f"{letter}.{name}" for name, value in slot.items() if value is not None
        }
    assert arrays == set(ARRAYS)


@pytest.mark.parametrize("name", ARRAYS)
def test_replay_finds_one_wrong_entry_in_any_array_of_the_buffers(name):
    table = make_table("zb_interleaved", 3, 7, 2)
    buffers = allocate(table)
    letter, _, field = name.rpartition(".")
    holder = getattr(buffers, letter) if letter else buffers
    array = getattr(holder, field)
    if array.dtype == bool:
        places = np.argwhere(array)
    elif letter:
        places = np.argwhere(
            holder.active & ~(buffers.first if name == "f.inbox" else False)
        )
    else:
        places = np.argwhere(array >= 0)
    assert len(places)
    for place in random.Random(name).sample(places.tolist(), 4):
        wrong = array.copy()
        wrong[tuple(place)] = (
            ~array[tuple(place)] if array.dtype == bool else array[tuple(place)] + 1
        )
        changed_holder = dataclasses.replace(holder, **{field: wrong})
        changed_buffers = (
            dataclasses.replace(buffers, **{letter: changed_holder})
            if letter
            else changed_holder
        )
        with pytest.raises(IllegalTable):
            replay(table, changed_buffers)


@pytest.mark.parametrize("name", Depths._fields)
def test_replay_finds_a_buffer_that_is_too_shallow(name):
    table = make_table("zb_interleaved", 3, 7, 2)
    buffers = allocate(table)
    shallow = buffers.depths._replace(**{name: getattr(buffers.depths, name) - 1})
    with pytest.raises(IllegalTable, match=f"place .* of the {name}, which has"):
        replay(table, dataclasses.replace(buffers, depths=shallow))


def test_a_table_with_idle_clocks_is_legal():
    table = make_table("1f1b", 2, 2)
    spread = np.full((2 * table.clocks, 2, 3, 2), -1)
    spread[::2] = table.cells
    validate(dataclasses.replace(table, cells=spread))
