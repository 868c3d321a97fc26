"""A node's training process: started, watched through /proc and its heartbeat, and ended together with all that it has
started.

    supervisor ──lease: a counter──► DIR ◄──heartbeat: step, phase, seconds── training process
               ──SIGUSR1: stacks, SIGTERM: stop, SIGKILL──►

DIR lies in memory where the system has such a place: a step costs no write to a disk or a network.
"""

import contextlib
import fcntl
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
from meshtrain.files import retried
from meshtrain.orphans import die_with_parent
from meshtrain.run.rows import parse
from meshtrain.survive.heartbeat import CODES, VARIABLE
from meshtrain.survive.records import Node, ProcessEnd, Rank, record_of
from meshtrain.survive.store import NO_RECORD, opened, read_file
from meshtrain.survive.supervised import BEAT, LEASE, LEASE_SIZE

STACKS = 0.3  # seconds that a process gets to write its stacks before it is ended
# The words of JAX's coordination client before it ends its process by SIGABRT for a peer that is gone.
ABORTED = re.compile(rb"coordination service|distributed service|heartbeat", re.I)
PREFIX = "meshtrain-"  # of its directory's name
# Seconds after which a lease that was never renewed is nobody's, if nobody holds it
LEFT = 60.0
LONGEST = 1000  # letters of why it failed
# Bytes of its output: at once, and of what was printed since the last look.
MOST_READ = 1 << 16
MOST_SHOWN = 1 << 20
BY_EXIT = {code: kind for kind, code in CODES.items() if code != FAILED}


