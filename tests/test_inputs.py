"""What people give by hand and is none gets one sentence before JAX sees it."""

import re

import numpy as np
import pytest

import meshtrain as mt
from meshtrain.data import open_data
from meshtrain.errors import PREFIX

TINY = {
    "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 260},
    "mesh": {"data": 2, "tensor": 2},
    "parallel": {"microbatches": 2, "sequence_parallel": True},
    "train": {"steps": 2, "global_batch_size": 4, "sequence_length": 16},
    "data": {"source": "synthetic"},
}


@pytest.fixture(scope="module")
def program() -> mt.Program:
    return mt.Program(mt.load(TINY))


def batch(rows: int = 4, length: int = 16, **changed) -> dict[str, np.ndarray]:
    ids = np.arange(rows * length).reshape(rows, length) % 260
    return {"tokens": ids, "labels": ids} | changed


@pytest.mark.parametrize(
    "given", ["configs/quickstart.yaml", {"mesh": {"data": 2}}, None]
)
@pytest.mark.parametrize(
    ("name", "taker"),
    [
        ("mt.Program", mt.Program),
        ("mt.plan", mt.plan),
        ("mt.train", mt.train),
        ("mt.open_data", open_data),
    ],
)
def test_what_is_no_config_is_refused_with_the_way_to_one(name, taker, given):
    with pytest.raises(
        mt.ConfigError, match=rf"{name} takes a config, .* given .*mt\.load"
    ):
        taker(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            np.zeros((4, 16), int),
            "has tokens, labels .* has a ndarray",
        ),
        ({"tokens": np.zeros((4, 16), int)}, "this one has tokens"),
        (batch(mask=np.ones((4, 16))), "this one has tokens, labels, mask"),
        (
            batch(tokens=np.zeros((4, 16))),
            r"tokens are float64\[4, 16\]; .* whole numbers",
        ),
        (batch(tokens=[[1, 2], [3]]), "tokens are rows of different lengths"),
        (
            batch(labels=np.full((4, 16), -100)),
            "labels have the id -100; .* 0 to 259",
        ),
        (batch(tokens=np.full((4, 16), 260)), "tokens have the id 260; .* 0 to 259"),
        (
            batch(labels=np.zeros((4, 15), int)),
            r"labels has shape \[4, 15\], but tokens \[4, 16\]",
        ),
        (batch(rows=5), "5 rows cannot be shared by data 2"),
    ],
)
def test_what_is_no_batch_is_refused(given, says, program):
    with pytest.raises(mt.ConfigError, match=says):
        program.place(given)


@pytest.mark.parametrize(
    ("rows", "length", "says"),
    [
        (6, 16, "3 rows .* cannot be cut into 2 microbatches"),
        (4, 15, "tensor 2 must divide the 15 tokens"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_as_it_is_traced(
    rows, length, says, program
):
    with pytest.raises(mt.ConfigError, match=says):
        program.lower(program.place(batch(rows, length)))


@pytest.mark.thorough
def test_a_state_that_was_used_up_is_refused(program):
    placed, before = program.place(batch()), program.init()
    after, _ = program.train_step(before, placed)
    with pytest.raises(
        mt.ConfigError,
        match=r"used up .*train_step; .* state",
    ):
        program.train_step(before, placed)
    assert int(program.train_step(after, placed)[0].step) == 2


@pytest.mark.thorough
def test_a_state_where_weights_are_wanted_is_refused(program):
    state, placed = program.init(), program.place(batch())
    for wants in (
        lambda: program.eval_step(state, placed),
        lambda: program.logits(state, placed["tokens"]),
    ):
        with pytest.raises(mt.ConfigError, match=r"give state\.params in place"):
            wants()


@pytest.mark.thorough
def test_what_is_printed_of_a_state_and_of_data_is_a_line(program):
    assert re.fullmatch(r"State\(step=0, 39 arrays, .*\)", repr(program.init()))
    data, _ = mt.open_data(program.config)
    assert repr(data) == data.describe()


def test_a_notebook_shows_the_sentence_alone():
    with pytest.raises(mt.ConfigError) as raised:
        mt.load({"mesh": {"dta": 2}})
    assert raised.value._render_traceback_() == [f"{PREFIX}{raised.value}"]
