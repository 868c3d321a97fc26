"""Training processes killed and stopped for real. 30 kills: pytest -m slow -s tests/checkpoint/test_faults.py"""

import os
import random
import signal
import time
from functools import partial

import pytest
from free_port import free_port
from refusals import tells
from training_processes import (
    EVERY,
    STEPS,
    Trainer,
    assert_undisturbed,
    committed,
    losses_of,
    newest_is_intact,
    rows,
    settings,
)

from meshtrain.checkpoint import steps

pytestmark = pytest.mark.usefixtures("compiled_before")


def killed_again_and_again(config, kills, count, every, say=lambda _: None):
    """Kills `kills` processes of one run, then lets it end; (step reached, newest checkpoint, step being saved or None)
    of each kill that met training.

    In turn: after a random step, while saving, at any moment from the start of the process until shortly before its
    end.
    """
    chosen, lost = random.Random(kills), []
    for kill in range(1, kills + 1):
        trainer = Trainer(config)
        start, last = (committed(trainer.run) or [0])[-1], count - 2 * every
        if kill % 3 == 0:
            moment, late = (
                time.monotonic() + chosen.uniform(0, 3),
                trainer.wrote(last),
            )  # before the run is over
            assert trainer.until(
                lambda moment=moment, late=late: time.monotonic() > moment or late()
            ), "the run ended"
        else:
            assert trainer.until(trainer.training), trainer.log.read_text()
            saves = kill % 3 == 2 and start < last
            target = chosen.randint(start, max(start, min(start + 3 * every, last)))
            assert trainer.until(trainer.saving if saves else trainer.wrote(target)), (
                trainer.log.read_text()
            )
            time.sleep(chosen.uniform(0, 0.05) if saves else 0)
        trainer.kill()
        reached, newest = (
            (rows(trainer.run) or [{"step": 0}])[-1]["step"],
            (committed(trainer.run) or [0])[-1],
        )
        unfinished = [
            int(p.name.removesuffix(steps.WRITING))
            for p in (trainer.run / "checkpoints").glob("*.writing")
        ]
        assert len(unfinished) <= 1
        saving = unfinished[0] if unfinished else None
        doing = (
            "starting"
            if not trainer.training()
            else f"saving {saving}"
            if saving
            else "between saves"
        )
        say(f"kill {kill} {doing}, after step {reached}; newest checkpoint {newest}")
        if trainer.training():
            lost.append((reached, newest, saving))
        assert not newest or newest_is_intact(trainer.run)
    trainer = Trainer(config)
    assert trainer.end() == 0, trainer.log.read_text()
    return lost


def assert_little_is_lost(lost, every):
    """At most `every` steps are taken again.

    A kill during a save costs that save as well: `every` steps, and those taken meanwhile, of which there are fewer
    than `every`, since the next save would wait for this one.
    """
    for reached, newest, saving in lost:
        if saving is None:
            assert reached - newest <= every, (reached, newest)
        else:
            assert saving - newest == every and 0 <= reached - saving <= every, (
                reached,
                newest,
                saving,
            )


@pytest.mark.thorough
def test_killed_runs_go_on_with_the_same_losses(tmp_path, undisturbed):
    config = settings(tmp_path, STEPS, EVERY)
    lost = killed_again_and_again(config, 3, STEPS, EVERY)
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert_little_is_lost(lost, EVERY)


@pytest.mark.slow
def test_thirty_kills(tmp_path):
    count, every, larger = (
        800,
        40,
        {"model": {"d_model": 64, "d_ff": 256}, "train": {"sequence_length": 64}},
    )
    (tmp_path / "undisturbed").mkdir()
    expected = losses_of(tmp_path / "undisturbed", count, every, **larger)
    lost = killed_again_and_again(
        settings(tmp_path, count, every, **larger), 30, count, every, say=print
    )
    assert_undisturbed(tmp_path / "run", expected)
    between = [reached - newest for reached, newest, saving in lost if saving is None]
    during = [reached - saving for reached, _, saving in lost if saving is not None]
    print(
        f"30 kills: 0 wrong losses, 0 steps duplicated or missing; a checkpoint every {every} steps; steps taken "
        "again after "
        f"{len(between)} kills between saves: at most {max(between)}, after {len(during)} kills during a save: "
        f"{every} and those "
        f"taken since it began, at most {max(during)}; after {30 - len(lost)} kills while starting: none"
    )
    assert len(during) >= 5
    assert_little_is_lost(lost, every)


