"""What can be found out about the machine at hand: matmul rate, memory bandwidth, latency and bandwidth between its devices.

Latency and bandwidth come from a line through the times of messages of several sizes: time = alpha + bytes / bandwidth.
"""

import functools
import os
import time as clock
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.mesh import platform

SIZES = (2**12, 2**16, 2**20, 2**23)  # bytes of a message
REPEATS = 5


@dataclass(frozen=True, eq=False)
class Measured:
    """Figures of this machine; matrices are [devices, devices], of messages from row to column, diagonal 0."""

    platform: str  # cpu, gpu or tpu
    kind: str
    devices: int
    matmul: dict[str, float]  # FLOP/s of one device by dtype
    memory_bandwidth: float  # bytes/s of one device
    memory_bytes: float
    latency: np.ndarray  # seconds
    bandwidth: np.ndarray  # bytes/s
    all_reduce_latency: float
    all_reduce_bandwidth: float  # bytes of the array a second, all devices

    def to_text(self) -> str:
        """The figures for people, with the matrices of messages between devices."""
        rates = ", ".join(f"{dtype} {rate / 1e9:.4g} GFLOP/s" for dtype, rate in self.matmul.items())
        lines = [f"{self.devices} x {self.kind}, each: {rates}; memory {self.memory_bandwidth / 1e9:.3g} GB/s"]
        if self.devices > 1:
            lines.append(
                f"all-reduce over all: {self.all_reduce_latency * 1e6:.3g} µs + bytes / {self.all_reduce_bandwidth / 1e9:.3g} GB/s"
            )
            for title, matrix, unit in (
                ("latency in µs", self.latency, 1e6),
                ("bandwidth in GB/s", self.bandwidth, 1e-9),
            ):
                lines.append(f"{title}, from row to column:")
                lines += [" ".join(f"{value * unit:8.3g}" for value in row) for row in matrix.tolist()]
        return "\n".join(lines)

    def to_yaml(self) -> str:
        """A cluster description with what was measured; the rest keeps its defaults."""
        off = ~np.eye(self.devices, dtype=bool)
        links = {}
        if self.devices > 1:
            alpha, beta = float(np.median(self.latency[off])), float(np.median(self.bandwidth[off]))
            links = {"node": {"devices": self.devices, "latency": _short(alpha), "bandwidth": _short(beta / 1e9)}}
        fake = self.platform == "cpu"
        ways = self.devices if fake else 1  # fake devices share one machine, whose figures the description gives
        described = {
            "name": f"measured-{self.kind}",
            "nodes": 1,
            "devices_per_node": self.devices,
            "shared": fake,
            "topology": "flat",
            "accelerator": {
                "name": self.kind,
                "platform": self.platform,
                "memory": _short(self.memory_bytes * ways / 2**30),
                "bandwidth": _short(self.memory_bandwidth * ways / 1e9),
                "peak": {dtype: _short(rate * ways / 1e12) for dtype, rate in self.matmul.items()},
                "efficiency": {
                    "matmul": 1.0, "half_size": 0.0, "attention": 0.5, "memory": 1.0, "link": 1.0, "exposed": 1.0,
                },
            },
            "links": links,
        }  # fmt: skip
        return yaml.safe_dump(described, sort_keys=False)


def measure(devices: list[jax.Device] | None = None, side: int = 1024) -> Measured:
    """Measures the given devices, else all that JAX sees. Takes some seconds; the machine should be idle.

    All devices compute at once, since fake ones share their cores. `side` is of the matrices that are multiplied.
    """
    devices = devices or jax.devices()
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    stats = devices[0].memory_stats() or {}
    where = platform(mesh)
    kind = "cpu" if where == "cpu" else devices[0].device_kind.lower().replace(" ", "-")
    latency, bandwidth = _between(mesh)
    all_reduce = _line([(size, _all_reduce(mesh, size)) for size in SIZES]) if len(devices) > 1 else (0.0, 0.0)
    return Measured(
        platform=where,
        kind=kind,
        devices=len(devices),
        matmul={dtype: _matmul(mesh, side, dtype) for dtype in ("float32", "bfloat16", "float16")},
        memory_bandwidth=_memory(mesh),
        memory_bytes=float(stats.get("bytes_limit", 0)) or _host_memory() / len(devices),
        latency=latency,
        bandwidth=bandwidth,
        all_reduce_latency=all_reduce[0],
        all_reduce_bandwidth=all_reduce[1],
    )


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _best(run: Callable[[], jax.Array]) -> float:
    """Shortest of a few runs, after one to compile."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        start = clock.perf_counter()
        jax.block_until_ready(run())
        times.append(clock.perf_counter() - start)
    return min(times)


def _everywhere(mesh: Mesh, function: Callable, out: PartitionSpec) -> Callable:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("all"), out_specs=out))


def _array(mesh: Mesh, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Ones of `shape` on every device."""
    whole = (mesh.size * shape[0], *shape[1:])
    return jax.jit(lambda: jnp.ones(whole, dtype), out_shardings=NamedSharding(mesh, PartitionSpec("all")))()


def _matmul(mesh: Mesh, side: int, dtype: str) -> float:
    chain = 4  # products, so that the start of a program does not count
    x = _array(mesh, (side, side), dtype)

    def products(a: jax.Array) -> jax.Array:
        y = a
        for _ in range(chain):
            y = (y @ a) * (1 / side)
        return y

    run = _everywhere(mesh, products, PartitionSpec("all"))
    return chain * 2 * side**3 / _best(lambda: run(x))


def _memory(mesh: Mesh, elements: int = 2**24) -> float:
    passes = 8  # over memory that is there already: pages that are touched for the first time would count several times
    x = _array(mesh, (elements,))

    def scaled(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, passes, lambda _, a: a * 0.5, a)

    run = _everywhere(mesh, scaled, PartitionSpec("all"))
    return passes * 2 * 4 * elements / _best(lambda: run(x))


def _all_reduce(mesh: Mesh, nbytes: int) -> float:
    x = _array(mesh, (nbytes // 4,))
    run = _everywhere(mesh, lambda a: jax.lax.psum(a, "all"), PartitionSpec())
    return _best(lambda: run(x))


def _between(mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Latency and bandwidth of a message between each pair, one pair at a time."""
    n = mesh.size
    latency, bandwidth = np.zeros((n, n)), np.zeros((n, n))
    for source in range(n):
        for target in range(source + 1, n):
            times = []
            for size in SIZES:
                x = _array(mesh, (size // 4,))

                def send(a: jax.Array, s: int = source, t: int = target) -> jax.Array:
                    return jax.lax.ppermute(a, "all", [(s, t)])

                run = _everywhere(mesh, send, PartitionSpec("all"))
                times.append((size, _best(functools.partial(run, x))))
            alpha, beta = _line(times)
            latency[source, target] = latency[target, source] = alpha
            bandwidth[source, target] = bandwidth[target, source] = beta
    return latency, bandwidth


def _line(times: list[tuple[int, float]]) -> tuple[float, float]:
    """(latency, bytes/s) of the line through (bytes, seconds), small messages weighing as much as large ones. Where chance made a large
    message no slower than a small one, no line tells the bandwidth, and it is that of the largest alone."""
    sizes, seconds = np.array(times, float).T
    weights = 1 / seconds
    design = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    alpha, beta = np.linalg.lstsq(design, seconds * weights, rcond=None)[0]
    return max(float(alpha), 0.0), float(1 / beta if beta > 0 else sizes[-1] / seconds[-1])
