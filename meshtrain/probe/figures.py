"""Holds the measured figures as data.

Devices are numbered as the planner does: pipeline outermost, then data, tensor innermost.

Sizes and bandwidths are those of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md; src/alltoall.cu, src/sendrecv.cu).
S is the size of the whole array: what an all-reduce sums, what an all-gather ends with, what a reduce-scatter and an
all-to-all begin with on a device; of a permute the message. n devices, t seconds:

    algbw = S / t        what the caller gets
    busbw = algbw f      what a link carries, so that it may be held against the link's own bandwidth;
                         f is 2 (n-1)/n of an all-reduce, 1 of a permute, (n-1)/n of the others

A line through times of several sizes is the alpha-beta model (Thakur et al. 2005, section 3): seconds = latency + bytes
/ bandwidth.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meshtrain.cluster.algorithms import sent
from meshtrain.config import MeshConfig
from meshtrain.registry import Shown

BARRIER = "barrier"
PARTS = (BARRIER, "collectives", "pairs", "products")  # what is measured
# the algorithm that XLA and NCCL choose; others are programs of messages (`meshtrain.parallel.reduce.algorithms`)
XLA = "xla"


def bus_factor(kind: str, devices: int) -> float:
    """busbw over algbw: the bytes that a device sends for each byte of the array."""
    return sent(kind, devices, 1.0)


ROUNDS = 20  # of reweighting: it settles in fewer
# residuals beyond so many deviations weigh less (Huber 1964; 95% as efficient as least squares on Gaussian noise)
BEND = 1.345


@dataclass(frozen=True)
class Line:
    latency: float  # seconds
    bandwidth: float  # bytes a second

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


def line(sizes: ArrayLike, seconds: ArrayLike) -> Line:
    """Returns the line of least relative error, so that small messages weigh as much as large ones; outliers weigh
    less.

    Neither figure is negative. Where chance made a large message no slower than a small one no line tells the
    bandwidth, and it is that of the largest message alone.
    """
    order = np.argsort(sizes)
    x = np.asarray(sizes, float)[order]
    y = np.asarray(seconds, float)[order]
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    trust = np.ones_like(x)
    for _ in range(ROUNDS):
        root = np.sqrt(trust)
        alpha, beta = np.linalg.lstsq(design * root[:, None], root, rcond=None)[0]
        residuals = np.abs(design @ (alpha, beta) - 1)
        # Of a normal distribution the median absolute deviation is 0.6745 standard deviations.
        deviation = max(float(np.median(residuals)) / 0.6745, 1e-9)
        trust = np.minimum(1.0, BEND * deviation / np.maximum(residuals, 1e-12))
    if beta <= 0:
        return Line(max(float(alpha), 0.0), float(x[-1] / y[-1]))
    if alpha < 0:
        # The best line through the origin, by the same relative error.
        return Line(0.0, float(np.sum((x / y) ** 2) / np.sum(x / y)))
    return Line(float(alpha), float(1 / beta))


def left_out(sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Returns for each size the relative error (signed) of a line through all the others; none where two or fewer would
    be left.
    """
    if len(sizes) < 4:
        return []
    lines = [
        line(np.delete(sizes, i), np.delete(seconds, i)) for i in range(len(sizes))
    ]
    return [
        fitted.seconds(x) / y - 1
        for fitted, x, y in zip(lines, sizes, seconds, strict=True)
    ]


# The middle half of the repeats over their median: beyond it the machine does other things as well
STEADY = 0.2


