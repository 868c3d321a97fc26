"""A person sees where a run is and how long it still takes."""

import errno
import io

import pytest

from meshtrain.telemetry.progress import Reporter, duration

ROW = {"step": 2, "loss": 2.5, "tokens_per_second": 1234.5, "step_seconds": 2.0}


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (59.6, "1 min 0 s"), (245, "4 min 5 s"), (3600 * 6 + 7 * 60, "6 h 7 min")]
)
def test_durations_read_as_one_says_them(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_each_shown_step_is_one_plain_line_with_loss_speed_and_time_left(capsys):
    with Reporter(10, 0) as report:
        report.step(ROW, show=True)
        report.step(ROW | {"step": 3}, show=False)
    assert capsys.readouterr().out == "step 2/10  loss 2.5000  1,234 tokens/s  16 s left\n"


def test_an_evaluation_is_shown_with_its_step(capsys):
    Reporter(10, 0).step(ROW | {"eval_loss": 2.75}, show=True)
    assert "eval loss 2.7500" in capsys.readouterr().out


def test_other_processes_of_a_run_say_nothing(capsys):
    with Reporter(10, 0, quiet=True) as report:
        report.step(ROW, show=True)
        report.write("a sentence")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_standard_output_that_takes_nothing_is_reported_once_and_training_goes_on(number, capsys):
    class Refuses(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "no")

    report = Reporter(10, 0)
    report.console.file = Refuses()
    for step in (1, 2, 3):
        report.step(ROW | {"step": step}, show=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("meshtrain: standard output cannot be written: ")
