"""The heartbeat of a training process: in which phase it is, which step it takes, where its seconds went.

    main thread   start open join init restore │ data (compile) dispatch wait │ log eval save │ data ... │ save end
                                                                               └ one step more is taken

Under a supervisor it also writes all that to a file and ends the process when the supervisor is gone:
`survive.supervised`.

Imports no JAX: the supervisor reads what is here.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.survive.records import Supervised

VARIABLE = "MESHTRAIN_SUPERVISED"
LAST_STEPS = 20  # of which `pace` is the median

# What the seconds of a phase count as.
KIND_OF = dict.fromkeys(("start", "open", "join", "init", "end"), "init") | {
    "restore": "restore",
    "compile": "compile",
    "data": "data",
    "dispatch": "step",
    "wait": "step",
    "log": "step",
    "rollout": "step",
    "reward": "step",
    "stopped": "step",
    "queued": "step",
    "eval": "eval",
    "trace": "eval",
    "save": "checkpoint",
}
KINDS = ("init", "compile", "restore", "step", "data", "eval", "checkpoint")
# No phases of the main thread's own: the seconds of `wait` in which the process did not run
# (`survive.supervised.watch`).
PAUSES = ("stopped", "queued")
HOST = (
    "data",
    "dispatch",
    "log",
    *PAUSES,
)  # of a step, those in which a rank waits for nobody else
WAIT = "wait"
STEPPING = (*HOST, WAIT)

# Why a process failed, by itself, and its exit code: effects (a peer was lost) have one of their own, so that causes
# are found.
CODES = {
    "numbers": 70, "sick": 71, "lock": 72, "peer": 73, "config": 2, "memory": 1, "error": 1, "port": 1,
}  # fmt: skip


class Heartbeat:
    """Counts phases, steps and seconds. `phase`, `took` and `begin_save` are the main thread's."""

    supervised: "Supervised | None" = None

    def __init__(self) -> None:
        self.name = "start"
        self.step = 0
        self.changes = 0
        self.alive = 0
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._spent = dict.fromkeys(KIND_OF, 0.0)  # by phase
        self.start: int | None = None  # the step that the process goes on from
        self.at_save: dict[str, Any] | None = (
            None  # the seconds when the newest save began that was due
        )
        self.saved: int | None = None  # the newest step on disk
        self.matmul: dict[str, Any] | None = None  # see survive.health
        self.collectives: str | None = None  # of a step, in a line
        self.cache: dict[str, int] | None = (
            None  # programs that the compilation cache had, and had not
        )
        # Of the seconds that `_spent` counts as `wait`
        self._paused = dict.fromkeys(PAUSES, 0.0)
        self._steps: deque[float] = deque(maxlen=LAST_STEPS)  # seconds of each
        self._stepped = 0.0  # seconds in the phases of steps when the newest was taken
        self._before = self.name  # the phase before this one
        self._since = time.perf_counter()
        self._lock = threading.RLock()
        self.is_watched = False  # by a thread that counts pauses

    def log_batches(self) -> Any:
        """Returns the `supervised.BatchLog` of what this process reads; None without a supervisor."""
        return None

    def phase(self, name: str) -> None:
        """Goes on to another phase."""
        self._go_on(name)

    def took(self, step: int) -> None:
        """Goes on to `log`: the devices have finished step `step`."""
        self._go_on("log", step)

    def begin_save(self, step: int, due: bool) -> None:
        """Goes on to `save`, of the state after `step` steps."""
        self._go_on("save", due=step if due else None)

    def _go_on(
        self, name: str, taken: int | None = None, due: int | None = None
    ) -> None:
        now = time.perf_counter()
        with self._lock:
            spent = now - self._since
            self._since = now
            self.seconds[KIND_OF[self.name]] += spent
            self._spent[self.name] += spent
            if taken is not None:
                before = self._stepped
                self._stepped = sum(self._spent[name] for name in STEPPING)
                self._steps.append(self._stepped - before)
                self.step = taken
            if due is not None:
                self.at_save = {"step": due, "seconds": rounded(self.seconds)}
            self._before = self.name
            self.name = name
            self.changes += 1

    @property
    def pace(self) -> float | None:
        """Median seconds of the last steps; None before there is one."""
        with self._lock:
            if self._steps:
                return statistics.median(self._steps)
            return None

    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far, of the one that goes on too."""
        with self._lock:
            spent = self._spent | self._paused
            spent[self.name] += time.perf_counter() - self._since
            spent[WAIT] = max(0.0, spent[WAIT] - sum(self._paused.values()))
            return spent

    def values(self) -> dict[str, Any]:
        """All that is known, as the supervisor's file has it."""
        with self._lock:
            phases = self.phases()
            kind = KIND_OF[self.name]
            now = time.perf_counter() - self._since
            return {
                "n": self.changes,
                "alive": self.alive,
                "step": self.step,
                "phase": self.name,
                "pace": self.pace,
                "phases": rounded({name: phases[name] for name in STEPPING}),
                "seconds": rounded(self.seconds | {kind: self.seconds[kind] + now}),
                "at_save": self.at_save,
                "saved": self.saved,
                "start": self.start,
                "matmul": self.matmul,
                "collectives": self.collectives,
                "cache": self.cache,
            }

    def pause(self, late: Mapping[str, float]) -> None:
        """Counts seconds, up to now, in which the process did not run, by the reason."""
        with self._lock:
            # The main thread may have gone on since.
            half = time.perf_counter() - sum(late.values()) / 2
            if (self.name if self._since < half else self._before) == WAIT:
                for reason, seconds in late.items():
                    self._paused[reason] += seconds

    def count_alive(self) -> None:
        """Tells whoever supervises the process that it runs."""

    def note(
        self, kind: str, sentence: str, ranks: Sequence[int] | None = None
    ) -> None:
        """Leaves word of why this process fails, if there is a supervisor to read it."""


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(spent, 4) for kind, spent in seconds.items()}
