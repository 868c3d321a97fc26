"""Training processes killed, stopped and starved for real. 30 kills: pytest -m slow -s tests/checkpoint/test_faults.py"""

import os
import random
import shutil
import signal
import socket
import time
from functools import partial
from pathlib import Path

import jax
import pytest
from trainer import BIND, CONTEXT, READ_ONLY, REMOUNT, Trainer, mount, own_mounts, rows, settings

from meshtrain.checkpoint import digests, steps

STEPS, EVERY = 60, 15


@pytest.fixture(scope="module", autouse=True)
def compiled_before():
    """The processes find the tests' compiled programs."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kept.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of an uninterrupted run, by step."""
    return losses_of(tmp_path_factory.mktemp("undisturbed"), STEPS, EVERY)


def losses_of(directory, count, every, **sections):
    trainer = Trainer(settings(directory, count, every, **sections))
    assert trainer.end() == 0, trainer.log.read_text()
    found = {row["step"]: row["loss"] for row in rows(trainer.run)}
    assert list(found) == list(range(1, count + 1))
    return found


def assert_undisturbed(run: Path, expected):
    """Each step once, each loss the same bits."""
    assert [row["step"] for row in rows(run)] == list(expected)
    assert {row["step"]: row["loss"] for row in rows(run)} == expected


def committed(run):
    return steps.committed_in(run / "checkpoints")


def newest_is_intact(run):
    newest = run / "checkpoints" / str(committed(run)[-1])
    return steps.commit_problem(newest) is None and digests.problems(newest) == []


def killed_again_and_again(config, kills, count, every, tell=lambda _: None):
    """Kills `kills` processes of one run, then lets it end; (step reached, newest checkpoint, step being saved or None) of each
    kill that met training.

    In turn: after a random step, while saving, at any moment from the start of the process.
    """
    chosen, lost = random.Random(kills), []
    for kill in range(1, kills + 1):
        trainer = Trainer(config)
        start, last = (committed(trainer.run) or [0])[-1], count - 2 * every
        if kill % 3 == 0:
            time.sleep(chosen.uniform(0, 3))
        else:
            assert trainer.until(trainer.training), trainer.log.read_text()
            saves = kill % 3 == 2 and start < last
            target = chosen.randint(start, max(start, min(start + 3 * every, last)))
            assert trainer.until(trainer.saving if saves else trainer.wrote(target)), trainer.log.read_text()
            time.sleep(chosen.uniform(0, 0.05) if saves else 0)
        trainer.kill()
        reached, newest = (rows(trainer.run) or [{"step": 0}])[-1]["step"], (committed(trainer.run) or [0])[-1]
        unfinished = [int(p.name.removesuffix(steps.WRITING)) for p in (trainer.run / "checkpoints").glob("*.writing")]
        assert len(unfinished) <= 1
        saving = unfinished[0] if unfinished else None
        doing = "starting" if not trainer.training() else f"saving {saving}" if saving else "between saves"
        tell(f"kill {kill} {doing}, after step {reached}; newest checkpoint {newest}")
        if trainer.training():
            lost.append((reached, newest, saving))
        assert not newest or newest_is_intact(trainer.run)
    trainer = Trainer(config)
    assert trainer.end() == 0, trainer.log.read_text()
    return lost


def assert_little_is_lost(lost, every):
    """At most `every` steps are taken again. A kill during a save costs that save as well: `every` steps, and those taken meanwhile,
    of which there are fewer than `every`, since the next save would wait for this one.
    """
    for reached, newest, saving in lost:
        if saving is None:
            assert reached - newest <= every, (reached, newest)
        else:
            assert saving - newest == every and 0 <= reached - saving <= every, (reached, newest, saving)


def test_killed_runs_go_on_with_the_same_losses(tmp_path, undisturbed):
    config = settings(tmp_path, STEPS, EVERY)
    lost = killed_again_and_again(config, 3, STEPS, EVERY)
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert_little_is_lost(lost, EVERY)


