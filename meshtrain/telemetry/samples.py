"""resources/RANK.jsonl: what each process says of itself, on the file system that the run has in common; and the newest
of all.

Nothing is sent between processes. A shared file system bears so many small writes only. The more processes there
are, the less often each writes; READS_PER_SECOND are read at most. A file that grows beyond MOST_BYTES is thinned, so
that what is long ago is known less closely.
"""

import contextlib
import errno
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshtrain.config import Config
from meshtrain.errors import refusal, say
from meshtrain.files import write_atomically
from meshtrain.run.directory import RESOURCES
from meshtrain.run.rows import RowReader
from meshtrain.survive.supervised import watch_pauses
from meshtrain.telemetry.resources import Resources, open_gpus

if TYPE_CHECKING:
    from meshtrain.survive.heartbeat import Heartbeat

Row = dict[str, Any]

WRITES_PER_SECOND = 100.0  # of all processes together
READS_PER_SECOND = 20.0  # of the first one, which is a training process too
MOST_BYTES = 4 * 2**20
NEWEST_ROWS = 1000  # that thinning leaves as they are
TAIL = 64 * 1024  # bytes at the end of a file that hold a row
FIRST = 2.0  # seconds after which the first sample is taken: a short run has one, too
SKEW = 60.0  # seconds by which clocks of machines may differ


def write_every(seconds: float, processes: int) -> float:
    """Returns the seconds between a process's samples, where `seconds` are asked for."""
    return max(seconds, processes / WRITES_PER_SECOND)


def read_every(seconds: float, processes: int) -> float:
    """Returns the seconds between two looks at what all have written."""
    return max(write_every(seconds, processes), processes / READS_PER_SECOND)


class Samples:
    """Appends rows of one process.

    A row that the disk does not take is lost, which is reported once until one is taken again.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / RESOURCES / f"{rank}.jsonl"
        self._reported = False

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            self._append(json.dumps(finite(row), allow_nan=False).encode() + b"\n")
            self._reported = False
        except OSError as error:
            if not self._reported:
                say(
                    f"samples cannot be written to {self.path}: {refusal(error)}; training goes on without them."
                )
            self._reported = True

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened each time: a run's directory may be moved or emptied while it trains.
        with self.path.open("a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            # What a full disk, or a killed process, has left torn.
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            line = b"\n" * torn + line
            if os.write(file.fileno(), line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if size > MOST_BYTES:
            lines = self.path.read_bytes().splitlines(keepends=True)
            old = lines[:-NEWEST_ROWS]
            new = lines[-NEWEST_ROWS:]
            write_atomically(self.path, b"".join([*old[::2], *new]))


def finite(row: Mapping[str, Any]) -> Row:
    """Returns a row without NaN and infinities: JSON has none of these, and an unknown value is left out."""
    return {
        name: finite(value) if isinstance(value, Mapping) else value
        for name, value in row.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def newest(directory: Path, rank: int) -> Row | None:
    """Returns the last whole row of a process; None if there is none."""
    with contextlib.suppress(OSError):
        return next(
            reversed(
                list(RowReader(directory / RESOURCES / f"{rank}.jsonl", TAIL).new())
            ),
            None,
        )
    return None


class ResourceSampling:
    """Takes a sample of this process, and leaves it where all of them are."""

    name = "sampling"

    def __init__(
        self,
        directory: Path,
        rank: int,
        heartbeat: "Heartbeat",
        resources: Resources,
    ) -> None:
        self._rank = rank
        self._heartbeat = heartbeat
        self._resources = resources
        self._file = Samples(directory, rank)
        self._host = socket.gethostname()

    def __call__(self) -> Iterator[Row]:
        row = {
            "time": time.time(),
            "rank": self._rank,
            "host": self._host,
            "step": self._heartbeat.step,
        }
        row |= self._resources.sample()
        self._file.write(row)
        yield row


class Others:
    """Newest samples of the other processes, each once, on the first one."""

    name = "reading the samples of other processes"

    def __init__(self, directory: Path, processes: int) -> None:
        # Earlier processes of the run wrote there too.
        self._directory = directory
        self._latest = dict.fromkeys(range(1, processes), time.time() - SKEW)

    def __call__(self) -> Iterator[Row]:
        for rank, latest in self._latest.items():
            row = newest(self._directory, rank)
            if row is not None and row.get("time", 0.0) > latest:
                self._latest[rank] = row["time"]
                yield row


def sample_processes(
    config: Config,
    directory: Path,
    heartbeat: "Heartbeat",
    mesh: jax.sharding.Mesh,
    repeat: Callable[..., None],
) -> None:
    """Samples what this process uses through the hub's `repeat`; the first one also reads the samples of all."""
    rank = jax.process_index()
    processes = jax.process_count()
    watch_pauses(heartbeat)
    devices = mesh.local_devices if mesh.devices.flat[0].platform != "cpu" else []
    gpus = open_gpus(
        [
            device.local_hardware_id
            for device in devices
            if device.platform in ("gpu", "cuda")
        ]
    )
    limit = int(config.telemetry.memory_limit * 2**30)
    resources = Resources(
        directory, limit=limit, phases=heartbeat.phases, devices=devices, gpus=gpus
    )
    every = write_every(config.telemetry.every, processes)
    # Not all at once: by the golden ratio any number of ranks is spread evenly.
    first = min(FIRST, every) if processes == 1 else rank * 0.618034 % 1 * every
    repeat(every, ResourceSampling(directory, rank, heartbeat, resources), first)
    if rank == 0 and processes > 1:
        repeat(
            read_every(config.telemetry.every, processes), Others(directory, processes)
        )
