"""Algorithms of an all-reduce by name: the values of `parallel.reduce.algorithm`, when each is legal, and its cost in
the alpha-beta model.

    psum                what XLA and NCCL choose
    S bytes, n devices  steps                the busiest sends       time of a step                      scatters
    ring                2 (n-1)              2 S (n-1)/n             S/n over the slowest link           yes
    two_way_ring        2 floor(n/2)         2 S (n-1)/n, both ways  the same, but 2 S/n out of a device yes
    halving_doubling    2 log2 n             2 S (n-1)/n             S d/n to partners d = n/2 ... 1     for n = 2^k
    double_tree         4 (p + log2 n)       2 S, in p pieces        S/2p over the slowest link          no
    hierarchical        those of two rings   2 S (n-1)/n             a ring in an island, one across     the ring's

**On average over the devices all of them send 2 S (n-1)/n bytes**: each number is added n - 1 times, for which n - 1
messages must bring it, and n - 1 must take the sum to the others. They differ in who sends, how far, and in how many
steps. A step costs its latency: where arrays are small few steps win, where they are large the bytes of the busiest
device do.

NCCL lays many rings and trees through a machine, so that all of its network cards carry a part. A program of ours is
one: where a ring of 512 devices leaves a machine, one device's card carries all of it. Halving-doubling and the
hierarchical program use every card.

One from outside: `ALGORITHMS.register(Algorithm("mine", programs=..., seconds=...))` before the config is loaded. No
JAX here.
"""

import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshtrain.registry import Registry

TREES = 2
# bytes that are worth a message of their own; pieces beyond which a program grows long
PIECE = 2**18
MOST_PIECES = 16


Links = Any  # devices and what joins them: `cluster.Group`


@dataclass(frozen=True)
class Algorithm:
    """One way to sum over devices.

    programs: () -> its JAX programs (`parallel.reduce.algorithms.Programs`); None: XLA's own collectives.
    seconds: (links, nbytes) -> time of one pass, a reduce-scatter or an all-gather; an all-reduce takes two.
    no_scatter: (devices) -> why it has no reduce-scatter among so many, or nothing; `instead` has one.
    by_levels: it sums inside islands first; `seconds` is that of one level.
    """

    name: str
    programs: Callable[[], Any] | None = None
    seconds: Callable[[Links, float], float] | None = None
    no_scatter: Callable[[int], str] = lambda devices: ""
    instead: str = "ring"
    by_levels: bool = False


def pieces_of(nbytes: int) -> int:
    """Pieces into which the double tree cuts each half of an array of so many bytes."""
    return min(max(nbytes // (TREES * PIECE), 1), MOST_PIECES)


def _ring(links: Links, nbytes: float) -> float:
    n = links.size
    return (n - 1) * (links.latency + nbytes / n / _slowest(links))


def _two_way_ring(links: Links, nbytes: float) -> float:
    """The two messages of a step leave a device together, and a machine by two devices."""
    n = links.size
    rate = min(_slowest(links), links.hops[0].bytes_per_second / 2)
    return (n // 2) * (links.latency + nbytes / n / rate)


def _halving_doubling(links: Links, nbytes: float) -> float:
    members = 1 << (links.size.bit_length() - 1)
    total = 0.0
    distance = 1
    while distance < members:
        hop = next(
            (h for h in links.hops if distance < h.members * h.fan), links.hops[-1]
        )
        total += hop.latency + nbytes * distance / members / hop.bytes_per_second
        distance *= 2
    return total + (
        0.0 if members == links.size else links.latency + nbytes / _slowest(links)
    )


def _double_tree(links: Links, nbytes: float) -> float:
    pieces = pieces_of(int(nbytes))
    return (
        2
        * (pieces + math.log2(links.size))
        * (links.latency + nbytes / (TREES * pieces) / _slowest(links))
    )


def _slowest(links: Links) -> float:
    """Bytes a second of one device over the level where it has least."""
    return min((hop.bytes_per_second for hop in links.hops), default=math.inf)


def _only_powers_of_two(devices: int) -> str:
    if devices & (devices - 1):
        return "whose reduce-scatter is for powers of two"
    return ""


def _late(programs: str) -> Callable[[], Any]:
    """`module:NAME`, imported when a program of it is traced."""
    return lambda: pkgutil.resolve_name(programs)


ALGORITHMS = Registry(
    Algorithm("psum"),
    Algorithm("ring", _late("meshtrain.parallel.reduce.algorithms:RING"), _ring),
    Algorithm(
        "two_way_ring",
        _late("meshtrain.parallel.reduce.algorithms:TWO_WAY_RING"),
        _two_way_ring,
    ),
    Algorithm(
        "halving_doubling",
        _late("meshtrain.parallel.reduce.algorithms:HALVING_DOUBLING"),
        _halving_doubling,
        no_scatter=_only_powers_of_two,
        instead="two_way_ring",
    ),
    Algorithm(
        "double_tree",
        _late("meshtrain.parallel.reduce.double_tree:DOUBLE_TREE"),
        _double_tree,
        no_scatter=lambda devices: (
            "which ends at the roots of its trees and has no reduce-scatter"
        ),
    ),
    Algorithm(
        "hierarchical",
        _late("meshtrain.parallel.reduce.algorithms:HIERARCHICAL"),
        _ring,
        by_levels=True,
    ),
)
