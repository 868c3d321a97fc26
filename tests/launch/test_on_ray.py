"""What Ray is asked to run, and what is then done about each end of a node."""

import json
import os
import signal
import subprocess
import sys

import pytest
from supervisors import PATIENCE, is_gone

from meshtrain.launch import on_ray
from meshtrain.launch.__main__ import main

RAY = '#!{python}\nimport json, os, sys\njson.dump(sys.argv[1:], open(os.environ["TOLD"], "w"))\n'


def test_the_script_submits_the_supervisors_command(config, tmp_path, capsys):
    assert (
        main(
            [
                "ray",
                "--config",
                str(config),
                "--nodes",
                "4",
                "--directory",
                "/shared",
                "--requeues",
                "5",
            ]
        )
        == 0
    )
    script, told = capsys.readouterr().out, tmp_path / "told"
    (tmp_path / "ray").write_text(RAY.replace("{python}", sys.executable))
    (tmp_path / "ray").chmod(0o755)
    path = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(told)}
    subprocess.run(["bash", "-c", script], env=path, check=True)
    words = json.loads(told.read_text())
    assert words[:3] == ["job", "submit", "--submission-id"] and words[3].startswith(
        "the-run-s-"
    )
    assert words[6:] == ["--", "python", "-m", "meshtrain.launch.on_ray"]
    variables = json.loads(words[5])["env_vars"]
    assert variables[on_ray.STOP_TIME] == "120"
    supervisor = [
        "python",
        "-m",
        "meshtrain.survive",
        "--config",
        str(config),
        "--set",
        "survive.wanted=4",
    ]
    told_of = {"supervisor": supervisor, "directory": "/shared", "nodes": 4, "again": 5}
    assert json.loads(variables[on_ray.VARIABLE]) == told_of | {
        "share": {"num_gpus": 2, "num_cpus": 1}
    }


@pytest.mark.parametrize(
    "ends, again, started, whole",
    [
        ([(0, 0), (1, 0)], 9, [0, 1], 0),
        ([(0, -9), (0, 0), (1, 0)], 9, [0, 1, 0], 0),  # killed, and back
        # Stopped, and gone on
        ([(0, 75), (1, 75), (0, 0), (1, 0)], 9, [0, 1, 0, 1], 0),
        ([(0, 75), (1, 75)], 0, [0, 1], 75),
        ([(0, 75), (1, 75), (0, 75), (1, 75)], 2, [0, 1, 0, 1], 75),
        ([(0, 3), (1, 75)], 9, [0, 1], 3),  # the run is over
        ([(0, 1), (1, 3)], 9, [0, 1], 3),
        ([(0, 2), (1, 2)], 9, [0, 1], 2),
        ([(0, 0)], 9, [0, 1], 0),  # the other waits for a node for ever
    ],
)
def test_each_node_until_the_run_is_over(monkeypatch, ends, again, started, whole):
    monkeypatch.setattr(on_ray, "PAUSE", 0)
    ends, starts = list(ends), []

    def start(node):
        starts.append(node)
        return (len(starts), node)

    def first(handles, timeout):
        if not ends:
            assert timeout is not None and timeout <= on_ray.LAST
            return None
        node, code = ends.pop(0)
        return next(handle for handle in handles if handle[1] == node), code

    assert on_ray.drive(start, first, 2, again) == whole
    assert (starts, ends) == (started, [])


def test_a_job_that_is_stopped_starts_nothing_again():
    ends = [(0, 75), (1, 75)]
    assert (
        on_ray.drive(
            lambda node: (0, node),
            lambda *_: ((0, ends[0][0]), ends.pop(0)[1]),
            2,
            9,
            lambda: True,
        )
        == 75
    )


@pytest.fixture
def worker(supervisors, tmp_path):
    """A worker of Ray's that runs a supervisor, which has started; and how the supervisor started."""
    words = [str(supervisors.python), "-m", "meshtrain.survive"]
    code = (
        f"import sys; from meshtrain.launch.on_ray import supervise; sys.exit(supervise({words!r}, "
        f"{str(tmp_path)!r}, 'n0', 'h'))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process, supervisors.started("n0")
    process.kill()
    process.wait()


def test_a_supervisor_stops_when_its_task_is_cancelled(worker, supervisors):
    process, _ = worker
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 75
    assert supervisors.signals("n0") == [signal.SIGTERM.name]


def test_a_supervisor_stops_with_the_worker_that_started_it(
    worker, supervisors, tmp_path
):
    process, started = worker
    assert started["cwd"] == str(tmp_path)
    process.kill()
    assert is_gone(started["pid"])
    assert supervisors.signals("n0") == [signal.SIGTERM.name]