class TrainingProcess:
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
        self.generation = generation
        self.number = number
        self.files = files
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        _sweep(Path(memory))
        self.local = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory))
        self._lease_count = 0
        with contextlib.ExitStack() as begun:
            begun.callback(shutil.rmtree, self.local, ignore_errors=True)
            self._lease = os.open(self.local / LEASE, os.O_WRONLY | os.O_CREAT, 0o600)
            begun.callback(os.close, self._lease)
            # Until this supervisor ends, however it does.
            fcntl.flock(self._lease, fcntl.LOCK_EX)
            self.renew()
            # Read by its descriptor: the run directory may be removed or renamed meanwhile.
            self.output = begun.enter_context(
                open(files / f"rank-{number}.out", "a+b", buffering=0)
            )
            supervised = {
                "local": str(self.local),
                "generation": str(files),
                "number": generation,
                "rank": number,
                "fence": fence,
                "survive": str(files.parent),
            }
            self.process = subprocess.Popen(
                command,
                env={**environment, VARIABLE: json.dumps(supervised)},
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
            # A process that began leaves its files.
            begun.pop_all()
        self._changed = self._alive_since = time.monotonic()
        self._count = self._alive = -1
        self._asked_at = -1  # the phase for which stacks were asked
        self._shown = 0
        self._killed = self._group_killed = (
            False  # whether we ended it; whether its whole group was ended after it
        )
        self._heartbeat_text = b""
        self.heartbeat: dict[str, Any] = {}  # the last complete one
        self.rank = Rank(number, self.process.pid)

    def renew(self) -> None:
        """Renews the lease: without this for a while the process ends itself."""
        self._lease_count += 1
        os.pwrite(self._lease, str(self._lease_count).rjust(LEASE_SIZE).encode(), 0)

    def look(self) -> Rank:
        """Returns what it does now."""
        now = time.monotonic()
        # Not begun, or in the middle of a write: the heartbeat before holds.
        if (
            text := read_file(f"{self.local}/{BEAT}", MOST_READ)
        ) != self._heartbeat_text:
            self._heartbeat_text = text
            self.heartbeat = parse(text) or self.heartbeat
        if (count := self.heartbeat.get("n", -1)) != self._count:
            self._count = count
            self._changed = now
        if (alive := self.heartbeat.get("alive", -1)) != self._alive:
            self._alive = alive
            self._alive_since = now
        pid = self.process.pid
        seen = {
            "number": self.number,
            "pid": pid,
            "proc": read_file(f"/proc/{pid}/stat", MOST_READ)
            .rpartition(b") ")[2][:1]
            .decode(),
            "phase_age": now - self._changed,
            "alive_age": now - self._alive_since if self._alive >= 0 else 0.0,
        }
        if self._asked_at == self._count:
            seen["stack"] = self._stack()
        self.rank = record_of(Rank, {**self.heartbeat, **seen}) or Rank(**seen)  # type: ignore[arg-type]
        return self.rank

    def ask_stacks(self) -> None:
        """Has it write where it is, once a phase. A frozen process writes nothing."""
        if self._asked_at != self._count and self.rank.proc not in ("T", "t"):
            self._asked_at = self._count
            self._signal(signal.SIGUSR1)

    def ended(self) -> ProcessEnd | None:
        """Returns how it ended, None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self.look()
        step = self.rank.step
        if self._killed:
            return ProcessEnd(code, "ended_by_us", "was ended", step)
        if code < 0:
            kind = (
                "peer"
                if code == -signal.SIGABRT and ABORTED.search(self._tail())
                else "signal"
            )
            known = -code in signal.Signals.__members__.values()
            name = signal.Signals(-code).name if known else f"signal {-code}"
            sentence = (
                f"was ended by {name} in the phase {self.rank.phase}, after step {step}"
            )
            return ProcessEnd(code, kind, sentence, step)
        if code in (0, 75):
            return ProcessEnd(code, "ok" if code == 0 else "stopped", "ended", step)
        fault = parse(self._last_words()) or {}
        blamed = fault.get("ranks")
        ranks = (
            [r for r in blamed if isinstance(r, int)]
            if isinstance(blamed, list)
            else []
        )
        kind = BY_EXIT.get(code) or next(
            (k for k in CODES if k == fault.get("kind")), "error"
        )
        sentence = " ".join(str(fault.get("sentence", "")).split())[:LONGEST]
        if not sentence:
            lines = self._tail().decode(errors="replace").split("\n")
            sentence = next(
                (line.strip()[:300] for line in reversed(lines) if line.strip()),
                "it said nothing",
            )
        return ProcessEnd(
            code, kind, f"ended with {code} after step {step}: {sentence}", step, ranks
        )

    def stop(self) -> None:
        """Asks it to save and stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and all that it has started, after it wrote where it was; returns at once."""
        if self.process.poll() is None:
            self._killed = True
            if self.rank.proc not in ("T", "t") and self._count >= 0:
                self._signal(signal.SIGUSR1)
                time.sleep(STACKS)
        # Also when it has ended: what it started may not have. Not later: its number may be another group's by then.
        if not self._group_killed:
            self._group_killed = self.process.poll() is not None
            self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._lease)
        self.output.close()
        shutil.rmtree(self.local, ignore_errors=True)

    def new_output(self, to_the_end: bool = False) -> bytes:
        """Returns what it has printed since the last call, in complete lines; of very much the last."""
        size = os.fstat(self.output.fileno()).st_size
        self._shown = max(self._shown, size - MOST_SHOWN)
        text = os.pread(self.output.fileno(), MOST_READ, self._shown)
        if not to_the_end and len(text) < MOST_READ:
            text = text[: text.rfind(b"\n") + 1]
        self._shown += len(text)
        return text

    def _signal(self, number: int) -> None:
        # Where it has ended, with all of its group, there is nobody to signal.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                os.kill(self.process.pid, number)

    def _tail(self) -> bytes:
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), 8192, max(0, size - 8192))

    def _last_words(self) -> bytes:
        """Returns what it left of why it failed; nothing if that is not there, or cannot be read."""
        try:
            return retried(
                lambda: read_file(
                    self.files / f"rank-{self.number}.fault.json", MOST_READ, NO_RECORD
                )
            )
        except OSError:
            return b""

    def _stack(self) -> str:
        """Returns where its main thread is: the innermost line of the last stack that it wrote."""
        try:
            text = (self.files / f"rank-{self.number}.stack").read_text(
                errors="replace"
            )[-20000:]
        except OSError:
            return ""
        main = re.findall(
            r'Current thread .*\n\s+File "([^"]+)", line (\d+) in (\S+)', text
        )
        if main:
            return f"{os.path.basename(main[-1][0])}:{main[-1][1]} in {main[-1][2]}"
        return ""


def train_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "meshtrain.train", "--config", str(config)]


def kill_left_behind(node: Node, survive: Path) -> bool:
    """Ends the process of another node of this machine, which nobody watches any more; returns whether there was one.

    A frozen one would hold the run's lock, and go on to write once it is let go. It is ended only if its own
    environment names it: its number may be another process's by now.
    """
    if node.rank is None:
        return False
    try:
        variables = retried(Path(f"/proc/{node.rank.pid}/environ").read_bytes).split(
            b"\0"
        )
        texts = (
            v.partition(b"=")[2]
            for v in variables
            if v.startswith(f"{VARIABLE}=".encode())
        )
        supervised = parse(next(texts, b"")) or {}
        if (supervised.get("number"), supervised.get("rank")) != (
            node.generation,
            node.rank.number,
        ):
            return False
        if not os.path.samefile(str(supervised.get("survive")), survive):
            return False
        os.killpg(node.rank.pid, signal.SIGKILL)
    except OSError:
        # It has ended, or is another user's.
        return False
    return True


def _sweep(memory: Path) -> None:
    """Removes what supervisors that were killed have left in memory.

    A lease that was renewed has been held: if nobody holds it now, its supervisor is gone. One that is empty may only
    just be there.
    """
    for directory in memory.glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            open(directory / LEASE, opener=opened) as lease,
        ):
            there = os.fstat(lease.fileno())
            if there.st_size or time.time() - there.st_mtime > LEFT:
                fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
