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


def test_a_second_process_is_refused_and_reported_who_holds_it(tmp_path):
    command = [sys.executable, "-c", HOLD, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is in use by process 7 on elsewhere; "):
            RunLock(tmp_path)
        process.kill()
    RunLock(tmp_path).release()  # the lock went with its process


def test_a_second_run_of_the_same_process_is_refused(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
        RunLock(tmp_path)
    command = [sys.executable, "-c", ASK, tmp_path / ".lock"]
    assert subprocess.run(command).returncode == 1  # the refusal has not cost the first run its lock
    lock.release()
    assert subprocess.run(command).returncode == 0
    RunLock(tmp_path).release()


def test_a_shorter_owner_overwrites_a_longer_one(tmp_path):
    (tmp_path / ".lock").write_text("process 123456789 on a-host-with-a-long-name that has died")
    lock = RunLock(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert "died" not in (tmp_path / ".lock").read_text()
    lock.release()


@pytest.mark.parametrize(
    "stands, why",
    [
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.symlink_to(path.parent / "precious"), "is a link"),
        (lambda path: path.symlink_to("nowhere"), "is a link"),
        (os.mkfifo, "is no file"),
    ],
    ids=["a directory", "a link", "a link to nothing", "a pipe"],
)
def test_what_is_no_lock_is_refused_and_nothing_behind_it_is_touched(stands, why, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("not a lock")
    stands(tmp_path / ".lock")
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=rf"{tmp_path}/\.lock cannot be the run's lock: {why}; mend that, or give"
        ):
            RunLock(tmp_path)
    assert precious.read_text() == "not a lock"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "precious"]


def test_a_file_system_without_locks_is_reported_and_leaves_nothing_held(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.lockf", refused)
        with pytest.raises(ConfigError, match="cannot be the run's lock: no locks available"):
            RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_who_only_asks_learns_of_a_run_and_takes_nothing(tmp_path):
    assert in_use(tmp_path) is False  # there is no lock yet
    command = [sys.executable, "-c", HOLD, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert in_use(tmp_path) is True
        process.kill()
    assert in_use(tmp_path) is False
    lock = RunLock(tmp_path)
    assert in_use(tmp_path) is True
    assert subprocess.run([sys.executable, "-c", ASK, tmp_path / ".lock"]).returncode == 1  # it is still held
    lock.release()


def test_who_asks_for_the_holder_of_its_own_lock_keeps_it(tmp_path):
    assert holder(tmp_path) == ""
    lock = RunLock(tmp_path)
    assert holder(tmp_path) == "this process"
    assert subprocess.run([sys.executable, "-c", ASK, tmp_path / ".lock"]).returncode == 1
    lock.release()
