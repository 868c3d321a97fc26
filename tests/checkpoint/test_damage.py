"""Runs whose files were damaged, or whose clock was set back, between two training processes."""

import os
import shutil

import pytest
from training_processes import EVERY, STEPS, Trainer, assert_undisturbed, committed, newest_is_intact, rows, settings

from meshtrain.checkpoint import steps

pytestmark = pytest.mark.usefixtures("compiled_before")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that has ended, with checkpoints of its last three saves."""
    directory = tmp_path_factory.mktemp("ended")
    trainer = Trainer(settings(directory, STEPS, EVERY))
    assert trainer.end() == 0, trainer.log.read_text()
    assert committed(trainer.run) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    return trainer.run


def largest(step):
    return max(step.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def flip(step):
    content = bytearray(largest(step).read_bytes())
    content[len(content) // 2] ^= 16
    largest(step).write_bytes(content)


def truncate(step):
    os.truncate(largest(step), largest(step).stat().st_size - 1)


def remove(step):
    largest(step).unlink()


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (flip, "is damaged between bytes 0 and"),
        (truncate, " bytes instead of "),
        (remove, "is missing"),
        (empty, "it has no COMMIT file"),
    ],
)
def test_a_damaged_step_is_reported_and_set_aside_and_the_run_goes_on_from_the_one_before(
    damage, sentence, tmp_path, ended, undisturbed
):
    run, last = shutil.copytree(ended, tmp_path / "run"), str(STEPS)
    damage(run / "checkpoints" / last)
    trainer = Trainer(settings(tmp_path, STEPS, EVERY))
    assert trainer.end() == 0, trainer.log.read_text()
    said = trainer.log.read_text().splitlines()[0]
    assert said.startswith(f"meshtrain: checkpoint {run}/checkpoints/{last} is damaged: ") and sentence in said
    assert said.endswith(f"it is set aside as {last}.damaged.")
    assert f"going on after step {STEPS - EVERY}" in trainer.log.read_text()
    assert_undisturbed(run, undisturbed)
    assert newest_is_intact(run) and committed(run)[-1] == STEPS


def test_a_checkpoint_of_a_newer_format_is_refused_and_nothing_is_touched(tmp_path, ended, monkeypatch):
    run = shutil.copytree(ended, tmp_path / "run")
    monkeypatch.setattr(steps, "WHOLE", 3)
    steps.commit(run / "checkpoints" / str(STEPS))
    before = rows(run), sorted(path.name for path in (run / "checkpoints").iterdir())
    trainer = Trainer(settings(tmp_path, STEPS, EVERY))
    assert trainer.end() == 2
    assert trainer.log.read_text().count("\n") == 1
    assert "has format 3, and this meshtrain reads up to 2; update meshtrain" in trainer.log.read_text()
    assert before == (rows(run), sorted(path.name for path in (run / "checkpoints").iterdir()))


def test_after_a_clock_was_set_back_a_run_goes_on_from_its_newest_step_and_keeps_the_right_ones(
    tmp_path, ended, undisturbed
):
    """What was saved before is dated in 2096, the highest step first: the clock of the run that follows is behind all of it."""
    run = shutil.copytree(ended, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    for day, step in enumerate(reversed(committed(run))):
        directory = run / "checkpoints" / str(step)
        for path in (*directory.rglob("*"), directory):
            os.utime(path, (4e9 + 86400 * day,) * 2)
    trainer = Trainer(settings(tmp_path, STEPS, EVERY, checkpoint={"keep": 2}))
    assert trainer.end() == 0, trainer.log.read_text()
    assert f"going on after step {STEPS - EVERY}" in trainer.log.read_text()
    assert_undisturbed(run, undisturbed)
    assert committed(run) == [STEPS - EVERY, STEPS]
