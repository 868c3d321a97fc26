"""A training process under a supervisor: its heartbeat goes to a file, and it ends when the supervisor is gone.

The main thread at each phase, and a thread every half second, write the file `beat`: 4096 bytes of JSON padded with
spaces, in place. Nothing is made or renamed, so that the last word is there however the process ends. A rank whose main
thread hangs is told from one that is frozen by which of the counters stands still (`n`, `alive`).

A supervisor that is frozen or gone no longer renews the file `lease`. Others may have gone on without its rank by then,
so the rank ends itself.

A thread sees when the process does not run though it should: it is stopped now and then, or has no core. The thread
comes late then, and that part of `wait` counts as `stopped` or `queued`, since no other rank is to blame for it.

`log.batches` logs what the process read, so that the batches of one run can be compared with those of another.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
import typing
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from meshtrain.errors import ConfigError, say, short
from meshtrain.files import write_atomically
from meshtrain.inputs import WEIGHTS, inputs
from meshtrain.run.rows import MetricsFile
from meshtrain.survive.heartbeat import CODES, VARIABLE, Heartbeat
from meshtrain.survive.records import Supervised

# files
BEAT = "beat"
LEASE = "lease"
# bytes of them
SIZE = 4096
LEASE_SIZE = 16
PATIENCE = 2.0  # seconds for the last words, which go to a disk that may hang


def read_settings(text: str) -> Supervised:
    """Reads the JSON of the variable; ConfigError if it is not what a supervisor writes."""
    kinds = typing.get_type_hints(Supervised)
    try:
        values = json.loads(text)
        return Supervised(**{name: kind(values[name]) for name, kind in kinds.items()})
    except (ValueError, TypeError, KeyError, RecursionError):
        set_by = "it is set by the supervisor only, so unset it"
        raise ConfigError(f"{VARIABLE} is {short(repr(text))}; {set_by}.") from None


class SupervisedHeartbeat(Heartbeat):
    """Writes itself to the supervisor's file. ConfigError if the supervisor's files are not there."""

    supervised: Supervised

    def __init__(self, supervised: Supervised) -> None:
        super().__init__()
        self.supervised = supervised
        self._writing = threading.Lock()
        self._leasing = threading.RLock()
        try:
            self._file = os.open(
                supervised.local / BEAT, os.O_WRONLY | os.O_CREAT, 0o600
            )
            self._lease = os.open(
                supervised.local / LEASE, os.O_RDONLY | os.O_CREAT, 0o600
            )
            self._stacks = supervised.own("stack").open("w")
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}; a supervisor would have made it."
            ) from None
        # From C, so that it works while Python does not.
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        faulthandler.enable()
        self._seen = os.pread(self._lease, LEASE_SIZE, 0)
        self._renewed = time.monotonic()
        self._looked = self._renewed
        self._write()
        watch_pauses(self)

    def _go_on(
        self, name: str, taken: int | None = None, due: int | None = None
    ) -> None:
        super()._go_on(name, taken, due)
        self._check_lease()
        self._write()

    def log_batches(self) -> "BatchLog":
        return BatchLog(self.supervised)

    def count_alive(self) -> None:
        self.alive += 1
        self._check_lease()
        self._write()

    def _write(self) -> None:
        # One thread at a time, or an earlier text could come last. What the disk refuses, the supervisor misses.
        with self._writing, contextlib.suppress(OSError):
            text = json.dumps(self.values()).encode()
            assert len(text) <= SIZE, "a heartbeat is of bounded length"
            os.pwrite(self._file, text.ljust(SIZE), 0)

    def _check_lease(self) -> None:
        # One thread at a time: while one ends the process, the other goes no further.
        with self._leasing:
            now = time.monotonic()
            # A process that slept finds what was written meanwhile, and must ask when that was; a clock that is set
            # would mislead any other.
            slept = now - self._looked > self.supervised.fence
            self._looked = now
            try:
                content = os.pread(self._lease, LEASE_SIZE, 0)
                age = (
                    max(0.0, time.time() - os.fstat(self._lease).st_mtime)
                    if slept
                    else 0.0
                )
            except OSError:
                content = self._seen
                age = 0.0
            if content != self._seen:
                self._seen = content
                self._renewed = now - age
            if now - self._renewed > self.supervised.fence:
                self.fail(
                    "lock",
                    f"the supervisor of rank {self.supervised.rank} has not been heard for {now - self._renewed:.0f} "
                    "s, and others may have "
                    "gone on without it: this process ends.",
                )

    def note(
        self, kind: str, sentence: str, ranks: Sequence[int] | None = None
    ) -> None:
        fault = {"kind": kind, "sentence": sentence, "step": self.step}
        content = json.dumps(
            fault if ranks is None else {**fault, "ranks": list(ranks)}
        ).encode()

        def write() -> None:
            with contextlib.suppress(OSError):
                write_atomically(self.supervised.own("fault.json"), content)

        # A disk that hangs may not keep the process alive.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(PATIENCE)

    def fail(self, kind: str, sentence: str) -> NoReturn:
        """Ends this process, from any thread, with a word on why."""
        self.note(kind, sentence)
        say(sentence)
        os._exit(CODES[kind])


ALIVE_EVERY = 0.5  # seconds between two counts of `alive`
# seconds that the thread sleeps, and after which it is late
NAP = 0.05
LATE = 0.01


def watch_pauses(heartbeat: Heartbeat) -> None:
    """Begins the thread that sees when the process does not run."""
    if not heartbeat.is_watched:
        heartbeat.is_watched = True
        threading.Thread(
            target=watch, args=(heartbeat,), name="meshtrain-heartbeat", daemon=True
        ).start()


def watch(heartbeat: Heartbeat) -> NoReturn:
    """Tells a heartbeat of the calling thread's pauses, and that the process is alive."""
    pauses = _Pauses()
    due = time.monotonic() + ALIVE_EVERY
    while True:
        if late := pauses.sleep():
            heartbeat.pause(late)
        if (now := time.monotonic()) >= due:
            due = now + ALIVE_EVERY
            heartbeat.count_alive()


