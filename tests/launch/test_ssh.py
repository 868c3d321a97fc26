"""A node on each of some hosts, with an ssh that reaches only this machine: what it is told, what reaches the far side,
and who is refused.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervisors import PATIENCE, Supervisors, is_gone

from meshtrain.launch import ssh
from meshtrain.launch.__main__ import main

# As sshd does: the last word goes to the user's shell, in a session of its own.
SSH = """\
#!/bin/sh
for last; do :; done
exec setsid --wait sh -c "$last"
"""


@pytest.fixture
def launch(launched, supervisors: Supervisors, config: Path, tmp_path: Path):
    """Starts `ssh` to the hosts named, in a directory with an odd name."""
    programs, where = tmp_path / "bin", tmp_path / "it's here"
    programs.mkdir()
    where.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)

    def start(hosts: str) -> subprocess.Popen[str]:
        words = ["--config", str(config), "--hosts", hosts, "--directory", str(where)]
        words += ["--python", str(supervisors.python)]
        command = [sys.executable, "-m", "meshtrain.launch", "ssh", *words]
        path = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        process = subprocess.Popen(
            command, env=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        launched.append(process)
        return process

    return start


def test_each_host_runs_its_node_in_the_directory_and_says_its_code(
    launch, supervisors, config, tmp_path
):
    supervisors.does("h1", out="hello\n", exit=3)
    supervisors.does("10.0.0.2", exit=75)
    out, _ = (launcher := launch("h1,me@10.0.0.2")).communicate(timeout=PATIENCE)
    assert (launcher.returncode, out) == (3, "h1: hello\n")
    shared = [
        "-m",
        "meshtrain.survive",
        "--config",
        str(config),
        "--set",
        "survive.wanted=2",
    ]
    for name in ("h1", "10.0.0.2"):
        assert supervisors.words(name) == [*shared, "--node", name, "--address", name]
        assert supervisors.started(name)["cwd"] == str(tmp_path / "it's here")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_far_side_once(launch, supervisors, number):
    launcher = launch("a,b")
    for node in "ab":
        supervisors.started(node)
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE) == 75
    assert [supervisors.signals(node) for node in "ab"] == [["SIGTERM"]] * 2


@pytest.mark.thorough
def test_the_second_signal_kills_the_far_side(launch, supervisors):
    supervisors.does("a", stops=False)
    launcher = launch("a")
    pid = supervisors.started("a")["pid"]
    launcher.terminate()
    launcher.stderr.readline()
    launcher.terminate()
    assert is_gone(pid)
    assert launcher.wait(PATIENCE) == 1


def test_a_killed_launcher_stops_the_far_side(launch, supervisors):
    launcher = launch("a,b")
    pids = [supervisors.started(node)["pid"] for node in "ab"]
    launcher.kill()
    assert all(map(is_gone, pids))
    assert [supervisors.signals(node) for node in "ab"] == [["SIGTERM"]] * 2


def test_printed_are_the_commands_with_host_keys_checked(config, capsys):
    assert main(["ssh", "--config", str(config), "--hosts", "h1,u@h2", "--print"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    for words, host, name in zip(commands, ("h1", "u@h2"), ("h1", "h2"), strict=True):
        options, far = words[: words.index("--")], words[words.index("--") + 1 :]
        assert options == [*ssh.SSH] and {
            "StrictHostKeyChecking=yes",
            "BatchMode=yes",
        } < set(options)
        assert far[0] == host and shlex.split(far[1])[-2:] == ["--address", name]


ODD = [
    *(
        (host, f"{host!r} is not a host")
        for host in ("-oProxyCommand=x", "a;b", "../x", "a b")
    ),
    ("a,b@a", "a stands there twice"),
    (",", "--hosts names no host"),
]


@pytest.mark.parametrize("hosts, sentence", ODD)
def test_odd_hosts_are_refused(config, capsys, hosts, sentence):
    assert main(["ssh", "--config", str(config), f"--hosts={hosts}", "--print"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("whose", ["config", "hostfile"])
@pytest.mark.parametrize(
    "how, sentence",
    [("writable", "can be written by everyone"), ("owned", "belongs to another user")],
)
def test_a_file_that_others_may_write_is_refused(
    config, tmp_path, capsys, whose, how, sentence
):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h1 # the first\n\n# none\nh2\n")
    words = ["ssh", "--config", str(config), "--hostfile", str(hostfile), "--print"]
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    path = config if whose == "config" else hostfile
    if how == "writable":
        path.chmod(0o666)
    elif os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root gives a file away")
    assert main(words) == 2
    said = capsys.readouterr()
    assert sentence in said.err and not said.out