@pytest.mark.slow
def test_thirty_kills(tmp_path):
    count, every, larger = 800, 40, {"model": {"d_model": 64, "d_ff": 256}, "train": {"sequence_length": 64}}
    (tmp_path / "undisturbed").mkdir()
    expected = losses_of(tmp_path / "undisturbed", count, every, **larger)
    lost = killed_again_and_again(settings(tmp_path, count, every, **larger), 30, count, every, tell=print)
    assert_undisturbed(tmp_path / "run", expected)
    between = [reached - newest for reached, newest, saving in lost if saving is None]
    during = [reached - saving for reached, _, saving in lost if saving is not None]
    print(
        f"30 kills: 0 wrong losses, 0 steps duplicated or missing; a checkpoint every {every} steps; steps taken again after "
        f"{len(between)} kills between saves: at most {max(between)}, after {len(during)} kills during a save: {every} and those "
        f"taken since it began, at most {max(during)}; after {30 - len(lost)} kills while starting: none"
    )
    assert len(during) >= 5
    assert_little_is_lost(lost, every)


# --- damaged between two runs


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
def test_a_damaged_step_is_told_and_set_aside_and_the_run_goes_on_from_the_one_before(
    damage, sentence, tmp_path, ended, undisturbed
):
    run, last = shutil.copytree(ended, tmp_path / "run"), str(STEPS)
    damage(run / "checkpoints" / last)
    trainer = Trainer(settings(tmp_path, STEPS, EVERY))
    assert trainer.end() == 0, trainer.log.read_text()
    told = trainer.log.read_text().splitlines()[0]
    assert told.startswith(f"meshtrain: checkpoint {run}/checkpoints/{last} is damaged: ") and sentence in told
    assert told.endswith(f"it is set aside as {last}.damaged.")
    assert f"going on after step {STEPS - EVERY}" in trainer.log.read_text()
    assert_undisturbed(run, undisturbed)
    assert newest_is_intact(run) and committed(run)[-1] == STEPS


def test_a_checkpoint_of_a_newer_format_is_refused_and_nothing_is_touched(tmp_path, ended, monkeypatch):
    run = shutil.copytree(ended, tmp_path / "run")
    monkeypatch.setattr(steps, "FORMAT", 2)
    steps.commit(run / "checkpoints" / str(STEPS))
    before = rows(run), sorted(path.name for path in (run / "checkpoints").iterdir())
    trainer = Trainer(settings(tmp_path, STEPS, EVERY))
    assert trainer.end() == 2
    assert trainer.log.read_text().count("\n") == 1
    assert "has format 2, and this meshtrain reads up to 1; update meshtrain" in trainer.log.read_text()
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


# --- asked to stop


@pytest.mark.parametrize("name, when", [("SIGTERM", "a step"), ("SIGINT", "a step"), ("SIGTERM", "a save")])
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step_and_code_75(name, when, tmp_path, undisturbed):
    config = settings(tmp_path, STEPS, EVERY)
    trainer = Trainer(config)
    assert trainer.until(trainer.wrote(7) if when == "a step" else trainer.saving)
    os.kill(trainer.process.pid, signal.Signals[name])
    assert trainer.end() == 75, trainer.log.read_text()
    last = rows(trainer.run)[-1]["step"]
    assert 7 <= last < STEPS
    assert committed(trainer.run)[-1] == last and newest_is_intact(trainer.run)
    assert f"meshtrain: {name}: stopping after this step, with a checkpoint." in trainer.log.read_text()
    assert Trainer(config).end() == 0
    assert_undisturbed(trainer.run, undisturbed)


def one_of_two(rank, port):
    """Tells this process, as Slurm does, that it is one of two."""
    os.environ |= {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
    }
    os.environ |= {"SLURM_LOCALID": str(rank), "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}


def test_a_preemption_notice_to_one_of_two_processes_stops_both_with_a_checkpoint_and_code_75(tmp_path):
    run, sections = tmp_path / "run", {"mesh": {"pipeline": 2}, "parallel": {"microbatches": 2}}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    trainers = []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        own = settings(tmp_path / str(rank), 9999, EVERY, run={"directory": str(run), "fake_devices": 1}, **sections)
        trainers.append(Trainer(own, before=partial(one_of_two, rank, port)))
    assert trainers[0].until(lambda: bool(committed(run))), trainers[0].log.read_text()
    os.kill(trainers[1].process.pid, signal.SIGTERM)
    assert [trainer.end() for trainer in trainers] == [75, 75], [trainer.log.read_text() for trainer in trainers]
    last = rows(run)[-1]["step"]
    assert committed(run)[-1] == last < 9999 and newest_is_intact(run)
    assert Trainer(settings(tmp_path, last + 3, EVERY, **sections)).end() == 0  # one process goes on, with two devices
    assert [row["step"] for row in rows(run)] == list(range(1, last + 4))


def test_a_second_signal_ends_a_run_at_once_and_leaves_the_last_checkpoint_intact(tmp_path, undisturbed):
    config = settings(tmp_path, STEPS, EVERY)
    trainer = Trainer(config)
    assert trainer.until(lambda: committed(trainer.run) and trainer.saving())
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):  # both are there when it looks
        os.kill(trainer.process.pid, number)
    assert trainer.end() == -signal.SIGTERM, trainer.log.read_text()  # Python looks at lower numbers first
    assert "second SIGTERM: stopping at once" in trainer.log.read_text()
    assert newest_is_intact(trainer.run)
    assert Trainer(config).end() == 0
    assert_undisturbed(trainer.run, undisturbed)


