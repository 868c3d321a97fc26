"""What a training process tells its supervisor: in which phase it is, that it lives, where its seconds went; and when it must end.

    main thread   start open join init restore │ data (compile) dispatch wait │ log eval save │ data ... │ save end
                                                                               └ one step more is taken
    a thread      every half second: counts `alive`, looks whether the supervisor still renews the lease

Both write the file `beat`, 4096 bytes of JSON padded with spaces, in place: nothing is made or renamed, so that the last word is there
however the process ends. A rank whose main thread hangs is told from one that is frozen by which of the counters stands still.
A supervisor that is frozen or gone no longer renews the lease. Others may have gone on without its rank by then, so the rank ends itself.

Imports no JAX: the supervisor reads what is here.
"""

import contextlib
import faulthandler
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from meshtrain.errors import ConfigError, say, short
from meshtrain.files import write_atomically

VARIABLE = "MESHTRAIN_SUPERVISED"
BEAT, LEASE = "beat", "lease"  # files
SIZE, LEASE_SIZE = 4096, 16  # bytes of them
EVERY = 0.5  # seconds between two counts of `alive`
LAST_STEPS = 20  # of which the medians are
PATIENCE = 2.0  # seconds for the last words, which go to a disk that may hang

# What the seconds of a phase count as.
KIND_OF = dict.fromkeys(("start", "open", "join", "init", "end"), "init") | {
    "restore": "restore", "compile": "compile", "data": "data", "dispatch": "step", "wait": "step", "log": "step",
    "eval": "eval", "trace": "eval", "save": "checkpoint",
}  # fmt: skip
KINDS = ("init", "compile", "restore", "step", "data", "eval", "checkpoint")
HOST = ("data", "dispatch", "log")  # phases of a step in which a rank waits for nobody else

