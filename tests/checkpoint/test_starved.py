"""Training processes on a full disk and on read-only directories, each in a mount namespace of its own."""

import contextlib
import shutil
from functools import partial

import pytest
from mounts import BIND, READ_ONLY, REMOUNT, may_mount, mount, own_mounts
from refusals import tells
from training_processes import (
    EVERY,
    STEPS,
    Trainer,
    assert_undisturbed,
    committed,
    newest_is_intact,
    rows,
    settings,
)

from meshtrain.checkpoint import steps

pytestmark = pytest.mark.usefixtures("compiled_before")


@pytest.fixture(scope="module")
def mounts():
    """Skips where a process may not have mounts of its own."""
    if not may_mount():
        pytest.skip("a process may not have mounts of its own here")


def small_disk(directory):
    """Room for two checkpoints and a bit."""
    own_mounts()
    mount("tmpfs", directory, options="size=700k")


def full_disk(directory):
    """Room for names, and not for a byte."""
    own_mounts()
    mount("tmpfs", directory, options="size=64k")
    with (
        contextlib.suppress(OSError),
        (directory / "filler").open("wb", buffering=0) as file,
    ):
        while file.write(bytes(4096)):
            pass


def full_with_a_run(run, directory):
    """What is in `run`, on a disk without room for a byte more."""
    own_mounts()
    mount("tmpfs", directory, options="size=4m")
    shutil.copytree(run, directory, dirs_exist_ok=True)
    with (
        contextlib.suppress(OSError),
        (directory / "filler").open("wb", buffering=0) as file,
    ):
        while file.write(bytes(4096)):
            pass


def read_only(directory):
    own_mounts()
    mount(str(directory), directory, BIND)
    mount("none", directory, BIND | REMOUNT | READ_ONLY)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_on_a_full_disk_training_goes_on_or_stops_and_the_last_step_stays_intact(
    policy, tmp_path, undisturbed, mounts
):
    config, run = (
        settings(tmp_path, STEPS, EVERY, checkpoint={"on_failed_save": policy}),
        tmp_path / "run",
    )
    run.mkdir()
    trainer = Trainer(
        config,
        before=partial(small_disk, run),
        after=partial(shutil.copytree, run, tmp_path / "left"),
    )
    # Without a checkpoint of its last step
    assert trainer.end() == 1, trainer.log.read_text()
    left, said = tmp_path / "left", trainer.log.read_text()
    third = 3 * EVERY
    failed = f"step {third} could not be written: no space"
    assert tells(said, failed, f"step {2 * EVERY} is intact.")
    assert committed(left) == [EVERY, 2 * EVERY] and newest_is_intact(left)
    assert sorted(p.name for p in (left / "checkpoints").iterdir()) == [
        str(EVERY),
        str(2 * EVERY),
    ]
    found = {row["step"]: row["loss"] for row in rows(left)}
    assert (
        len(found)
        == len(rows(left))
        == (STEPS if policy == "continue" else third + EVERY)
    )
    assert all(undisturbed[step] == loss for step, loss in found.items())


@pytest.mark.thorough
def test_a_disk_that_is_full_from_the_start_is_reported_in_one_sentence(
    tmp_path, mounts
):
    (tmp_path / "run").mkdir()
    trainer = Trainer(
        settings(tmp_path, STEPS, EVERY), before=partial(full_disk, tmp_path / "run")
    )
    assert trainer.end() == 2, trainer.log.read_text()
    said = trainer.log.read_text()
    assert said.count("\n") == 1 and "cannot be used: no space" in said


@pytest.mark.thorough
def test_a_run_that_would_go_on_on_a_full_disk_is_refused_and_keeps_its_rows_and_config(
    tmp_path, mounts
):
    config, run = settings(tmp_path, 2 * EVERY, EVERY), tmp_path / "run"
    assert Trainer(config).end() == 0
    steps.remove(
        run / "checkpoints" / str(2 * EVERY)
    )  # as if it had been killed before: rows are to be dropped
    before = {
        name: (run / name).read_bytes() for name in ("metrics.jsonl", "config.yaml")
    }
    run.rename(tmp_path / "made")
    run.mkdir()
    trainer = Trainer(
        config,
        before=partial(full_with_a_run, tmp_path / "made", run),
        after=partial(shutil.copytree, run, tmp_path / "left"),
    )
    assert trainer.end() == 2, trainer.log.read_text()
    said = trainer.log.read_text()
    assert said.count("\n") == 1 and "cannot be used: no space" in said
    assert {name: (tmp_path / "left" / name).read_bytes() for name in before} == before


@pytest.mark.thorough
def test_checkpoints_that_cannot_be_written_are_reported_and_the_run_does_not_end_well(
    tmp_path, undisturbed, mounts
):
    config, checkpoints = (
        settings(tmp_path, STEPS, EVERY),
        tmp_path / "run" / "checkpoints",
    )
    checkpoints.mkdir(parents=True)
    trainer = Trainer(config, before=partial(read_only, checkpoints))
    assert trainer.end() == 1
    said = trainer.log.read_text()
    failed = f"step {EVERY} could not be written: read-only"
    assert tells(said, failed, "none before it.")
    assert_undisturbed(trainer.run, undisturbed)


def test_a_read_only_run_directory_is_refused_in_one_sentence(tmp_path, mounts):
    (tmp_path / "run").mkdir()
    trainer = Trainer(
        settings(tmp_path, STEPS, EVERY), before=partial(read_only, tmp_path / "run")
    )
    assert trainer.end() == 2
    said = trainer.log.read_text()
    assert said.count("\n") == 1 and "cannot be written: read-only" in said
