"""Whole runs, in this process: what metrics.jsonl, the directory and the terminal have of checkpoints."""

import shutil
import threading

import pytest
from checkpoint_runs import LAYOUTS
from refusals import tells
from training_processes import rows, settings

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.checkpoint.saving import Saver
from meshtrain.config import load
from meshtrain.run.record import RunRecord
from meshtrain.train import main

pytestmark = pytest.mark.usefixtures("shared_programs")

ONE, CUBE, *_ = LAYOUTS


def train(directory, count, every, layout=ONE, **sections):
    """The run's directory, after a run of `count` steps that ended well."""
    (data, tensor, pipeline), parallel = LAYOUTS[layout]
    mesh = {"data": data, "tensor": tensor, "pipeline": pipeline}
    config = settings(directory, count, every, mesh=mesh, parallel=parallel, **sections)
    assert main(["--config", str(config)]) == 0
    return directory / "run"


@pytest.mark.thorough
def test_the_metrics_have_every_save_although_few_steps_are_logged(tmp_path, capsys):
    run = train(tmp_path, 9, 2, log={"every": 4}, checkpoint={"every": 2, "keep": 9})
    logged = sum(row.get("checkpoint_bytes", 0) for row in rows(run))
    printed = capsys.readouterr().out.splitlines()
    said = next(line for line in printed if line.startswith("last save: "))
    looks = [
        f"  meshtrain {words}"
        for words in (
            f"report {run}",
            f"checkpoint ls {run}",
            f"generate {run} --prompt TEXT",
        )
    ]
    assert printed[-4:] == [f"the run is in {run}", *looks]
    saved = [
        digests.total_bytes(run / "checkpoints" / str(step)) for step in (2, 4, 6, 8, 9)
    ]
    assert [row["step"] for row in rows(run)] == [4, 8, 9]
    unlogged = [
        k for k in range(1, 4) if logged == sum(saved[:-k])
    ]  # a save may end after the next row is written
    assert len(unlogged) == 1
    assert said.startswith(f"last save: {sum(saved[-unlogged[0] :]) / 1e6:.1f} MB in ")
    logged = [row for row in rows(run) if "checkpoint_bytes" in row]
    assert all(
        0 < row["checkpoint_blocked_seconds"] <= row["checkpoint_seconds"]
        for row in logged
    )


@pytest.mark.thorough
def test_the_last_the_best_and_every_nth_checkpoint_stay(tmp_path):
    keys = {"keep": 2, "keep_best": 1, "keep_every": 4}
    evaluates = {"every": 2, "batches": 1}
    run = train(
        tmp_path,
        14,
        2,
        checkpoint={"every": 2, **keys},
        eval=evaluates,
        optimizer={"learning_rate": 0.1},
    )
    losses = {row["step"]: row["eval_loss"] for row in rows(run) if "eval_loss" in row}
    assert list(losses) == [2, 4, 6, 8, 10, 12, 14]
    best = min(losses, key=losses.__getitem__)
    assert steps.committed_in(run / "checkpoints") == sorted({best, 4, 8, 12, 14})


@pytest.mark.thorough
def test_on_all_three_axes_a_resumed_run_has_the_same_bits_with_dropout_and_a_loss_scale_that_moves(
    tmp_path,
):
    """The random numbers, the data and the loss scale with its count of good steps go on where they were."""
    sections = {
        "model": {"dropout": 0.2},
        "precision": {
            "compute": "float16",
            "loss_scale": 256.0,
            "loss_scale_window": 2,
        },
        "optimizer": {"learning_rate": 0.01},
    }
    run = train(tmp_path, 9, 3, CUBE, **sections)
    names = ("step", "loss", "grad_norm", "loss_scale")
    before = [[row[name] for name in names] for row in rows(run)]
    assert len({row["loss_scale"] for row in rows(run)}) >= 4
    for step in (6, 9):  # as if it had been killed before
        steps.remove(run / "checkpoints" / str(step))
    train(tmp_path, 9, 3, CUBE, **sections)
    assert [[row[name] for name in names] for row in rows(run)] == before


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh_with_the_same_batches(tmp_path, capsys):
    """Its losses are those of the run that stayed, to rounding, on text whose batches are in a shuffled order."""
    text = {
        "data": {"source": "stdlib"},
        "model": {"vocab_size": 260},
        "train": {"global_batch_size": 8},
    }
    for name in ("stays", "moves"):
        (tmp_path / name).mkdir()
    stays = rows(train(tmp_path / "stays", 8, 4, **text))
    run = train(tmp_path / "moves", 8, 4, **text)
    steps.remove(run / "checkpoints" / "8")  # as if it had been killed before
    capsys.readouterr()
    moved = rows(train(tmp_path / "moves", 8, 4, CUBE, **text))
    assert tells(capsys.readouterr().err, "mesh.data was 1 and is 2")
    assert (
        [row["step"] for row in moved]
        == [row["step"] for row in stays]
        == list(range(1, 9))
    )
    for row, expected in zip(moved, stays, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-6)


