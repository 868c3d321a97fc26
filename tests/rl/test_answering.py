"""A run that learns from its own answers: the same on every mesh, and after every end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering_runs import answering
from train_in_processes import train_in_processes

import meshtrain as mt
from meshtrain.config import to_yaml

FULL = {"data": 2, "tensor": 2, "pipeline": 2}


def rows_of(config: mt.Config) -> list[dict[str, Any]]:
    """The rows of a run that is trained to its end."""
    rows: list[dict[str, Any]] = []
    mt.train(config, callbacks=[rows.append])
    return rows


def answers_of(config: mt.Config) -> list[dict[str, Any]]:
    lines = (Path(config.run.directory) / "answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_draws_scores_and_learns_and_tells_of_it(tmp_path: Path) -> None:
    config = answering(tmp_path, mesh={"data": 2}, train={"steps": 2})
    rows = rows_of(config)
    for row in rows:
        assert 0 <= row["rl/reward"] <= 1
        assert 1 <= row["rl/answer_tokens"] <= config.rl.answers
        assert row["rl/gap_max"] <= 1e-5
        assert row["rl/rewards_failed"] == 0
        assert row["rl/draw_seconds"] > 0
        assert row["grad_norm"] > 0
    kept = answers_of(config)
    assert [line["kind"] for line in kept] == 2 * ["worst", "median", "best"]
    assert [line["step"] for line in kept] == [1, 1, 1, 2, 2, 2]
    for line in kept:
        assert len(line["group_rewards"]) == config.rl.group
        assert line["reward"] in line["group_rewards"]


MESHES: dict[str, dict[str, Any]] = {
    "data 8": {"mesh": {"data": 8}},
    "2 x 2 x 2": {"mesh": FULL, "parallel": {"zero_stage": 3, "microbatches": 2}},
    "context": {
        "mesh": {"data": 2, "context": 2, "tensor": 2},
        "parallel": {"zero_stage": 3},
    },
}


@pytest.mark.thorough
def test_twenty_steps_are_those_of_one_device_on_every_mesh(tmp_path: Path) -> None:
    train = {"steps": 20}
    alone = answering(tmp_path / "one", train=train)
    wanted = rows_of(alone)
    for name, sections in MESHES.items():
        config = answering(tmp_path / name, train=train, **sections)
        for row, right in zip(rows_of(config), wanted, strict=True):
            for metric in ("loss", "grad_norm", "rl/reward", "rl/entropy"):
                assert row[metric] == pytest.approx(right[metric], abs=1e-4), (
                    name,
                    row["step"],
                )
        # the same tokens
        assert [line["answer"] for line in answers_of(config)] == [
            line["answer"] for line in answers_of(alone)
        ]


def started(config: mt.Config, file: Path) -> subprocess.Popen[bytes]:
    file.write_text(to_yaml(config))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "meshtrain.train", "--config", str(file)]
    return subprocess.Popen(command, env=environment)


def losses_of(config: mt.Config) -> dict[int, float]:
    lines = (Path(config.run.directory) / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


@pytest.mark.thorough
def test_a_run_that_was_killed_draws_the_same_answers_and_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    how = {
        "mesh": FULL,
        "train": {"steps": 8},
        "checkpoint": {"every": 2},
        "rl": {"epochs": 2, "supervised": 1},
        "log": {"every": 1},
    }
    whole = answering(tmp_path / "whole", **how)
    assert started(whole, tmp_path / "whole.yaml").wait() == 0
    killed = answering(tmp_path / "killed", **how)
    process = started(killed, tmp_path / "killed.yaml")
    metrics = Path(killed.run.directory) / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None
        process.poll()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert started(killed, tmp_path / "killed.yaml").wait() == 0
    assert losses_of(killed) == losses_of(whole)
    by_step = [{line["step"]: line for line in answers_of(c)} for c in (whole, killed)]
    assert by_step[0] == by_step[1]


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    alone = answering(tmp_path / "one", mesh={"data": 4}, log={"every": 1})
    rows_of(alone)
    each = {"directory": str(tmp_path / "two" / "run"), "fake_devices": 2}
    both = answering(tmp_path / "two", mesh={"data": 4}, log={"every": 1}, run=each)
    train_in_processes(both, 2, tmp_path / "two.yaml")
    found = losses_of(both)
    assert found.keys() == losses_of(alone).keys()
    for step, loss in losses_of(alone).items():
        assert found[step] == pytest.approx(loss, abs=1e-5)


@pytest.mark.thorough
def test_a_teacher_draws_the_model_to_itself(tmp_path: Path) -> None:
    text = {"objective": "next_token", "steps": 30}
    teacher = answering(
        tmp_path / "teacher", train=text, rl={"prompts": None, "reward": None}
    )
    rows_of(teacher)
    student = answering(
        tmp_path / "student",
        mesh={"data": 2, "tensor": 2},
        train={"steps": 30, "global_batch_size": 32},
        rl={"teacher": teacher.run.directory, "reward": None, "answers": 12},
        run={"seed": 5},
    )
    rows = rows_of(student)
    distances = [row["rl/teacher_kl"] for row in rows]
    # nothing is told of rewards that there are none of
    assert not [row for row in rows if "rl/reward" in row or "rl/flat_groups" in row]
    assert distances[0] > 0.5
    assert np.mean(distances[-5:]) < 0.5 * distances[0]


@pytest.mark.thorough
def test_a_teacher_that_is_the_model_itself_has_nothing_to_teach(
    tmp_path: Path,
) -> None:
    first = answering(tmp_path / "first", train={"steps": 1})
    rows_of(first)
    again = answering(
        tmp_path / "again",
        mesh={"data": 2, "tensor": 2},
        model={"weights": None},
        checkpoint={"resume": first.run.directory, "weights_only": True},
        rl={"teacher": first.run.directory, "reward": None},
        train={"steps": 1},
    )
    (row,) = rows_of(again)
    assert abs(row["rl/teacher_kl"]) <= 1e-5