# --- asked to stop


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, when",
    [
        ("SIGTERM", "a step"),
        pytest.param("SIGINT", "a step", marks=pytest.mark.slow),
        pytest.param("SIGTERM", "a save", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step_and_code_75(
    name, when, tmp_path, undisturbed
):
    config = settings(tmp_path, STEPS, EVERY)
    trainer = Trainer(config)
    assert trainer.until(trainer.wrote(7) if when == "a step" else trainer.saving)
    os.kill(trainer.process.pid, signal.Signals[name])
    assert trainer.end() == 75, trainer.log.read_text()
    last = rows(trainer.run)[-1]["step"]
    assert 7 <= last < STEPS
    assert committed(trainer.run)[-1] == last and newest_is_intact(trainer.run)
    assert (
        f"meshtrain: {name}: stopping after this step, with a checkpoint."
        in trainer.log.read_text()
    )
    assert Trainer(config).end() == 0
    assert_undisturbed(trainer.run, undisturbed)


def one_of_two(rank, port):
    """Says to this process, as Slurm does, that it is one of two."""
    slurm = {
        "JOB_ID": "1",
        "STEP_NODELIST": "localhost",
        "NTASKS": "2",
        "PROCID": str(rank),
    }
    os.environ |= {f"SLURM_{name}": value for name, value in slurm.items()}
    os.environ |= {
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    }


OVER_TWO = {"mesh": {"pipeline": 2}, "parallel": {"microbatches": 2}}


def two_processes(directory):
    """A run of 9999 steps in two processes that has a checkpoint; its directory, and they."""
    run, port, trainers = directory / "run", free_port(), []
    for rank in (0, 1):
        (directory / str(rank)).mkdir()
        own = settings(
            directory / str(rank),
            9999,
            EVERY,
            run={"directory": str(run), "fake_devices": 1},
            **OVER_TWO,
        )
        trainers.append(Trainer(own, before=partial(one_of_two, rank, port)))
    assert trainers[0].until(lambda: bool(committed(run))), trainers[0].log.read_text()
    return run, trainers


# The other one is killed in tests/survive/test_training_processes.py, too.
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, marks=pytest.mark.thorough),
        pytest.param(1, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_is_reported_by_the_other_in_one_sentence(
    victim, tmp_path
):
    run, trainers = two_processes(tmp_path)
    trainers[victim].kill()
    survivor = trainers[1 - victim]
    assert survivor.end() == 1, survivor.log.read_text()
    said = [
        line
        for line in survivor.log.read_text().splitlines()
        if line.startswith("meshtrain: ")
    ]
    assert len(said) == 1 and tells(
        said[0], "another process", "died or cannot be reached: "
    )
    assert said[0].endswith(f"go on from step {committed(run)[-1]}.")
    assert "Traceback" not in survivor.log.read_text()


@pytest.mark.thorough
def test_a_preemption_notice_to_one_of_two_processes_stops_both_with_a_checkpoint_and_code_75(
    tmp_path,
):
    run, trainers = two_processes(tmp_path)
    os.kill(trainers[1].process.pid, signal.SIGTERM)
    assert [trainer.end() for trainer in trainers] == [75, 75], [
        trainer.log.read_text() for trainer in trainers
    ]
    last = rows(run)[-1]["step"]
    assert committed(run)[-1] == last < 9999 and newest_is_intact(run)
    assert (
        Trainer(settings(tmp_path, last + 3, EVERY, **OVER_TWO)).end() == 0
    )  # one process goes on, with two devices
    assert [row["step"] for row in rows(run)] == list(range(1, last + 4))


@pytest.mark.thorough
def test_a_second_signal_ends_a_run_at_once_and_leaves_the_last_checkpoint_intact(
    tmp_path, undisturbed
):
    config = settings(tmp_path, STEPS, EVERY)
    trainer = Trainer(config)
    assert trainer.until(lambda: committed(trainer.run) and trainer.saving())
    for number in (
        signal.SIGSTOP,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGCONT,
    ):  # both are there when it looks
        os.kill(trainer.process.pid, number)
    assert trainer.end() == -signal.SIGTERM, (
        trainer.log.read_text()
    )  # Python looks at lower numbers first
    assert "second SIGTERM: stopping at once" in trainer.log.read_text()
    assert newest_is_intact(trainer.run)
    assert Trainer(config).end() == 0
    assert_undisturbed(trainer.run, undisturbed)


@pytest.mark.thorough
def test_a_second_run_in_the_directory_is_refused_and_the_first_goes_on(
    tmp_path, undisturbed
):
    config = settings(tmp_path, STEPS, EVERY)
    first = Trainer(config)
    assert first.until(first.wrote(1))
    os.kill(first.process.pid, signal.SIGSTOP)
    (tmp_path / "again").mkdir()
    second = Trainer(
        settings(tmp_path / "again", STEPS, EVERY, run={"directory": str(first.run)})
    )
    assert second.end() == 2
    os.kill(first.process.pid, signal.SIGCONT)
    said = second.log.read_text().splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        f"meshtrain: run.directory {first.run} is in use by process {first.process.pid} on "
    )
    assert first.end() == 0
    assert_undisturbed(first.run, undisturbed)