@pytest.mark.thorough
def test_a_run_with_nothing_left_to_do_says_so(tmp_path, capsys):
    train(tmp_path, 3, 0)
    capsys.readouterr()
    assert train(tmp_path, 2, 0) == tmp_path / "run"
    said = capsys.readouterr()
    assert tells(said.out, "step 3 is taken", "train.steps is 2", "nothing is left")
    assert said.err == "meshtrain: train.steps was 3 and is 2 from here on.\n"
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.thorough
def test_a_run_whose_text_has_changed_goes_on_only_when_that_is_allowed(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for name in "abcd":
        (text / f"{name}.txt").write_text(f"{name} " * 400)
    sections = {"data": {"source": str(text), "validation": 0.0}}
    run = train(tmp_path, 2, 2, **sections)
    for name in "cd":
        (text / f"{name}.txt").unlink()
    kept = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    again = settings(tmp_path, 4, 2, **sections)
    capsys.readouterr()
    assert main(["--config", str(again)]) == 2
    prepared, said = capsys.readouterr().err.splitlines()
    assert prepared.startswith(f"meshtrain: preparing {text} (2 files")
    assert tells(said, "checkpoints/2 does not fit", f"data.source {text}")
    assert said.endswith(" with checkpoint.allow: [data.source].")
    assert {
        path.name: path.read_bytes() for path in run.iterdir() if path.is_file()
    } == kept
    train(tmp_path, 4, 2, **sections, checkpoint={"allow": ["data.source"], "every": 2})
    assert "holds other tokens than it did" in capsys.readouterr().err
    old, new = (
        StepManifest.read(run / "checkpoints" / str(step)).data for step in (2, 4)
    )
    assert new["batches"] == 4 and old["digest"] != new["digest"]
    train(tmp_path, 5, 2, **sections)  # the change is the checkpoint's own by now
    assert "other tokens" not in capsys.readouterr().err


@pytest.mark.thorough
def test_a_run_directory_that_is_removed_while_the_run_goes_on_is_there_again_at_its_end(
    tmp_path, capsys, monkeypatch
):
    def remove_at_3(self, row, due):
        if row["step"] == 3:
            # The save of step 2 has nothing left to do in the directory.
            assert saved.wait(60)
            shutil.rmtree(tmp_path / "run")
        write(self, row, due)

    def retain_and_say(self):
        retain(self)
        saved.set()

    saved, write, retain = threading.Event(), RunRecord.after_metrics, Saver.retain
    monkeypatch.setattr(Saver, "retain", retain_and_say)
    monkeypatch.setattr(RunRecord, "after_metrics", remove_at_3)
    run = train(tmp_path, 6, 2)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert load(run / "config.yaml").train.steps == 6
    assert (
        steps.committed_in(run / "checkpoints") == [4, 6]
        and digests.problems(run / "checkpoints" / "6") == []
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert tells(said, "went away", "made again", "checkpoints that went")


@pytest.mark.thorough
def test_a_run_of_islands_tells_when_they_met_and_goes_on_in_between_with_the_same_bits(
    tmp_path,
):
    sections = {
        "mesh": {"data": 2, "islands": 2},
        "parallel": {"sync": {"every": 3, "start": 1}},
        "log": {"every": 1},
    }
    config = settings(tmp_path, 8, 6, **sections)
    assert main(["--config", str(config)]) == 0
    run, names = (
        tmp_path / "run",
        ("step", "loss", "grad_norm", "sync_islands", "sync_drift", "sync_bytes"),
    )
    before = [[row.get(name) for name in names] for row in rows(run)]
    assert [row["step"] for row in rows(run) if "sync_islands" in row] == [4, 7]
    steps.remove(
        run / "checkpoints" / "8"
    )  # as if it had been killed after step 6, between two meetings
    assert main(["--config", str(config)]) == 0
    assert [[row.get(name) for name in names] for row in rows(run)] == before
