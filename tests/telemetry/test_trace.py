"""Steps are traced where they are asked for, the program lies beside them, and whatever goes wrong, training goes
on.
"""

import errno
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from refusals import tells

from meshtrain.config import load
from meshtrain.mesh import AXES
from meshtrain.telemetry.trace import EVENTS, FACTS, MODULE, Facts, Tracer


@pytest.fixture(scope="module")
def program() -> jax.stages.Compiled:
    return jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()


@pytest.fixture
def run(tmp_path, program):
    """Takes steps, some of them traced; the seconds of each that are none of its own."""

    def take(first: int, last: int, *at: int, phase=lambda name: None) -> list[float]:
        config = load(
            {
                "telemetry": {"trace_at": list(at), "trace_steps": 2},
                "train": {"steps": 50},
            }
        )
        tracer = Tracer(
            config,
            tmp_path,
            Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES),
            None,
            phase,
        )
        seconds = []
        for step in range(first, last + 1):
            seconds.append(0.0)
            tracer.leave_out = lambda spent: seconds.__setitem__(-1, spent)
            tracer.before_batch(step)
            tracer.after_step(step, program, program(jnp.zeros(8)))
        tracer.close()
        return seconds

    return take


def steps(directory: Path) -> dict[str, list[int]]:
    traces = directory / "traces"
    return {
        place.name: json.loads((place / FACTS).read_text())["steps"]
        for place in sorted(traces.iterdir())
    }


def test_each_trace_has_its_steps_the_program_and_the_mesh_and_no_other_files(
    tmp_path, program, run
):
    seconds = run(1, 9, 2, 6)
    assert steps(tmp_path) == {"2": [2, 3], "6": [6, 7]}
    assert [step for step, spent in enumerate(seconds, 1) if spent] == [3, 7], (
        "only where a trace was written"
    )
    place = tmp_path / "traces" / "2"
    assert {file.name for file in place.iterdir()} == {EVENTS, MODULE, FACTS}
    assert (place / MODULE).read_text() == program.as_text()
    device = jax.devices()[0].id
    facts = Facts(**json.loads((place / FACTS).read_text()))
    assert facts == Facts(
        [2, 3], "jit__lambda", "cpu", dict.fromkeys(AXES, 1), [device], [device], 1, {}
    )


@pytest.mark.parametrize(
    ("first", "at", "traced"),
    [
        (
            1,
            (1,),
            {"2": [2, 3]},
        ),  # the first step of a process compiles: the next one is traced in its place
        # Those of before a restart are not made up for
        (10, (3, 12), {"12": [12, 13]}),
    ],
)
def test_steps_that_are_traced(first, at, traced, tmp_path, run):
    run(first, first + 4, *at)
    assert steps(tmp_path) == traced


def test_a_trace_that_the_end_of_the_run_cuts_short_leaves_nothing(
    tmp_path, run, capfd
):
    run(1, 3, 3)
    assert list((tmp_path / "traces").iterdir()) == []
    # and the profiler is free again
    run(1, 3, 2)
    assert steps(tmp_path) == {"2": [2, 3]} and capfd.readouterr().err == ""


def test_where_nothing_is_asked_for_and_on_other_processes_nothing_is_made(
    tmp_path, run, monkeypatch
):
    assert run(1, 3) == [0.0, 0.0, 0.0]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run(1, 4, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_that_is_busy_is_a_sentence_and_training_goes_on(
    tmp_path, run, capfd
):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        run(1, 6, 2, 4)
    finally:
        jax.profiler.stop_trace()
    (said,) = capfd.readouterr().err.splitlines()
    assert tells(said, "cannot begin: Profile has already", "training goes on")
    assert not (tmp_path / "traces" / "2").exists()


def test_a_full_disk_is_a_sentence_and_training_goes_on(
    tmp_path, run, capfd, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    run(1, 8, 2, 5)
    (said,) = capfd.readouterr().err.splitlines()
    assert tells(said, "is lost: no space", "training goes on", "no other is taken.")
    assert list((tmp_path / "traces").iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "traces").rmdir()
    (tmp_path / "traces").write_text("a file")
    run(1, 4, 2)
    assert "cannot begin: not a directory" in capfd.readouterr().err


def test_waiting_and_writing_are_phases_of_their_own_so_that_no_hang_is_seen_in_them(
    run,
):
    phases = []
    run(1, 6, 3, phase=phases.append)
    # before the trace, in each of its steps on CPUs, and at its end
    assert phases == ["wait", "wait", "wait", "trace"]