def test_a_second_run_in_the_directory_is_refused_and_the_first_goes_on(tmp_path, undisturbed):
    config = settings(tmp_path, STEPS, EVERY)
    first = Trainer(config)
    assert first.until(first.wrote(1))
    os.kill(first.process.pid, signal.SIGSTOP)
    (tmp_path / "again").mkdir()
    second = Trainer(settings(tmp_path / "again", STEPS, EVERY, run={"directory": str(first.run)}))
    assert second.end() == 2
    os.kill(first.process.pid, signal.SIGCONT)
    said = second.log.read_text().splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"meshtrain: run.directory {first.run} is in use by process {first.process.pid} on ")
    assert first.end() == 0
    assert_undisturbed(first.run, undisturbed)


# --- starved


@pytest.fixture(scope="module")
def mounts():
    """Skips where a process may not have mounts of its own."""
    process = CONTEXT.Process(target=own_mounts)
    process.start()
    process.join()
    if process.exitcode:
        pytest.skip("a process may not have mounts of its own here")


def small_disk(directory):
    """Room for two checkpoints and a bit."""
    own_mounts()
    mount("tmpfs", directory, options="size=700k")


def read_only(directory):
    own_mounts()
    mount(str(directory), directory, BIND)
    mount("none", directory, BIND | REMOUNT | READ_ONLY)


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_on_a_full_disk_training_goes_on_or_stops_and_the_last_step_stays_intact(policy, tmp_path, undisturbed, mounts):
    config, run = settings(tmp_path, STEPS, EVERY, checkpoint={"on_failed_save": policy}), tmp_path / "run"
    run.mkdir()
    trainer = Trainer(config, before=partial(small_disk, run), after=partial(shutil.copytree, run, tmp_path / "left"))
    assert trainer.end() == 1, trainer.log.read_text()  # without a checkpoint of its last step
    left, said = tmp_path / "left", trainer.log.read_text()
    third = 3 * EVERY
    assert (
        f"the checkpoint of step {third} could not be written: no space left on device; step {2 * EVERY} is intact."
        in said
    )
    assert committed(left) == [EVERY, 2 * EVERY] and newest_is_intact(left)
    assert sorted(p.name for p in (left / "checkpoints").iterdir()) == [str(EVERY), str(2 * EVERY)]
    found = {row["step"]: row["loss"] for row in rows(left)}
    assert len(found) == len(rows(left)) == (STEPS if policy == "continue" else third + EVERY)
    assert all(undisturbed[step] == loss for step, loss in found.items())


def test_checkpoints_that_cannot_be_written_are_told_and_the_run_does_not_end_well(tmp_path, undisturbed, mounts):
    config, checkpoints = settings(tmp_path, STEPS, EVERY), tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    trainer = Trainer(config, before=partial(read_only, checkpoints))
    assert trainer.end() == 1
    said = trainer.log.read_text()
    assert (
        f"the checkpoint of step {EVERY} could not be written: read-only file system; there is none before it." in said
    )
    assert_undisturbed(trainer.run, undisturbed)


def test_a_read_only_run_directory_is_refused_in_one_sentence(tmp_path, mounts):
    (tmp_path / "run").mkdir()
    trainer = Trainer(settings(tmp_path, STEPS, EVERY), before=partial(read_only, tmp_path / "run"))
    assert trainer.end() == 2
    said = trainer.log.read_text()
    assert said.count("\n") == 1 and "cannot be written: read-only file system" in said
