"""A person sees where a run is and how long it still takes."""

import errno
import io
import subprocess
import sys

import pytest

from meshtrain.errors import say
from meshtrain.telemetry.progress import Reporter

ROW = {"step": 2, "loss": 2.5, "tokens_per_second": 1234.5, "step_seconds": 2.0}


def test_without_a_terminal_each_shown_step_is_one_plain_line_with_loss_speed_and_time_left(
    capsys,
):
    with Reporter(10, 0) as report:
        report.after_metrics(ROW, due=True)
        report.after_metrics(ROW | {"step": 3}, due=False)
        report.after_metrics(ROW | {"step": 4, "eval_loss": 2.75}, due=True)
    shown, evaluated = capsys.readouterr().out.splitlines()
    assert (
        shown == "step 2/10  loss 2.5000  1,234 tokens/s  16 s left"
        and "eval loss 2.7500" in evaluated
    )


def test_a_line_has_the_reward_beside_the_loss_which_has_no_sign_where_it_is_nothing(
    capsys,
):
    with Reporter(10, 0) as report:
        report.after_metrics(ROW | {"loss": -0.004, "rl/reward": 0.6171875}, due=True)
        report.after_metrics(ROW | {"loss": -1e-8, "rl/reward": -1e-9}, due=True)
        report.after_metrics(ROW | {"rl/reward": 0.5, "rl/teacher_kl": 1.25}, due=True)
    learned, flat, taught = capsys.readouterr().out.splitlines()
    assert learned == "step 2/10  loss -0.0040  reward 0.617  1,234 tokens/s  16 s left"
    assert "loss 0.0000  reward 0.000 " in flat
    assert "loss 2.5000  reward 0.500  from the teacher 1.250  1,234" in taught


@pytest.mark.parametrize(("step", "left"), [(5, "50 ms"), (9, "10 ms"), (10, "0 s")])
def test_nothing_is_left_at_the_last_step_alone(capsys, step, left):
    with Reporter(10, 0) as report:
        report.after_metrics(ROW | {"step": step, "step_seconds": 0.01}, due=True)
    assert capsys.readouterr().out.endswith(f"tokens/s  {left} left\n")


def test_on_a_terminal_a_bar_stands_there_while_the_first_step_compiles(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    with Reporter(10, 3):
        assert "3/10" in terminal.getvalue() and "compiling" in terminal.getvalue()


def test_on_a_terminal_rows_that_are_due_stand_above_the_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    with Reporter(10, 0) as report:
        report.after_metrics(ROW, due=True)
        report.after_metrics(ROW | {"step": 3, "loss": 7.5}, due=False)
        report.after_metrics(ROW | {"step": 4}, due=True)
    lines = [line for line in terminal.getvalue().splitlines() if "step " in line]
    assert [line.partition("step ")[2][:4] for line in lines] == ["2/10", "4/10"]
    assert (
        "left" not in lines[0].partition("tokens/s")[2] and "━" in terminal.getvalue()
    )


def test_samples_of_an_evaluation_are_lines_of_their_own(capsys):
    with Reporter(10, 0) as report:
        samples = [
            {"prompt": "one and", "text": " two"},
            {"prompt": "x", "text": "\x1b[2J"},
        ]
        report.after_metrics(ROW | {"samples": samples}, due=True)
    _, first, second = capsys.readouterr().out.splitlines()
    assert first == "sample: one and │  two" and "\x1b" not in second


def test_other_processes_of_a_run_say_nothing(capsys):
    with Reporter(10, 0, quiet=True) as report:
        report.after_metrics(ROW, due=True)
        report.write("a sentence")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_standard_output_that_takes_nothing_is_reported_once_and_training_goes_on(
    number, capsys
):
    class Refuses(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "no")

    report = Reporter(10, 0)
    report.console.file = Refuses()
    for step in (1, 2, 3):
        report.after_metrics(ROW | {"step": step}, due=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(
        "meshtrain: standard output cannot be written: "
    )


@pytest.mark.thorough
def test_standard_output_and_standard_error_on_a_full_disk_end_no_training():
    code = (
        "from meshtrain.telemetry.progress import Reporter\n"
        "report = Reporter(10, 0)\n"
        f"for step in range(3): report.after_metrics({ROW} | {{'step': step}}, due=True)\n"
        "import os; os._exit(7)"
    )
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run(
                [sys.executable, "-c", code], stdout=full, stderr=full, check=False
            ).returncode
            == 7
        )


def test_what_turns_letters_round_is_escaped(capsys):
    Reporter(10, 0).write("a\u202egnp.exe: 3 batches")
    say("b\u2066\x1b[2J, and\na second line")
    out, err = capsys.readouterr()
    assert (out, err) == (
        "a\\u202egnp.exe: 3 batches\n",
        "meshtrain: b\\u2066\\x1b[2J, and\na second line\n",
    )
