"""What our own programs of messages cost (`meshtrain.parallel.reduce.algorithms`), in the alpha-beta model.

NCCL lays many rings and trees through a machine, so that all of its network cards carry a part. A program of ours is one: where a ring
of 512 devices leaves a machine, one device's card carries all of it. Halving-doubling and the hierarchical program use every card.

    S bytes on n devices    steps, of                                                     per step
    ring                    2 (n-1)            S/n over the slowest link
    two-way ring            2 floor(n/2)       S/n over the slowest link, 2 S/n out of a device
    halving-doubling        2 log2 n           S d/n over the level of partners d apart, d = n/2 ... 1
    double tree             4 (p + log2 n)     S/2p over the slowest link
    hierarchical            those of a ring in an island with S, and of one across islands with its share
"""

import math
from collections.abc import Callable, Sequence

from meshtrain.config import MeshConfig
from meshtrain.parallel.reduce.algorithms.trees import TREES, pieces_of
from meshtrain.plan.cluster.algorithms import ALL_REDUCE, REDUCE_SCATTER, best
from meshtrain.plan.cluster.cluster import Cluster, Group


def seconds(algorithm: str, kind: str, axes: Sequence[str], mesh: MeshConfig, cluster: Cluster, nbytes: float) -> float:
    """Of an all-reduce, or one of its halves, of `nbytes` over the mesh axes, by the program that `parallel.reduce.algorithm` names."""
    if algorithm == "psum":
        return best(kind, cluster.axis("+".join(axes), mesh), nbytes).seconds
    if algorithm == "hierarchical" and len(axes) == 2:
        across, inside = (cluster.axis(axis, mesh) for axis in axes)
        halves = 2 * ring(REDUCE_SCATTER, inside, nbytes)
        return halves + ring(ALL_REDUCE, across, nbytes / inside.size)
    group = cluster.axis("+".join(axes), mesh)
    return PROGRAMS[algorithm](kind, group, nbytes) if group.size > 1 else 0.0


def ring(kind: str, group: Group, nbytes: float) -> float:
    n = group.size
    return _passes(kind) * (n - 1) * (group.latency + nbytes / n / _slowest(group))


def two_way_ring(kind: str, group: Group, nbytes: float) -> float:
    """The two messages of a step leave a device together, and a machine by two devices."""
    n = group.size
    rate = min(_slowest(group), group.hops[0].bytes_per_second / 2)
    return _passes(kind) * (n // 2) * (group.latency + nbytes / n / rate)


def halving_doubling(kind: str, group: Group, nbytes: float) -> float:
    members = 1 << (group.size.bit_length() - 1)
    total, distance = 0.0, 1
    while distance < members:
        hop = next((h for h in group.hops if distance < h.members * h.fan), group.hops[-1])
        total += hop.latency + nbytes * distance / members / hop.bytes_per_second
        distance *= 2
    folded = 0.0 if members == group.size else group.latency + nbytes / _slowest(group)
    return _passes(kind) * (total + folded)


def double_tree(kind: str, group: Group, nbytes: float) -> float:
    pieces = pieces_of(int(nbytes))
    steps = 2 * (pieces + math.log2(group.size))
    return _passes(kind) * steps * (group.latency + nbytes / (TREES * pieces) / _slowest(group))


PROGRAMS: dict[str, Callable[[str, Group, float], float]] = {
    "ring": ring,
    "two_way_ring": two_way_ring,
    "halving_doubling": halving_doubling,
    "double_tree": double_tree,
    # Over islands alone, or within one, it is a ring.
    "hierarchical": ring,
}


def _passes(kind: str) -> int:
    return 2 if kind == ALL_REDUCE else 1


def _slowest(group: Group) -> float:
    """Bytes a second of one device over the level where it has least."""
    return min((hop.bytes_per_second for hop in group.hops), default=math.inf)