class _Pauses:
    """Seconds in which the calling thread did not run though it should have, by the reason; the process did not either,
    most likely.

    The kernel tells how long a thread was ready without a core, and nothing of one that was stopped. One that waits for
    the interpreter's
    lock is woken again and again meanwhile: its process runs.
    """

    def __init__(self) -> None:
        self._schedule: int | None = None
        with contextlib.suppress(OSError):  # no Linux, or a kernel that does not tell
            self._schedule = os.open(
                "/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC
            )
        self._delay = self._run_delay()
        self._switches = _switches()

    def sleep(self) -> dict[str, float]:
        """Sleeps NAP seconds; returns by how much it was late."""
        due = time.perf_counter() + NAP
        time.sleep(NAP)
        late = time.perf_counter() - due
        delay = self._run_delay()
        switches = _switches()
        queued = min(late, delay - self._delay)
        woken = switches - self._switches
        self._delay = delay
        self._switches = switches
        if late < LATE or woken * sys.getswitchinterval() > late / 2:
            return {}
        return {"stopped": late - queued, "queued": queued}

    def _run_delay(self) -> float:
        """Returns seconds that this thread was ready without a core; 0 where it is not known
        (Documentation/scheduler/sched-stats.rst).
        """
        fields = (
            os.pread(self._schedule, 100, 0).split()
            if self._schedule is not None
            else []
        )
        return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def _switches() -> int:
    if hasattr(resource, "RUSAGE_THREAD"):
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0


class BatchLog:
    """rank-R.batches.jsonl: of every step that is begun, the checksums of what this process read of its rows, and where
    these lie in the batch.

    Padding with weight 0 is left out: how much of it fills a batch up depends on the mesh.
    """

    def __init__(self, supervised: Supervised) -> None:
        self._file = MetricsFile(supervised.own("batches.jsonl"))
        self._ahead: deque[list[int]] = deque()  # of the batches read ahead

    def add(self, batch: Mapping[str, np.ndarray]) -> None:
        """Takes the checksums of the next batch, on the loader's thread."""
        read = inputs(batch)
        counts = batch.get(WEIGHTS, np.ones((len(read), 1))).any(axis=1)
        self._ahead.append([zlib.crc32(row.tobytes()) for row in read[counts]])

    def write(self, step: int, first: int) -> None:
        """Logs the batch that a step takes, of which this process has the rows from `first` on."""
        self._file.write({"step": step, "first": first, "rows": self._ahead.popleft()})

    def close(self) -> None:
        self._file.close()
