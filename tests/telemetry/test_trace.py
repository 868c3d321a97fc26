"""Steps are traced where they are asked for, the program lies beside them, and whatever goes wrong, training goes on."""

import errno
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from meshtrain.config import load
from meshtrain.mesh import AXES
from meshtrain.telemetry.trace import EVENTS, FACTS, MODULE, Facts, Tracer


@pytest.fixture(scope="module")
def program() -> jax.stages.Compiled:
    return jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()


def tracer(directory: Path, *at: int, steps: int = 2) -> Tracer:
    config = load({"telemetry": {"trace_at": list(at), "trace_steps": steps}, "train": {"steps": 50}})
    return Tracer(config, directory, Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES), None)


def run(traced: Tracer, program: Any, first: int, last: int) -> list[float]:
    seconds = []
    for step in range(first, last + 1):
        seconds.append(0.0)
        traced.leave_out = lambda spent: seconds.__setitem__(-1, spent)
        traced.before_batch(step)
        traced.after_step(step, program, program(jnp.zeros(8)))
    traced.close()
    return seconds


def steps(directory: Path) -> dict[str, list[int]]:
    traces = directory / "traces"
    return {place.name: json.loads((place / FACTS).read_text())["steps"] for place in sorted(traces.iterdir())}


def test_each_trace_has_its_steps_and_its_files_alone(tmp_path, program):
    seconds = run(tracer(tmp_path, 2, 6), program, 1, 9)
    assert steps(tmp_path) == {"2": [2, 3], "6": [6, 7]}
    assert {file.name for file in (tmp_path / "traces" / "6").iterdir()} == {EVENTS, MODULE, FACTS}
    # only where a trace was written
    assert [step for step, spent in enumerate(seconds, 1) if spent] == [3, 7]


def test_what_lies_beside_a_trace_is_the_program_and_the_mesh(tmp_path, program):
    run(tracer(tmp_path, 2), program, 1, 4)
    place = tmp_path / "traces" / "2"
    assert (place / MODULE).read_text() == program.as_text()
    facts = Facts(**json.loads((place / FACTS).read_text()))
    device = jax.devices()[0].id
    assert facts == Facts([2, 3], "jit__lambda", "cpu", dict.fromkeys(AXES, 1), [device], [device], 1, {})


def test_the_first_step_of_a_process_compiles_so_the_next_one_is_traced_in_its_place(tmp_path, program):
    run(tracer(tmp_path, 1), program, 1, 4)
    assert steps(tmp_path) == {"2": [2, 3]}


def test_steps_that_a_run_had_taken_before_it_went_on_are_not_made_up_for(tmp_path, program):
    run(tracer(tmp_path, 3, 12), program, 10, 14)
    assert steps(tmp_path) == {"12": [12, 13]}


def test_a_trace_that_the_end_of_the_run_cuts_short_leaves_nothing(tmp_path, program, capfd):
    run(tracer(tmp_path, 3), program, 1, 3)
    assert list((tmp_path / "traces").iterdir()) == []
    # and the profiler is free again
    run(tracer(tmp_path, 2), program, 1, 3)
    assert steps(tmp_path) == {"2": [2, 3]} and capfd.readouterr().err == ""


def test_where_nothing_is_asked_for_nothing_is_made(tmp_path, program):
    assert run(tracer(tmp_path), program, 1, 3) == [0.0, 0.0, 0.0]
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_that_is_busy_is_a_sentence_and_training_goes_on(tmp_path, program, capfd):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        run(tracer(tmp_path, 2, 4), program, 1, 6)
    finally:
        jax.profiler.stop_trace()
    said = capfd.readouterr().err
    assert (
        said.count("\n") == 1
        and "cannot begin: Profile has already been started" in said
        and "training goes on" in said
    )
    assert not (tmp_path / "traces" / "2").exists()


def test_a_full_disk_is_a_sentence_and_training_goes_on(tmp_path, program, capfd, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    run(tracer(tmp_path, 2, 5), program, 1, 8)
    said = capfd.readouterr().err
    assert (
        said.count("\n") == 1 and "is lost: no space left on device; training goes on, and no other is taken." in said
    )
    assert list((tmp_path / "traces").iterdir()) == []


def test_a_directory_that_is_not_to_be_written_is_a_sentence(tmp_path, program, capfd):
    (tmp_path / "traces").write_text("a file")
    run(tracer(tmp_path, 2), program, 1, 4)
    assert "cannot begin: not a directory" in capfd.readouterr().err


def test_waiting_and_writing_are_phases_of_their_own_so_that_no_hang_is_seen_in_them(tmp_path, program):
    traced, phases = tracer(tmp_path, 3), []
    traced.phase = phases.append
    run(traced, program, 1, 6)
    # before the trace, in each of its steps on CPUs, and at its end
    assert phases == ["wait", "wait", "wait", "trace"]


def test_only_the_first_process_traces(tmp_path, program, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run(tracer(tmp_path, 2), program, 1, 4)
    assert list(tmp_path.iterdir()) == []