# Why a process failed, by itself, and its exit code: effects (a peer was lost) have one of their own, so that causes are found.
CODES = {
    "numbers": 70, "sick": 71, "lock": 72, "peer": 73, "config": 2, "memory": 1, "error": 1, "port": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Supervised:
    """What a supervisor tells the process that it starts."""

    local: Path  # the node's own directory, with `beat` and `lease`
    generation: Path  # of this generation, in the run directory
    number: int  # of the generation
    rank: int
    fence: float  # seconds without a change of the lease after which the process ends itself
    survive: Path  # RUN/survive

    @classmethod
    def read(cls, text: str) -> "Supervised":
        """From the JSON of the variable; ConfigError if it is not what a supervisor writes."""
        try:
            told = json.loads(text)
            return cls(
                Path(told["local"]), Path(told["generation"]), int(told["number"]), int(told["rank"]),
                float(told["fence"]), Path(told["survive"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(
                f"{VARIABLE} is {short(repr(text))}; it is set by the supervisor only, so unset it."
            ) from None

    def own(self, ending: str) -> Path:
        """A file of this rank in the generation's directory."""
        return self.generation / f"rank-{self.rank}.{ending}"


@cache
def begun() -> "Beat | None":
    """The beat of this process, begun at the first call; None if no supervisor started it. Children of the process have none."""
    text = os.environ.pop(VARIABLE, None)
    return None if text is None else Beat(Supervised.read(text))


def begin() -> None:
    """`begun`, for a process that only starts: what is wrong ends it with a sentence."""
    try:
        begun()
    except ConfigError as error:
        say(error)
        sys.exit(CODES["config"])


@dataclass
class _Pace:
    """Seconds of the last steps, on the host and waiting for the devices."""

    host: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    wait: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("host", "wait"), 0.0))

    def spend(self, phase: str, seconds: float) -> None:
        if phase == "wait" or phase in HOST:
            self.now["wait" if phase == "wait" else "host"] += seconds

    def end_step(self) -> None:
        if self.now["wait"]:
            self.host.append(self.now["host"])
            self.wait.append(self.now["wait"])
        self.now = dict.fromkeys(self.now, 0.0)

    def medians(self) -> dict[str, float | None]:
        if not self.wait:
            return dict.fromkeys(("pace", "host", "wait"))
        whole = [a + b for a, b in zip(self.host, self.wait, strict=True)]
        return {name: statistics.median(of) for name, of in (("pace", whole), ("host", self.host), ("wait", self.wait))}


class Beat:
    """Counts phases, steps and seconds; with a supervisor it also says so, and ends the process when that is gone.

    `phase`, `took` and `begin_save` are the main thread's. ConfigError if the supervisor's files are not there.
    """

    def __init__(self, supervised: Supervised | None = None) -> None:
        self.supervised = supervised
        self.name, self.step, self.changes, self.alive = "start", 0, 0, 0
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._spent = dict.fromkeys(KIND_OF, 0.0)  # by phase
        self.start: int | None = None  # the step that the process goes on from
        self.at_save: dict[str, Any] | None = None  # the seconds when the newest save began that was due
        self.saved: int | None = None  # the newest step on disk
        self.matmul: dict[str, Any] | None = None  # see survive.health
        self.collectives: str | None = None  # of a step, in a line
        self.cache: dict[str, int] | None = None  # programs that the compilation cache had, and had not
        self._pace = _Pace()
        self._medians = self._pace.medians()
        self._since = time.perf_counter()
        self._lock, self._writing, self._leasing = threading.Lock(), threading.Lock(), threading.RLock()
        if supervised is not None:
            self._listen(supervised)

    def _listen(self, supervised: Supervised) -> None:
        try:
            self._file = os.open(supervised.local / BEAT, os.O_WRONLY | os.O_CREAT, 0o600)
            self._lease = os.open(supervised.local / LEASE, os.O_RDONLY | os.O_CREAT, 0o600)
            self._stacks = supervised.own("stack").open("w")
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}; a supervisor would have made it.") from None
        # From C, so that it works while Python does not.
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        faulthandler.enable()
        self._seen, self._renewed = os.pread(self._lease, LEASE_SIZE, 0), time.monotonic()
        self._looked = self._renewed
        self._write()
        threading.Thread(target=self._live, name="meshtrain-beat", daemon=True).start()

    # --- the main thread

    def phase(self, name: str) -> None:
        """The main thread goes on to another phase."""
        self._go_on(name)

    def took(self, step: int) -> None:
        """The devices have finished step `step`: the phase `log`, in which that many steps are taken."""
        self._go_on("log", step)

    def begin_save(self, step: int, due: bool) -> None:
        """The phase `save`, of the state after `step` steps."""
        self._go_on("save", due=step if due else None)

    def _go_on(self, name: str, taken: int | None = None, due: int | None = None) -> None:
        now = time.perf_counter()
        with self._lock:
            spent, self._since = now - self._since, now
            self.seconds[KIND_OF[self.name]] += spent
            self._spent[self.name] += spent
            self._pace.spend(self.name, spent)
            if taken is not None:
                self._pace.end_step()
                self._medians, self.step = self._pace.medians(), taken
            if due is not None:
                self.at_save = {"step": due, "seconds": _rounded(self.seconds)}
            self.name = name
            self.changes += 1
        if self.supervised is not None:
            self._check_lease()
            self._write()

    @property
    def pace(self) -> float | None:
        """Median seconds of the last steps; None before there is one."""
        return self._medians["pace"]

    # --- both threads

    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far, of the one that goes on too."""
        with self._lock:
            return self._spent | {self.name: self._spent[self.name] + time.perf_counter() - self._since}

    def said(self) -> dict[str, Any]:
        """What the file says."""
        with self._lock:
            now = time.perf_counter() - self._since
            seconds = self.seconds | {KIND_OF[self.name]: self.seconds[KIND_OF[self.name]] + now}
            return {
                "n": self.changes, "alive": self.alive, "step": self.step, "phase": self.name, **self._medians,
                "seconds": _rounded(seconds), "at_save": self.at_save,
                "saved": self.saved, "start": self.start, "matmul": self.matmul, "collectives": self.collectives,
                "cache": self.cache,
            }  # fmt: skip

    def _write(self) -> None:
        # One thread at a time, or what was said before could come last. What the disk refuses, the supervisor misses.
        with self._writing, contextlib.suppress(OSError):
            text = json.dumps(self.said()).encode()
            assert len(text) <= SIZE, "what a beat says is of bounded length"
            os.pwrite(self._file, text.ljust(SIZE), 0)

    def _check_lease(self) -> None:
        # One thread at a time: while one ends the process, the other goes no further.
        with self._leasing:
            self._check_lease_alone()

    def _check_lease_alone(self) -> None:
        assert self.supervised is not None
        now = time.monotonic()
        # A process that slept finds what was written meanwhile, and must ask when that was; a clock that is set would mislead any other.
        slept, self._looked = now - self._looked > self.supervised.fence, now
        try:
            content = os.pread(self._lease, LEASE_SIZE, 0)
            age = max(0.0, time.time() - os.fstat(self._lease).st_mtime) if slept else 0.0
        except OSError:
            content, age = self._seen, 0.0
        if content != self._seen:
            self._seen, self._renewed = content, now - age
        if now - self._renewed > self.supervised.fence:
            sentence = (
                f"the supervisor of rank {self.supervised.rank} has not been heard for {now - self._renewed:.0f} s, and others may have "
                "gone on without it: this process ends."
            )
            self.fail("lock", sentence)

    # --- the thread

    def _live(self) -> None:
        while True:
            time.sleep(EVERY)
            self.alive += 1
            self._check_lease()
            self._write()

    # --- the end

    def note(self, kind: str, sentence: str, ranks: Sequence[int] | None = None) -> None:
        """Leaves word of why this process fails, if there is a supervisor to read it."""
        if self.supervised is None:
            return
        path = self.supervised.own("fault.json")
        fault: Mapping[str, Any] = {"kind": kind, "sentence": sentence, "step": self.step}
        words = json.dumps(fault if ranks is None else {**fault, "ranks": list(ranks)}).encode()

        def write() -> None:
            with contextlib.suppress(OSError):
                write_atomically(path, words)

        # A disk that hangs may not keep the process alive.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(PATIENCE)

    def fail(self, kind: str, sentence: str) -> NoReturn:
        """Ends this process, from any thread, with a word on why."""
        self.note(kind, sentence)
        say(sentence)
        os._exit(CODES[kind])


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(spent, 4) for kind, spent in seconds.items()}


def in_a_line(collectives: Sequence[Any]) -> str:
    """What a step sends, most often first: 12 all-reduce over data, 8 all-gather over tensor (`meshtrain.hlo.Collective`)."""
    counts: dict[str, int] = {}
    for one in collectives:
        if one.axes:
            name = f"{one.kind} over {one.axis}"
            turns = [n for n in one.loops if n is not None]
            counts[name] = counts.get(name, 0) + math.prod(turns)
    most_first = sorted(counts.items(), key=lambda named: -named[1])
    line = ", ".join(f"{count} {name}" for name, count in most_first)
    return line if len(line) <= 400 else re.sub(r", [^,]*$", ", ...", line[:400])
