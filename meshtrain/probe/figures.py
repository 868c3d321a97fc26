"""What was measured, as data. Devices are numbered as the planner does: pipeline outermost, then data, tensor innermost."""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshtrain.config import MeshConfig
from meshtrain.probe.conventions import XLA, bus_factor
from meshtrain.probe.fit import Line, left_out, line
from meshtrain.shown import Shown

STEADY = 0.2  # the middle half of the repeats over their median: beyond it the machine does other things as well


@dataclass(frozen=True)
class Timing:
    """One collective at one size over one axis, in all groups of the axis at once."""

    axis: str
    kind: str
    devices: int  # of a group
    nbytes: int
    seconds: float  # median
    spread: float  # the middle half of the repeats over the median

    @property
    def algbw(self) -> float:
        """Bytes of the array a second."""
        return self.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes a second over a link (`meshtrain.probe.conventions`)."""
        return self.algbw * bus_factor(self.kind, self.devices)


@dataclass(frozen=True)
class Collective:
    """One kind over one axis (or over two joined by +) by one algorithm: its sizes, smallest first."""

    axis: str
    kind: str
    timings: tuple[Timing, ...]
    algorithm: str = XLA

    @property
    def devices(self) -> int:
        return self.timings[0].devices

    @cached_property
    def line(self) -> Line:
        """Of the whole collective: bytes are of the array."""
        return line([t.nbytes for t in self.timings], [t.seconds for t in self.timings])

    @cached_property
    def left_out(self) -> list[float]:
        """Relative errors of lines through all sizes but one, on that one."""
        return left_out([t.nbytes for t in self.timings], [t.seconds for t in self.timings])

    @property
    def busbw(self) -> float:
        """Bytes a second over a link, by the line: what very large arrays get."""
        return self.line.bandwidth * bus_factor(self.kind, self.devices)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Messages between two devices while the others are idle: seconds [sizes, from, to], NaN where none was sent."""

    sizes: tuple[int, ...]
    seconds: np.ndarray
    spread: float  # as of the collectives, the middle one

    @property
    def latency(self) -> np.ndarray:
        """Seconds of the smallest message."""
        return self.seconds[0]

    @property
    def bandwidth(self) -> np.ndarray:
        """Bytes a second of the largest message."""
        return self.sizes[-1] / self.seconds[-1]


@dataclass(frozen=True, eq=False)
class Devices:
    """Each device by itself, and all at once, which counts where they share something."""

    dtype: str  # of the products of each device
    side: int  # of the matrices
    flops: np.ndarray  # FLOP/s of each device
    memory_bandwidth: np.ndarray  # bytes/s of each device
    matmul: dict[str, float]  # FLOP/s of one device by dtype while all compute
    memory_rate: float  # bytes/s of one device while all pass over their memory
    memory_bytes: float  # of one device
    spread: float  # as of the collectives, the middle one


@dataclass(frozen=True, eq=False, repr=False)
class Probe(Shown):
    """All figures; what was not measured is None or empty. `machines` says by device which machine it is in, `names` which device of
    which host it is."""

    platform: str  # cpu, gpu or tpu
    kind: str
    mesh: MeshConfig
    machines: tuple[int, ...]
    processes: int
    barriers: dict[str, float]  # seconds by axis, and of all devices
    collectives: tuple[Collective, ...]
    pairs: Pairs | None
    devices: Devices | None
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.machines)

    def over(self, axis: str) -> tuple[Collective, ...]:
        return tuple(c for c in self.collectives if c.axis == axis)

    @property
    def spread(self) -> dict[str, float]:
        """By what was measured, how far the middle half of the repeats is apart, over their median: on a machine of one's own some percent."""
        timings = [t.spread for c in self.collectives for t in c.timings]
        found = {"collectives": float(np.median(timings))} if timings else {}
        found |= {"pairs": self.pairs.spread} if self.pairs else {}
        return found | ({"products": self.devices.spread} if self.devices else {})

    def place(self, device: int) -> str:
        """A device for people: its number, and where it stands in the mesh."""
        ranks = {axis: device // self.mesh.stride(axis) % ways for axis, ways in self.mesh.shape.items()}
        where = [f"{axis} {rank}" for axis, rank in ranks.items() if self.mesh.ways(axis) > 1]
        where += [f"machine {self.machines[device]}"] * (len(set(self.machines)) > 1)
        return f"device {device}" + (f" ({', '.join(where)})" if where else "")

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "platform": self.platform,
            "kind": self.kind,
            "devices": self.size,
            "mesh": asdict(self.mesh),
            "processes": self.processes,
            "machines": list(self.machines),
            "barrier_seconds": self.barriers,
            "spread": self.spread,
            "collectives": [_collective(c) for c in self.collectives],
        }
        if self.pairs:
            found["pairs"] = {"sizes": list(self.pairs.sizes), "seconds": listed(self.pairs.seconds)}
        if self.devices:
            found["each_device"] = {
                "dtype": self.devices.dtype,
                "side": self.devices.side,
                "flops": self.devices.flops.tolist(),
                "memory_bandwidth": self.devices.memory_bandwidth.tolist(),
            }
            found["all_at_once"] = {"matmul_flops": self.devices.matmul, "memory_bandwidth": self.devices.memory_rate}
        return found


def _collective(c: Collective) -> dict[str, Any]:
    return {
        "axis": c.axis,
        "kind": c.kind,
        "algorithm": c.algorithm,
        "devices": c.devices,
        "latency_seconds": c.line.latency,
        "algbw": c.line.bandwidth,
        "busbw": c.busbw,
        "left_out_errors": c.left_out,
        "sizes": [
            {"bytes": t.nbytes, "seconds": t.seconds, "algbw": t.algbw, "busbw": t.busbw, "spread": t.spread}
            for t in c.timings
        ],
    }


def listed(numbers: np.ndarray) -> list[Any]:
    """Nested lists for JSON, which has no NaN: null."""
    if numbers.ndim > 1:
        return [listed(row) for row in numbers]
    return [None if math.isnan(x) else float(x) for x in numbers]
