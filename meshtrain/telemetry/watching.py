"""Who watches a run, put together for one of its processes.

- Every process: samples of what it uses, its page of metrics.
- The first one: what all processes wrote, alerts, trackers.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from meshtrain.config import Config
from meshtrain.run.processes import gathered
from meshtrain.survive.beat import Beat
from meshtrain.telemetry import gpu
from meshtrain.telemetry.alerts import Alerts
from meshtrain.telemetry.board import Board
from meshtrain.telemetry.endpoint import Endpoint
from meshtrain.telemetry.hub import Hub, Row
from meshtrain.telemetry.resources import Resources
from meshtrain.telemetry.samples import Samples, newest, read_every, write_every
from meshtrain.telemetry.trackers import Tracked

SKEW = 60.0  # seconds by which clocks of machines may differ
FIRST = 2.0  # seconds after which the first sample is taken: a short run has one, too


def watch(config: Config, directory: Path, beat: Beat, mesh: jax.sharding.Mesh) -> Hub:
    """The hub of this process, with all that the config asks for. All processes must call it."""
    telemetry, rank, processes = config.telemetry, jax.process_index(), jax.process_count()
    hub = Hub(config, directory)
    if telemetry.every:
        devices = mesh.local_devices if mesh.devices.flat[0].platform != "cpu" else []
        visible = [device.local_hardware_id for device in devices if device.platform in ("gpu", "cuda")]
        resources = Resources(
            directory,
            limit=int(telemetry.memory_limit * 2**30),
            phases=beat.phases,
            devices=devices,
            gpus=gpu.opened(visible),
        )
        every = write_every(telemetry.every, processes)
        # Not all at once: by the golden ratio any number of ranks is spread evenly.
        first = min(FIRST, every) if processes == 1 else rank * 0.618034 % 1 * every
        hub.repeat(every, Sampling(directory, rank, beat, resources), first)
        if rank == 0 and processes > 1:
            hub.repeat(read_every(telemetry.every, processes), Others(directory, processes))
    if telemetry.endpoint:
        host = socket.gethostname()
        # Once, before the first step; what is sampled later goes over files.
        of_machine = gathered(host)[:rank].count(host)
        board = Board(rank, host, str(directory), hub.totals, read_every(telemetry.every, processes))
        endpoint = Endpoint(telemetry.bind, telemetry.endpoint + of_machine, board)
        if endpoint.url:
            hub.listen(endpoint)
    if rank == 0:
        if telemetry.alerts:
            hub.listen(Alerts(config, directory))
        for name in telemetry.trackers:
            hub.listen(Tracked(name, config, directory))
    return hub


class Sampling:
    """Takes a sample of this process, and leaves it where all of them are."""

    name = "sampling"

    def __init__(self, directory: Path, rank: int, beat: Beat, resources: Resources) -> None:
        self._rank, self._beat, self._resources = rank, beat, resources
        self._file, self._host = Samples(directory, rank), socket.gethostname()

    def __call__(self) -> Iterator[Row]:
        row = {"time": time.time(), "rank": self._rank, "host": self._host, "step": self._beat.step}
        row |= self._resources.sample()
        self._file.write(row)
        yield row


class Others:
    """Newest samples of the other processes, each once, on the first one."""

    name = "reading the samples of other processes"

    def __init__(self, directory: Path, processes: int) -> None:
        # Earlier processes of the run wrote there too.
        self._directory, self._told = directory, dict.fromkeys(range(1, processes), time.time() - SKEW)

    def __call__(self) -> Iterator[Row]:
        for rank, told in self._told.items():
            row = newest(self._directory, rank)
            if row is not None and row.get("time", 0.0) > told:
                self._told[rank] = row["time"]
                yield row
