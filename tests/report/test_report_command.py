import json

import pytest
from refusals import refused

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
        (["a", "b", "c"], "there is no run directory a."),
        (["a", "--htm", "x"], "option --htm; did you mean --html?"),
        (["a", "--html", "/nowhere/x.html"], "there is no directory /nowhere."),
        (["a", "--html", "."], ". cannot be written: is a directory."),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(arguments, sentence, capsys):
    assert sentence in refused(main, capsys, *arguments)


def test_a_cluster_that_cannot_be_is_a_sentence(run, capsys):
    assert main([str(run), "--cluster", "h10"]) == 2
    assert "h10" in capsys.readouterr().err


def test_the_answer_comes_first(run, capsys):
    assert main([str(run)]) == 0
    answer = (
        "healthy; done, all 600 steps\none: llama, 805 k parameters, data 2 x tensor 2"
    )
    assert capsys.readouterr().out.startswith(answer)


@pytest.fixture
def as_json(capsys):
    def read(*arguments):
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return read


def test_json_holds_the_same_figures(run, as_json):
    content = as_json(run)
    assert content["level"] == "good" and content["step"] == 600
    assert content["speed"]["median"] == pytest.approx(0.35, rel=0.1)
    assert (
        content["plan"]["step_seconds"]
        == content["bounds"]["planned"]
        >= content["bounds"]["roof"]
    )
    assert content["config"]["train.steps"] == 600


def test_two_runs_are_compared(run, tmp_path, as_json, capsys):
    content = as_json(run, write_run(tmp_path / "other", 600, seed=3, slower=1.5))
    time = content["compared"]["time"]
    assert time["differs"] and time["least"] < 0.5 < time["most"]
    assert content["other"]["speed"]["median"] > 1.2 * content["speed"]["median"]
    assert main([str(run), str(run)]) == 0
    assert capsys.readouterr().out.startswith(
        f"{run} and {run}: no difference beyond chance\n"
    )


def test_html_is_written_where_it_is_wanted(run, tmp_path, capsys):
    assert main([str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert f"wrote {tmp_path / 'page.html'}" in capsys.readouterr().err


def test_another_cluster_gives_another_plan(run, as_json):
    cpu, a100 = (
        as_json(run, "--cluster", name)["bounds"]["planned"]
        for name in ("cpu", "a100-80")
    )
    assert a100 < cpu / 10
