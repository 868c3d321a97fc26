"""A node's training process: started, watched through /proc and its beat, and ended together with all that it has started.

    supervisor ──lease: a counter──► DIR ◄──beat: step, phase, seconds── training process
               ──SIGUSR1: stacks, SIGTERM: stop, SIGKILL──►

DIR lies in memory where the system has such a place: a step costs no write to a disk or a network.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.cli import FAILED
from meshtrain.orphans import die_with_parent
from meshtrain.survive.beat import BEAT, CODES, LEASE, LEASE_SIZE, VARIABLE
from meshtrain.survive.records import End, Rank, made

STACKS = 0.3  # seconds that a process gets to write its stacks before it is ended
# What JAX's coordination client says before it ends its process by SIGABRT for a peer that is gone.
ABORTED = re.compile(rb"coordination service|distributed service|heartbeat", re.I)
LONGEST = 1000  # letters of why it failed
# Bytes of what it prints: at once, and of what was printed since the last look.
MOST_READ, MOST_SHOWN = 1 << 16, 1 << 20
BY_EXIT = {code: kind for kind, code in CODES.items() if code != FAILED}


class Child:
    """The process of rank `number`. `files`: the directory of its generation."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        files: Path,
        generation: int,
        number: int,
        fence: float,
    ) -> None:
        self.generation, self.number, self.files = generation, number, files
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.local = Path(tempfile.mkdtemp(prefix="meshtrain-", dir=memory))
        self._lease_count = 0
        with contextlib.ExitStack() as begun:
            begun.callback(shutil.rmtree, self.local, ignore_errors=True)
            self._lease = os.open(self.local / LEASE, os.O_WRONLY | os.O_CREAT, 0o600)
            begun.callback(os.close, self._lease)
            self.renew()
            self._start(command, environment, fence)
            # Only what did not begin leaves nothing.
            begun.pop_all()
        self._began = time.monotonic()
        self._changed = self._alive_since = self._began
        self._count = self._alive = -1
        self._asked_at = -1  # the phase for which stacks were asked
        self._shown = 0
        self._ours = self._buried = False  # whether we ended it; whether its whole group was ended after it
        self._beat, self._beaten = str(self.local / BEAT), b""  # the file, and what stood there
        self.said: dict[str, Any] = {}  # the last whole beat
        self.rank = Rank(number, self.process.pid)

    def _start(self, command: list[str], environment: Mapping[str, str], fence: float) -> None:
        told = {
            "local": str(self.local), "generation": str(self.files), "number": self.generation, "rank": self.number,
            "fence": fence, "survive": str(self.files.parent),
        }  # fmt: skip
        # Read by its descriptor: the run directory may be removed or renamed meanwhile.
        self.output = open(self.files / f"rank-{self.number}.out", "a+b", buffering=0)  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command, env={**environment, VARIABLE: json.dumps(told)}, stdin=subprocess.DEVNULL, stdout=self.output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip
        except BaseException:
            self.output.close()
            raise

    def renew(self) -> None:
        """Its supervisor is at work: without this for a while the process ends itself."""
        self._lease_count += 1
        os.pwrite(self._lease, str(self._lease_count).rjust(LEASE_SIZE).encode(), 0)

    def look(self) -> Rank:
        """What it does now."""
        now = time.monotonic()
        # Not begun, or in the middle of a write: what it said before holds.
        if (text := _bytes(self._beat)) != self._beaten:
            self._beaten, self.said = text, _fields(text) or self.said
        if (count := self.said.get("n", -1)) != self._count:
            self._count, self._changed = count, now
        if (alive := self.said.get("alive", -1)) != self._alive:
            self._alive, self._alive_since = alive, now
        found = {
            "number": self.number, "pid": self.process.pid, "proc": _state(self.process.pid),
            "phase_age": now - self._changed, "alive_age": now - self._alive_since if self._alive >= 0 else 0.0,
        }  # fmt: skip
        if self._asked_at == self._count:
            found["stack"] = self._stack()
        self.rank = made(Rank, {**self.said, **found}) or Rank(**found)  # type: ignore[arg-type]
        return self.rank

    def ask_stacks(self) -> None:
        """Has it write where it is, once a phase. A frozen process writes nothing."""
        if self._asked_at != self._count and self.rank.proc not in ("T", "t"):
            self._asked_at = self._count
            self._signal(signal.SIGUSR1)

    def ended(self) -> End | None:
        """How it ended, None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self.look()
        step = self.rank.step
        fault = _fields(_bytes(f"{self.files}/rank-{self.number}.fault.json"))
        blamed = fault.get("ranks")
        ranks = [r for r in blamed if isinstance(r, int)] if isinstance(blamed, list) else []
        if self._ours:
            return End(code, "ended_by_us", "was ended", step)
        if code < 0:
            kind = "peer" if code == -signal.SIGABRT and ABORTED.search(self._tail()) else "signal"
            return End(
                code, kind, f"was ended by {_name(-code)} in the phase {self.rank.phase}, after step {step}", step
            )
        if code in (0, 75):
            return End(code, "ok" if code == 0 else "stopped", "ended", step)
        kind = BY_EXIT.get(code) or next((k for k in CODES if k == fault.get("kind")), "error")
        sentence = " ".join(str(fault.get("sentence", "")).split())[:LONGEST] or self._last_line()
        return End(code, kind, f"ended with {code} after step {step}: {sentence}", step, ranks)

    def stop(self) -> None:
        """Asks it to save and stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and all that it has started, after it wrote where it was; returns at once."""
        if self.process.poll() is None:
            self._ours = True
            if self.rank.proc not in ("T", "t") and self._count >= 0:
                self._signal(signal.SIGUSR1)
                time.sleep(STACKS)
        # Also when it has ended: what it started may not have. Not later: its number may be another group's by then.
        if not self._buried:
            self._buried = self.process.poll() is not None
            self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._lease)
        self.output.close()
        shutil.rmtree(self.local, ignore_errors=True)

    def new_output(self, to_the_end: bool = False) -> bytes:
        """What it has printed since the last call, in whole lines; of very much the last."""
        size = os.fstat(self.output.fileno()).st_size
        self._shown = max(self._shown, size - MOST_SHOWN)
        text = os.pread(self.output.fileno(), MOST_READ, self._shown)
        if not to_the_end and len(text) < MOST_READ:
            text = text[: text.rfind(b"\n") + 1]
        self._shown += len(text)
        return text

    def _signal(self, number: int) -> None:
        try:
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                os.kill(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            # It has ended, with all of its group.
            pass

    def _tail(self) -> bytes:
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), 8192, max(0, size - 8192))

    def _last_line(self) -> str:
        lines = self._tail().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")

    def _stack(self) -> str:
        """Where its main thread is: the innermost line of the last stack that it wrote."""
        try:
            text = (self.files / f"rank-{self.number}.stack").read_text(errors="replace")[-20000:]
        except OSError:
            return ""
        main = re.findall(r'Current thread .*\n\s+File "([^"]+)", line (\d+) in (\S+)', text)
        return f"{os.path.basename(main[-1][0])}:{main[-1][1]} in {main[-1][2]}" if main else ""


def train_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "meshtrain.train", "--config", str(config)]


def _bytes(path: str) -> bytes:
    """What stands there; nothing if that cannot be read. Asked five times a second, so that a Path would be felt."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, MOST_READ)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _fields(text: bytes) -> dict[str, Any]:
    """What the process has said; nothing if that is no JSON of fields."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(pid: int) -> str:
    return _bytes(f"/proc/{pid}/stat").rpartition(b") ")[2][:1].decode()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
