"""A node's training process: started, watched through /proc and its beat, and ended together with all that it has started.

    supervisor ──lease: a counter──► DIR ◄──beat: step, phase, seconds── training process
               ──SIGUSR1: stacks, SIGTERM: stop, SIGKILL──►

DIR lies in memory where the system has such a place: a step costs no write to a disk or a network.
"""

import ctypes
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
from meshtrain.survive.beat import BEAT, CODES, LEASE, LEASE_SIZE, VARIABLE
from meshtrain.survive.records import End, Rank, decode

STACKS = 0.3  # seconds that a process gets to write its stacks before it is ended
# What JAX's coordination client says before it ends its process by SIGABRT for a peer that is gone.
ABORTED = re.compile(rb"coordination service|distributed service|heartbeat", re.I)
BY_EXIT = {code: kind for kind, code in CODES.items() if code != FAILED}
PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec nothing may be imported.
_prctl = ctypes.CDLL(None).prctl


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
        self._lease = os.open(self.local / LEASE, os.O_WRONLY | os.O_CREAT, 0o600)
        self.renew()
        told = {
            "local": str(self.local),
            "generation": str(files),
            "number": generation,
            "rank": number,
            "fence": fence,
            "survive": str(files.parent),
        }
        self.output = files / f"rank-{number}.out"
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                command, env={**environment, VARIABLE: json.dumps(told)}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._began = time.monotonic()
        self._changed = self._alive_since = self._began
        self._count = self._alive = -1
        self._asked_at = -1  # the phase for which stacks were asked
        self._shown = 0
        self._ours = False  # whether we ended it
        self.said: dict[str, Any] = {}  # the last whole beat
        self.rank = Rank(number, self.process.pid)

    def renew(self) -> None:
        """Its supervisor is at work: without this for a while the process ends itself."""
        self._lease_count += 1
        os.pwrite(self._lease, str(self._lease_count).rjust(LEASE_SIZE).encode(), 0)

    def look(self) -> Rank:
        """What it does now."""
        now = time.monotonic()
        try:
            said = json.loads((self.local / BEAT).read_bytes())
            self.said = said if isinstance(said, dict) else self.said
        except (OSError, ValueError):
            # Not begun, or in the middle of a write: what it said before holds.
            pass
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
        self.rank = decode(Rank, json.dumps({**self.said, **found}).encode()) or Rank(**found)  # type: ignore[arg-type]
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
        fault = self._fault()
        ranks = [r for r in fault.get("ranks", []) if isinstance(r, int)]
        if self._ours:
            return End(code, "ended_by_us", "was ended", step)
        if code < 0:
            kind = "peer" if code == -signal.SIGABRT and ABORTED.search(self._tail()) else "signal"
            return End(
                code, kind, f"was ended by {_name(-code)} in the phase {self.rank.phase}, after step {step}", step
            )
        if code in (0, 75):
            return End(code, "ok" if code == 0 else "stopped", "ended", step)
        kind = BY_EXIT.get(code) or str(fault.get("kind", "error"))
        sentence = str(fault.get("sentence", "")) or self._last_line()
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
        # Also when it has ended: what it started may not have.
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._lease)
        shutil.rmtree(self.local, ignore_errors=True)

    def new_output(self) -> bytes:
        """What it has printed since the last call, in whole lines."""
        with open(self.output, "rb") as file:
            file.seek(self._shown)
            text = file.read(1 << 16)
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

    def _fault(self) -> dict[str, Any]:
        """What it says of its end itself."""
        try:
            found = json.loads((self.files / f"rank-{self.number}.fault.json").read_bytes()[:65536])
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _tail(self) -> bytes:
        with open(self.output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            return file.read()

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


def _die_with_parent() -> None:
    """The kernel ends the process when its supervisor ends, however that does."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
