"""Stand-ins for `python -m meshtrain.survive`: an interpreter that starts at once, writes down what it was told, and
does as a test says.
"""

import contextlib
import json
import os
import shlex
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 30.0  # seconds, of a loaded machine
SCRIPT = """\
import json, os, signal, sys, time
here, words = {here!r}, sys.argv[1:]
node = words[words.index("--node") + 1]
record = os.path.join(here, node)
with open(record + ".words", "w") as file:
    json.dump(words, file)
does = json.load(open(record + ".does")) if os.path.exists(record + ".does") else {{}}
def told(number, _):
    with open(record + ".signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if does.get("stops", True):
        sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, told)
with open(record + ".new", "w") as file:
    json.dump({{"pid": os.getpid(), "cwd": os.getcwd()}}, file)
os.rename(record + ".new", record + ".started")
sys.stdout.write(does.get("out", ""))
sys.stderr.write(does.get("err", ""))
sys.stdout.flush()
if "kill" in does:
    os.kill(os.getpid(), does["kill"])
if "exit" in does:
    sys.exit(does["exit"])
while True:
    time.sleep(0.05)
"""


class Supervisors:
    """In a directory of its own: `python` is the interpreter, `does` says what a node's supervisor is to do."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.python = directory, directory / "an interpreter"
        directory.mkdir()
        script = directory / "script.py"
        script.write_text(SCRIPT.format(here=str(directory)))
        self.python.write_text(
            f'#!/bin/sh\nexec {sys.executable} -S {shlex.quote(str(script))} "$@"\n'
        )
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def does(self, node: str, **what: Any) -> None:
        (self.directory / f"{node}.does").write_text(json.dumps(what))

    def words(self, node: str) -> list[str]:
        return json.loads(until(self.directory / f"{node}.words"))

    def started(self, node: str) -> dict[str, Any]:
        """pid and working directory, as soon as it listens to signals."""
        return json.loads(until(self.directory / f"{node}.started"))

    def end(self) -> None:
        """Ends those that outlived their test, and hold the ends of its pipes."""
        for path in self.directory.glob("*.started"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)

    def signals(self, node: str) -> list[str]:
        path = self.directory / f"{node}.signals"
        return path.read_text().split() if path.exists() else []


def until(path: Path) -> str:
    """A file's text, as soon as it has one."""
    ends = time.monotonic() + PATIENCE
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < ends, f"{path.name} was not written"
        time.sleep(0.02)
    return path.read_text()


def is_gone(pid: int) -> bool:
    """Whether a process ends; one that has ended and was not fetched is gone too."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        try:
            if (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                == "Z"
            ):
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False
