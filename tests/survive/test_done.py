"""A run that had come to its end is not begun again by supervisors."""

from types import SimpleNamespace

import pytest

from meshtrain.config import load
from meshtrain.survive.done import done_already


def told(run, step, kind="done", **sections):
    return done_already([SimpleNamespace(kind=kind, step=step)], load(sections), run)


@pytest.mark.parametrize(("patience", "done"), [(2, True), (3, False), (0, False)])
def test_a_run_that_patience_ended_is_done_until_it_is_raised(tmp_path, patience, done):
    losses = "".join(f'{{"step": {k}, "eval_loss": {loss}}}\n' for k, loss in ((1, 2.0), (2, 2.5), (3, 2.0)))
    (tmp_path / "metrics.jsonl").write_text(losses)
    said = told(tmp_path, 3, eval={"every": 1, "patience": patience}, train={"steps": 9})
    why = "it ended after step 3 by eval.patience: no evaluation of 2 in a row was below 2.0000, that of step 1"
    assert said == (why if done else None)


def test_a_run_that_took_all_its_steps_is_done_and_one_that_has_more_or_was_stopped_is_not(tmp_path):
    assert told(tmp_path, 9, train={"steps": 9}) == "step 9 of 9 was taken"
    assert told(tmp_path, 9, train={"steps": 10}) is None
    assert told(tmp_path, 9, "stopped", train={"steps": 9}) is None
    assert done_already([], load({"train": {"steps": 9}}), tmp_path) is None


def test_the_steps_of_epochs_are_those_that_the_run_found(tmp_path):
    assert told(tmp_path, 30, train={"epochs": 2.0}) is None
    (tmp_path / "config.yaml").write_text("train: {steps: 30, epochs: 2.0}\n")
    assert told(tmp_path, 30, train={"epochs": 2.0}) == "step 30 of 30 was taken"
    assert told(tmp_path, 30, train={"epochs": 3.0}) is None