@dataclass(frozen=True)
class MeasuredCollective:
    """One kind over one axis (or over two joined by +) by one algorithm, in all groups of the axis at once; of each
    size, smallest first.
    """

    axis: str
    kind: str
    devices: int  # of a group
    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]  # median
    spreads: tuple[float, ...]  # the middle half of the repeats over the median
    algorithm: str = XLA

    @cached_property
    def line(self) -> Line:
        """The line of the whole collective: bytes are the array's."""
        return line(self.sizes, self.seconds)

    @cached_property
    def left_out(self) -> list[float]:
        return left_out(self.sizes, self.seconds)

    @property
    def algbw(self) -> list[float]:
        """Bytes of the array a second, by size."""
        return [
            size / seconds
            for size, seconds in zip(self.sizes, self.seconds, strict=True)
        ]

    @property
    def busbw(self) -> float:
        """Bytes a second over a link, by the line: what very large arrays get."""
        return self.line.bandwidth * bus_factor(self.kind, self.devices)

    def as_json(self) -> dict[str, Any]:
        factor = bus_factor(self.kind, self.devices)
        sizes = [
            {
                "bytes": size,
                "seconds": seconds,
                "algbw": algbw,
                "busbw": algbw * factor,
                "spread": spread,
            }
            for size, seconds, algbw, spread in zip(
                self.sizes, self.seconds, self.algbw, self.spreads, strict=True
            )
        ]
        return {
            "axis": self.axis,
            "kind": self.kind,
            "algorithm": self.algorithm,
            "devices": self.devices,
            "latency_seconds": self.line.latency,
            "algbw": self.line.bandwidth,
            "busbw": self.busbw,
            "left_out_errors": self.left_out,
            "sizes": sizes,
        }


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
    """All figures; what was not measured is None or empty.

    `machines` says by device which machine it is in, `names` which device of which host it is.
    """

    platform: str  # cpu, gpu or tpu
    kind: str
    mesh: MeshConfig
    machines: tuple[int, ...]
    processes: int
    barriers: dict[str, float]  # seconds by axis, and of all devices
    collectives: tuple[MeasuredCollective, ...]
    pairs: Pairs | None
    devices: Devices | None
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.machines)

    @property
    def axes(self) -> list[str]:
        """The axes over which collectives were measured."""
        return list(dict.fromkeys(c.axis for c in self.collectives))

    def collectives_over(self, axis: str) -> tuple[MeasuredCollective, ...]:
        return tuple(c for c in self.collectives if c.axis == axis)

    @property
    def spread(self) -> dict[str, float]:
        """The spread of the middle half of the repeats over their median, by what was measured.

        It is some percent on a machine of one's own.
        """
        every = [spread for c in self.collectives for spread in c.spreads]
        spreads = {"collectives": float(np.median(every))} if every else {}
        spreads |= {"pairs": self.pairs.spread} if self.pairs else {}
        return spreads | ({"products": self.devices.spread} if self.devices else {})

    def place(self, device: int) -> str:
        """A device for people: its number, and where it stands in the mesh."""
        ranks = {
            axis: device // self.mesh.stride(axis) % ways
            for axis, ways in self.mesh.shape.items()
        }
        where = [
            f"{axis} {rank}" for axis, rank in ranks.items() if self.mesh.ways(axis) > 1
        ]
        where += [f"machine {self.machines[device]}"] * (len(set(self.machines)) > 1)
        return f"device {device}" + (f" ({', '.join(where)})" if where else "")

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "platform": self.platform,
            "kind": self.kind,
            "devices": self.size,
            "mesh": asdict(self.mesh),
            "processes": self.processes,
            "machines": list(self.machines),
            "barrier_seconds": self.barriers,
            "spread": self.spread,
            "collectives": [c.as_json() for c in self.collectives],
        }
        if self.pairs:
            # JSON has no NaN.
            seconds = self.pairs.seconds.astype(object)
            seconds[np.isnan(self.pairs.seconds)] = None
            content["pairs"] = {
                "sizes": list(self.pairs.sizes),
                "seconds": seconds.tolist(),
            }
        if self.devices:
            content["each_device"] = {
                "dtype": self.devices.dtype,
                "side": self.devices.side,
                "flops": self.devices.flops.tolist(),
                "memory_bandwidth": self.devices.memory_bandwidth.tolist(),
            }
            content["all_at_once"] = {
                "matmul_flops": self.devices.matmul,
                "memory_bandwidth": self.devices.memory_rate,
            }
        return content
