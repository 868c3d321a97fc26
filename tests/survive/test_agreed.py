"""What a run came to, by its supervisors' plans; and a run that was done is not begun again."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.config import load
from meshtrain.survive import agreed
from meshtrain.survive.records import RestartPlan, encode


def _plan(run: Path, number: int, **plan) -> None:
    path = run / "survive" / "plans" / f"{number:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        encode(
            RestartPlan(
                number,
                generation=1,
                leader="n0",
                wall=0.0,
                kind="start",
                reason="",
                **plan,
            )
        )
    )


def test_what_the_supervisors_agreed_on_counts_if_it_is_of_this_start(tmp_path):
    assert agreed.newest(tmp_path) == 0 and agreed.agreed(tmp_path, 0) is None
    _plan(tmp_path, 1, state="forming")
    _plan(tmp_path, 9, state="over", code=75)
    _plan(tmp_path, 10, state="running")
    assert agreed.newest(tmp_path) == 10
    assert agreed.agreed(tmp_path, 8) is None, "it goes on"
    _plan(tmp_path, 11, state="over", code=3)
    assert agreed.agreed(tmp_path, 10) == 3
    assert agreed.agreed(tmp_path, 11) is None, "of an earlier start"


@pytest.mark.parametrize(
    "text",
    [
        '{"state": "over", "co',
        "[]",
        '{"state": "over", "code": "75"}',
        '{"state": "over", "code": 300}',
        "\x00",
    ],
)
def test_a_damaged_plan_says_nothing(tmp_path, text):
    _plan(tmp_path, 1, state="over")
    (tmp_path / "survive" / "plans" / "000001.json").write_text(text)
    (tmp_path / "survive" / "plans" / "000002.json.new").write_text(text)
    assert agreed.newest(tmp_path) == 1
    assert agreed.agreed(tmp_path, 0) is None


@pytest.mark.parametrize(
    "otherwise, code", [("0", 0), ("137", 1), ("2", 2), ("75", 75)]
)
def test_the_command_falls_back_on_the_engines_code(tmp_path, otherwise, code):
    assert (
        agreed.main([str(tmp_path), "--after", "0", "--otherwise", otherwise]) == code
    )
    _plan(tmp_path, 1, state="over", code=3)
    assert agreed.main([str(tmp_path), "--after", "0", "--otherwise", otherwise]) == 3
    assert (
        agreed.main([str(tmp_path), "--after", "1", "--otherwise", otherwise]) == code
    )


def test_the_command_prints_the_newest_number_alone(tmp_path):
    _plan(tmp_path, 12, state="running")
    words = [sys.executable, "-m", "meshtrain.survive.agreed", str(tmp_path)]
    assert (
        subprocess.run(words, capture_output=True, text=True, check=True).stdout
        == "12\n"
    )


# --- a run that was done before a supervisor began


def done(run, step, kind="done", **sections):
    return agreed.done_already(
        [SimpleNamespace(kind=kind, step=step)], load(sections), run
    )


@pytest.mark.parametrize(("patience", "is_done"), [(2, True), (3, False), (0, False)])
def test_a_run_that_patience_ended_is_done_until_it_is_raised(
    tmp_path, patience, is_done
):
    losses = "".join(
        f'{{"step": {k}, "eval_loss": {loss}}}\n'
        for k, loss in ((1, 2.0), (2, 2.5), (3, 2.0))
    )
    (tmp_path / "metrics.jsonl").write_text(losses)
    said = done(
        tmp_path, 3, eval={"every": 1, "patience": patience}, train={"steps": 9}
    )
    if is_done:
        assert re.match(
            r".*step 3 by eval\.patience: .* 2 in a row .* 2\.0000, .*step 1$", said
        )
    else:
        assert said is None


def test_a_run_that_took_all_its_steps_is_done_and_one_that_has_more_or_was_stopped_is_not(
    tmp_path,
):
    assert done(tmp_path, 9, train={"steps": 9}) == "step 9 of 9 was taken"
    assert done(tmp_path, 9, train={"steps": 10}) is None
    assert done(tmp_path, 9, "stopped", train={"steps": 9}) is None
    assert agreed.done_already([], load({"train": {"steps": 9}}), tmp_path) is None


def test_the_steps_of_epochs_are_those_that_the_run_found(tmp_path):
    assert done(tmp_path, 30, train={"epochs": 2.0}) is None
    (tmp_path / "config.yaml").write_text("train: {steps: 30, epochs: 2.0}\n")
    assert done(tmp_path, 30, train={"epochs": 2.0}) == "step 30 of 30 was taken"
    assert done(tmp_path, 30, train={"epochs": 3.0}) is None
