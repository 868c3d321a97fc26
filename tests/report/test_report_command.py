import json

import pytest

from experiments.watch.page import write_run
from meshtrain.report.__main__ import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "one", 600)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere"], "there is no run directory nowhere."),
        ([], "the following arguments are required"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["a", "--htm", "x"], "there is no option --htm; did you mean --html?"),
        (["a", "--html", "/nowhere/x.html"], "there is no directory /nowhere."),
        (["a", "--html", "."], ". cannot be written: is a directory."),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(arguments, sentence, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_a_cluster_that_cannot_be_is_a_sentence(run, capsys):
    assert main([str(run), "--cluster", "h10"]) == 2
    assert "h10" in capsys.readouterr().err


def test_the_answer_comes_first(run, capsys):
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(
        "healthy; done, all 600 steps\none: llama, 805 k parameters, data 2 x tensor 2"
    )


def test_json_holds_the_same_figures(run, capsys):
    assert main([str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["level"] == "good" and found["step"] == 600 and found["speed"]["median"] == pytest.approx(0.35, rel=0.1)
    )
    assert found["plan"]["step_seconds"] == found["bounds"]["planned"] >= found["bounds"]["roof"]
    assert found["config"]["train.steps"] == 600


def test_two_runs_are_compared(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", 600, seed=3, slower=1.5)
    assert main([str(run), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["compared"]["time"]["differs"]
        and found["compared"]["time"]["least"] < 0.5 < found["compared"]["time"]["most"]
    )
    assert found["other"]["speed"]["median"] > 1.2 * found["speed"]["median"]
    assert main([str(run), str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run} and {run}: no difference beyond chance\n")


def test_html_is_written_where_it_is_wanted(run, tmp_path, capsys):
    assert main([str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert f"wrote {tmp_path / 'page.html'}" in capsys.readouterr().err


def test_another_cluster_gives_another_plan(run, capsys):
    planned = []
    for cluster in ("cpu", "a100-80"):
        assert main([str(run), "--json", "--cluster", cluster]) == 0
        planned.append(json.loads(capsys.readouterr().out)["bounds"]["planned"])
    assert planned[1] < planned[0] / 10
