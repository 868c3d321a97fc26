"""The table of experiments/communicate/quality.py, of runs that are written here."""

import json

import pytest

from experiments.communicate import quality
from experiments.communicate.quality import METHODS, STEPS


def write(work, name, losses, **more):
    for seed, loss in enumerate(losses):
        directory = quality.directory(work, name, seed)
        directory.mkdir(parents=True)
        rows = [
            {"step": 100, "eval_loss": 9.0},
            {"step": 101, "loss": 3.0},
            {"step": STEPS, "eval_loss": loss, **more},
        ]
        (directory / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )


@pytest.fixture
def work(tmp_path):
    write(tmp_path, quality.PLAIN, (2.0, 2.5, 3.0))
    return tmp_path


def test_losses_are_compared_with_those_of_the_same_seed(work):
    write(work, "int8", (2.001, 2.498, 3.002), reduce_bytes=123456.0)
    assert quality.differences(work, "int8") == pytest.approx([0.001, -0.002, 0.002])
    lines, missed = quality.table(work)
    row = next(line for line in lines if line.startswith("int8"))
    assert (
        row.split()[1:]
        == [
            "2.5003",
            "+0.0003",
            "±",
            "0.0012",
            "0.01",
            "123",
            "+0.0010",
            "-0.0020",
            "+0.0020",
        ]
        and not missed
    )


def test_a_goal_that_is_missed_is_told(work):
    write(work, "int4 with feedback", (2.06, 2.56, 3.06))
    _, missed = quality.table(work)
    assert missed == ["int4 with feedback: +0.0600 ± 0.0000, and the goal is 0.05."]


def test_feedback_that_does_not_help_is_told(work):
    write(work, "top 1% with feedback", (2.3, 2.8, 3.3))
    write(work, "top 1% without", (2.2, 2.7, 3.2))
    assert quality.table(work)[1] == [
        "top 1% with feedback is no better than top 1% without."
    ]


def test_a_run_that_was_stopped_is_none(work):
    directory = quality.directory(work, "int8", 0)
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(
        json.dumps({"step": 100, "eval_loss": 2.0}) + "\n"
    )
    assert (
        quality.result(work, "int8", 0) is None
        and quality.differences(work, "int8") == []
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_methods_differ_in_how_gradients_travel_alone(method, tmp_path):
    config, plain = method.config(1, tmp_path), METHODS[0].config(1, tmp_path)
    assert config.mesh.data == 4 and config.run.seed == 1
    assert (config.run.directory == plain.run.directory) == (
        method.name == quality.PLAIN
    )
    for section in ("model", "data", "train", "optimizer", "precision", "eval"):
        assert getattr(config, section) == getattr(plain, section)
