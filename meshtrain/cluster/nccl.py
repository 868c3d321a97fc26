"""The algorithm that NCCL, which XLA calls on GPUs, runs for a collective: the cheapest of a few, each in three
protocols.

It knows them by a model of its own (NVIDIA/nccl, src/graph/tuning.cc of 2.28.7), whose constants stand here: seconds =
start + latencies of the steps + bytes / bandwidth. n ranks, m of them in each of B machines.

    algorithm   what for                          latencies                                    seconds (S bytes by W)
    ring        everything                        passes (n - B of a machine, B - 1 between)   passes S (n-1)/n / W
    tree        all-reduce                        2 (m - 1) of a machine, 2 log2 B between     2 S / 0.92 W
    NVLS        all-reduce in switches that sum   one of 25 µs                                 S / 0.75 W
    NVLS tree   the same, a tree between them     140 µs, and 2 log2 B between                 the same, or 2 S / W
                                                                                               between (S, B = 2)

    protocol    a message takes, in a machine, between (of a link's latency)    bandwidth
    LL          0.18, 0.19: flags beside 4 bytes of data, no fence              1/2, at most 88 GB/s in a machine,
                                                                                19 between (Ampere's)
    LL128       0.56, 0.29: flags beside 120 of 128 bytes                       0.92
    Simple      1, 1: fences                                                    1

Two figures are measured, where NCCL's own are far off: 0.75 (NVIDIA/nccl, issue 1455: 8 H100 sum 273 GB/s where their
ring carries 368) and 140 µs (two machines of 8 B200, dstack's documentation of clusters on GCP). Left out: its
correction of trees in the middle sizes, CollNet, which needs switches of a network that sum, and PAT, which its
constants never put before LL.

Against published runs of nccl-tests (`tests/cluster/test_nccl.py`) the median error is 6 to 24% by machine, the worst
51%: two machines are predicted too fast below 64 MiB, where measured networks have more latency than the InfiniBand
described here.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.cluster.topology import Group, Hop

INSIDE = ("island", "node")  # levels of NVLink, others are of a network
# of NVLS
SUMMED = 0.75
SUM_SECONDS = 25e-6
SUM_BETWEEN_SECONDS = 140e-6
TREE = 0.92  # of a link's bandwidth that trees reach


# Messages of an all-to-all, which is sends and receives of each with each, that are under way at once (NVIDIA/nccl,
# src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
AT_ONCE = 8


@dataclass(frozen=True)
class Protocol:
    """Times are in seconds, shares of a link's figures: of ring and tree, in a machine and between."""

    name: str
    ring_start: float
    tree_start: float
    ring_latency: tuple[float, float]
    tree_latency: tuple[float, float]
    ring_share: float
    tree_share: tuple[float, float]
    most: tuple[float, float] = (math.inf, math.inf)  # bytes/s


# Of the latencies for NVLink and network, in µs, each over that of a ring in Simple: 3.4 and 14.
PROTOCOLS = (
    Protocol(
        "LL",
        6.6e-6,
        6.8e-6,
        (0.6 / 3.4, 2.7 / 14),
        (0.6 / 3.4, 5 / 14),
        1 / 2,
        (1 / 3.8, 1 / 3.8),
        (87.7e9, 19e9),
    ),
    Protocol(
        "LL128",
        14e-6,
        14e-6,
        (1.9 / 3.4, 4 / 14),
        (1.25 / 3.4, 8.5 / 14),
        0.92,
        (7 / 9, 120 / 128),
    ),
    Protocol("Simple", 8.4e-6, 8.4e-6, (1.0, 1.0), (4 / 3.4, 1.0), 1.0, (1.0, 1.0)),
)


def costs(passes: int, group: Group, nbytes: float) -> Iterator[tuple[str, float]]:
    """(algorithm and protocol, seconds) of all that may run: two passes make an all-reduce, one a gather or a
    scatter.
    """
    n = group.size
    rate = group.bytes_per_second
    between = int(group.hops[-1].level not in INSIDE)
    steps = _ring_steps(group)
    depths = _tree_depths(group)
    for p in PROTOCOLS:
        bandwidth = min(rate * p.ring_share, p.most[between])
        latency = sum(s * h.latency * p.ring_latency[_is_between(h)] for s, h in steps)
        yield (
            f"ring {p.name}",
            p.ring_start + passes * (latency + nbytes * (n - 1) / n / bandwidth),
        )
        if passes == 2:
            bandwidth = min(rate * TREE * p.tree_share[between], p.most[between])
            latency = sum(
                s * h.latency * p.tree_latency[_is_between(h)] for s, h in depths
            )
            yield f"tree {p.name}", p.tree_start + 2 * (latency + nbytes / bandwidth)
    if passes == 2 and group.hops[0].sums:
        yield _summed(group, nbytes)


def direct(latency: float, seconds: float) -> float:
    """An all-to-all, of `algorithms.exchange`, in Simple: single messages are sent so from 16 KiB on
    (NCCL_P2P_LL_THRESHOLD).
    """
    return PROTOCOLS[-1].ring_start + latency / AT_ONCE + seconds


def _summed(group: Group, nbytes: float) -> tuple[str, float]:
    """NVLS in one machine, or in each with trees between them."""
    inner = group.hops[0]
    outer = [h for h in group.hops if _is_between(h)]
    if not outer:
        return "NVLS", SUM_SECONDS + nbytes / (SUMMED * inner.bytes_per_second)
    machines = math.prod(h.fan for h in outer)
    network = min(h.bytes_per_second * h.members for h in outer) / (
        1 if machines == 2 else 2
    )
    latency = 2 * sum(math.log2(h.fan) * h.latency for h in outer)
    return "NVLS tree", SUM_BETWEEN_SECONDS + latency + nbytes / min(
        SUMMED * inner.bytes_per_second, network
    )


def _is_between(hop: Hop) -> bool:
    return hop.level not in INSIDE


@functools.lru_cache(maxsize=4096)
def _ring_steps(group: Group) -> tuple[tuple[int, Hop], ...]:
    """Returns how many of the n - 1 steps of a ring go over each level: it enters every block once."""
    steps = []
    blocks = 1
    for hop in reversed(group.hops):
        steps.append((blocks * (hop.fan - 1), hop))
        blocks *= hop.fan
    return tuple(steps)


@functools.lru_cache(maxsize=4096)
def _tree_depths(group: Group) -> tuple[tuple[float, Hop], ...]:
    """Returns how much of a tree's depth goes over each level: a chain in a machine, a binary tree of machines."""
    return tuple(
        (math.log2(h.fan) if _is_between(h) else h.fan - 1, h) for h in group.hops
    )
