"""python -m meshtrain.train as a user meets it: files, exit codes, one plain sentence for a mistake."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshtrain import train
from meshtrain.checkpoint import Checkpointer
from meshtrain.config import load
from meshtrain.train import main

TINY = {
    "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 260},
    "train": {"steps": 4, "global_batch_size": 4, "sequence_length": 16},
    "data": {"source": "synthetic"},
    "optimizer": {"warmup_steps": 1},
}


def write(directory: Path, **sections: dict) -> list[str]:
    """The arguments for a run of TINY with other sections, in a directory of its own."""
    config = {"run": {"directory": str(directory / "run")}, **TINY, **sections}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(directory / "config.yaml")]


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_all_three_axes_writes_config_metrics_and_checkpoints(tmp_path):
    mesh = {"mesh": {"data": 2, "tensor": 2, "pipeline": 2}, "parallel": {"microbatches": 2}}
    assert main(write(tmp_path, **mesh, eval={"every": 2, "batches": 1}, checkpoint={"every": 2})) == 0
    assert load(tmp_path / "run" / "config.yaml").mesh.pipeline == 2
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    needed = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds"}
    assert all(needed <= row.keys() for row in found)
    assert [row["step"] for row in found if "eval_loss" in row] == [2, 4]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} >= {"2", "4"}


def test_a_run_that_is_done_adds_nothing_when_run_again(tmp_path):
    arguments = write(tmp_path)
    assert main(arguments) == 0
    before = rows(tmp_path)
    assert main(arguments) == 0
    assert rows(tmp_path) == before


def test_a_longer_run_goes_on_where_the_shorter_one_ended(tmp_path):
    constant = {"optimizer": {"schedule": "constant", "warmup_steps": 0}}
    assert main([*write(tmp_path, **constant), "--set", "train.steps=2"]) == 0
    assert main(write(tmp_path, **constant)) == 0
    once = tmp_path / "once"
    once.mkdir()
    assert main(write(once, **constant)) == 0
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(row["step"], row["loss"]) for row in rows(once)]


def test_metrics_are_logged_every_so_many_steps_and_at_the_last(tmp_path):
    assert main([*write(tmp_path, log={"every": 3})]) == 0
    assert [row["step"] for row in rows(tmp_path)] == [3, 4]


def test_a_loss_that_is_not_finite_stops_the_run_with_exit_code_1_and_says_at_which_step(tmp_path, capsys):
    wild = {"optimizer": {"name": "sgd", "learning_rate": 1e30, "grad_clip": 0.0, "warmup_steps": 0}}
    assert main(write(tmp_path, **wild)) == 1
    error = capsys.readouterr().err
    assert "the loss of step" in error and "Traceback" not in error


# --- asked to stop where no step is being taken


def interrupted(monkeypatch, owner, name, number=signal.SIGTERM):
    """Sends this process a signal when `name` is first called."""
    function, sent = getattr(owner, name), []

    def wrapped(*arguments, **keywords):
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    "owner, name, number",
    [
        (train, "open_data", signal.SIGTERM),
        (train, "build", signal.SIGINT),
        (Checkpointer, "restore_or_init", signal.SIGTERM),
        (train.Loop, "compiled", signal.SIGHUP),
    ],
)
def test_a_signal_before_the_first_step_gives_up_at_once_and_loses_nothing(
    owner, name, number, tmp_path, capsys, monkeypatch
):
    arguments = write(tmp_path)
    with monkeypatch.context() as patch:
        interrupted(patch, owner, name, number)
        assert main(arguments) == 75
    said = capsys.readouterr().err
    assert said == f"meshtrain: {number.name}: stopped before the first step; nothing is lost, run again to go on.\n"
    assert main(arguments) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_signal_that_something_swallowed_before_the_first_step_still_stops_the_run(tmp_path, monkeypatch, capsys):
    def swallowing(*arguments):
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        return build(*arguments)

    build = train.build
    monkeypatch.setattr(train, "build", swallowing)
    assert main(write(tmp_path)) == 75
    assert "stopped on request before the first step, run again to go on." in capsys.readouterr().out
    assert rows(tmp_path) == []


def test_a_signal_in_an_evaluation_is_met_by_the_next_step_and_its_checkpoint(tmp_path, monkeypatch):
    arguments = write(tmp_path, eval={"every": 2, "batches": 1})
    with monkeypatch.context() as patch:
        interrupted(patch, train.Loop, "evaluate")
        assert main(arguments) == 75
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3] and "eval_loss" in rows(tmp_path)[1]
    assert main(arguments) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_signal_in_the_last_save_finds_the_run_done(tmp_path, monkeypatch):
    interrupted(monkeypatch, Checkpointer, "wait")
    assert main(write(tmp_path)) == 0
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()


def test_print_config_prints_yaml_that_loads_to_the_same_config(tmp_path, capsys):
    arguments = write(tmp_path)
    assert main([*arguments, "--set", "mesh.data=2", "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "printed.yaml") == load(arguments[1], ["mesh.data=2"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_both_families_train_with_dropout(tmp_path, name):
    model = TINY["model"] | {"family": name, "dropout": 0.1}
    assert main([*write(tmp_path, model=model), "--set", "train.steps=2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "mseh.data=2"], "there is no section mseh; did you mean mesh?"),
        (["--set", "mesh.data=3"], "mesh.data 3 does not divide train.global_batch_size 4"),
        (["--set", "run.directory=/proc/nowhere"], "run.directory /proc/nowhere cannot be written"),
        (["--set", "data.source=/no/such/text"], "/no/such/text"),
        (["--set", "mesh.data=4", "--set", "run.fake_devices=2"], "needs 4 devices, but there are 2"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2_from_the_command_itself(tmp_path, arguments, says):
    command = [sys.executable, "-m", "meshtrain.train", *write(tmp_path), *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
