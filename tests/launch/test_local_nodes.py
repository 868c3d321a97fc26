"""N nodes on this machine: their output, signals, exit codes, and that none is left over."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
from supervisors import PATIENCE, is_gone, until

from meshtrain.launch.local_nodes import _Lines, supervise_all

MAIN = "import sys; from meshtrain.launch.__main__ import main; sys.executable = sys.argv.pop(1); sys.exit(main())"


@pytest.fixture
def launch(launched, supervisors, config):
    """Starts `local N` with the stand-ins."""

    def start(nodes: int, *words: str) -> subprocess.Popen[str]:
        started = [sys.executable, "-c", MAIN, str(supervisors.python)]
        command = [*started, "local", str(nodes), "--config", str(config), *words]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        launched.append(process)
        return process

    return start


def test_each_node_is_told_its_name_its_address_and_its_share(
    launch, supervisors, config
):
    for node in range(4):
        supervisors.does(f"n{node}", exit=0)
    assert launch(4, "--set", "train.steps=3").wait(PATIENCE) == 0
    shared = [
        "-m",
        "meshtrain.survive",
        "--config",
        str(config),
        "--set",
        "train.steps=3",
        "--set",
        "survive.wanted=4",
    ]
    for node in range(4):
        assert supervisors.words(f"n{node}") == [
            *shared,
            "--node",
            f"n{node}",
            "--address",
            "127.0.0.1",
        ]


@pytest.mark.thorough
def test_output_is_passed_on_by_whole_lines_under_the_nodes_name(launch, supervisors):
    supervisors.does("n0", out="one\ntwo\nlast", err="careful\n", exit=3)
    supervisors.does("n1", out="x" * 200_000 + "\n", exit=75)
    out, err = (launcher := launch(2)).communicate(timeout=PATIENCE)
    assert launcher.returncode == 3, "the run's"  # more of them: `outcome`
    assert [line for line in out.splitlines() if line.startswith("n0")] == [
        "n0: one",
        "n0: two",
        "n0: last",
    ]
    assert sum(line.count("x") for line in out.splitlines()) == 200_000
    assert "n0: careful\n" in err


def test_a_line_is_passed_on_as_soon_as_it_is_complete_and_not_before():
    passed, (read, write) = io.StringIO(), os.pipe()
    with open(read, "rb") as pipe:
        lines = _Lines("n0", pipe, passed)
        for part, so_far in ((b"be", ""), (b"gun\nand", "n0: begun\n")):
            os.write(write, part)
            assert lines.pass_on() and passed.getvalue() == so_far
    os.close(write)


@pytest.mark.thorough
def test_one_nodes_output_is_left_as_it_is(launch, supervisors):
    supervisors.does("n0", out="no line", exit=0)
    assert launch(1).communicate(timeout=PATIENCE) == ("no line", "")
    assert "--set" not in supervisors.words("n0")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_killed_supervisor_is_said_and_a_signal_is_passed_on_once_to_the_others(
    launch, supervisors, number
):
    supervisors.does("n1", kill=signal.SIGKILL)
    launcher = launch(4)
    for node in ("n0", "n2", "n3"):
        supervisors.started(node)
    assert (
        launcher.stderr.readline()
        == "meshtrain: n1 was killed by SIGKILL; the others go on.\n"
    )
    assert launcher.poll() is None
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75
    assert [supervisors.signals(node) for node in ("n0", "n2", "n3")] == [
        [number.name]
    ] * 3
    assert (
        err
        == f"meshtrain: {number.name}: the nodes are told to stop; once more kills them.\n"
    )


@pytest.mark.thorough
def test_the_second_signal_kills(launch, supervisors):
    for node in ("n0", "n1"):
        supervisors.does(node, stops=False)
    launcher = launch(2)
    pids = [supervisors.started(node)["pid"] for node in ("n0", "n1")]
    # As a terminal does for Ctrl-C: to all of the group.
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.stderr.readline()
    for node in ("n0", "n1"):
        until(supervisors.directory / f"{node}.signals")
    time.sleep(0.3)
    assert [supervisors.signals(node) for node in ("n0", "n1")] == [["SIGINT"]] * 2
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(PATIENCE) == 1
    assert all(map(is_gone, pids))


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_killed_launcher_leaves_nobody_behind(launch, supervisors, nodes):
    for node in range(nodes):
        supervisors.does(f"n{node}", stops=False)
    launcher = launch(nodes)
    pids = [supervisors.started(f"n{node}")["pid"] for node in range(nodes)]
    # One that is frozen hears no signal but this.
    subprocess.run(["kill", "-STOP", str(pids[0])], check=True)
    launcher.kill()
    assert all(map(is_gone, pids))


def test_a_node_that_cannot_be_started_ends_the_others(supervisors, tmp_path):
    ready = [str(supervisors.python), "--node", "n0"]
    with pytest.raises(FileNotFoundError):
        supervise_all({"n0": ready, "n1": [str(tmp_path / "missing")]})
    started = supervisors.directory / "n0.started"
    assert not started.exists() or is_gone(supervisors.started("n0")["pid"])
