"""Two processes and one share their checkpoints, their decisions and the step at which they stop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from checkpoint_runs import build_for, opened, restored, take
from free_port import free_port
from process_of_two import settings

from meshtrain.checkpoint import digests, steps

WORKER = Path(__file__).parents[1] / "helpers" / "process_of_two.py"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes said that went on from step 2 of one process: (its program, its loss of step 3, their
    words).
    """
    directory = tmp_path_factory.mktemp("run")
    program = build_for(settings(directory))
    with opened(program.config, program) as (checkpointer, _):
        state, loss = checkpointer.restore_or_init()[0], 0.0
        for step in (1, 2):
            state, loss = take(program, state, step)
        checkpointer.save(2, state, loss)
        _, after = take(program, state, 3)
    port = free_port()
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, WORKER]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port), directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        heard = [hear(process) for process in processes]
        if all(heard):
            processes[1].send_signal(signal.SIGTERM)  # one gets it, as from a scheduler
        heard = [
            words | hear(process)
            for words, process in zip(heard, processes, strict=True)
        ]
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    return program, after, heard


def hear(process):
    """The next words of a process; {} if it has ended."""
    return next(
        (json.loads(line) for line in process.stdout if line.startswith("{")), {}
    )  # gloo talks as well


@pytest.mark.thorough
def test_two_processes_go_on_from_the_checkpoint_of_one(two):
    _, after, heard = two
    for words in heard:
        assert words["step"] == 2
        assert abs(words["losses"][0] - after) <= 2e-6 * after


@pytest.mark.thorough
def test_one_process_goes_on_from_the_checkpoint_of_two(two):
    program, _, heard = two
    assert steps.committed_in(Path(program.config.run.directory) / "checkpoints") == [
        2,
        3,
        4,
    ]
    state, step, _ = restored(program.config, program)
    assert step == 4
    _, loss = take(program, state, 5)
    assert abs(loss - heard[0]["losses"][2]) <= 2e-6 * loss


@pytest.mark.thorough
def test_two_processes_write_what_is_frozen_once_and_link_to_what_they_went_on_from(
    two,
):
    root = Path(two[0].config.run.directory) / "checkpoints"
    frozen = [(root / step / "frozen").rglob("*") for step in ("2", "3", "4")]
    one, other, last = (
        {path.stat().st_ino for path in paths if path.is_file()} for paths in frozen
    )
    assert last == one and other and not other & one
    assert not digests.problems(root / "4")


@pytest.mark.thorough
def test_a_notice_to_one_process_stops_both_at_the_same_step(two):
    asked = [words["asked"] for words in two[2]]
    assert asked[0] == asked[1] < 1000
