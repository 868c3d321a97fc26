import errno
import os
import subprocess
import sys

import pytest

from meshtrain.config import ConfigError
from meshtrain.run.lock import RunLock, holder, in_use

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("process 7 on elsewhere")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""

ASK = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "a+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(1)
"""


def test_a_second_process_is_refused_and_reported_who_holds_it_and_who_only_asks_learns_of_it(
    tmp_path,
):
    assert in_use(tmp_path) is False  # there is no lock yet
    command = [sys.executable, "-c", HOLD, tmp_path / ".lock"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        assert in_use(tmp_path) is True
        with pytest.raises(ConfigError, match="in use by process 7 on elsewhere; "):
            RunLock(tmp_path)
        process.kill()
    assert in_use(tmp_path) is False  # the lock went with its process
    RunLock(tmp_path).release()


def test_a_second_run_of_the_same_process_is_refused_and_the_first_keeps_its_lock(
    tmp_path,
):
    assert holder(tmp_path) == ""
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
        RunLock(tmp_path)
    assert in_use(tmp_path) is True and holder(tmp_path) == "this process"
    command = [sys.executable, "-c", ASK, tmp_path / ".lock"]
    assert (
        subprocess.run(command).returncode == 1
    )  # neither the refusal nor the question has cost the first run its lock
    lock.release()
    assert subprocess.run(command).returncode == 0
    RunLock(tmp_path).release()


def test_a_shorter_owner_overwrites_a_longer_one(tmp_path):
    (tmp_path / ".lock").write_text(
        "process 123456789 on host-of-long-name that has died"
    )
    lock = RunLock(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert "died" not in (tmp_path / ".lock").read_text()
    lock.release()


STANDS = {
    "a directory": (lambda path: path.mkdir(), "is a directory"),
    "a link": (lambda path: path.symlink_to(path.parent / "precious"), "is a link"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "is a link"),
    "a pipe": (os.mkfifo, "is not a file"),
}


@pytest.mark.parametrize("what", STANDS)
def test_what_is_no_lock_is_refused_and_nothing_behind_it_is_touched(what, tmp_path):
    precious, (make, why) = tmp_path / "precious", STANDS[what]
    precious.write_text("not a lock")
    make(tmp_path / ".lock")
    for _ in range(2):
        with pytest.raises(
            ConfigError,
            match=rf"{tmp_path}/\.lock cannot be the run's lock: {why}; mend that, or",
        ):
            RunLock(tmp_path)
    assert precious.read_text() == "not a lock"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "precious"]


def test_a_file_system_without_locks_is_reported_and_leaves_nothing_held(
    tmp_path, monkeypatch
):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.lockf", refused)
        with pytest.raises(ConfigError, match=r"\.lock .*: no locks available"):
            RunLock(tmp_path)
    RunLock(tmp_path).release()
