"""The cost of a collective in the alpha-beta model: alpha seconds a message, beta seconds a byte.

S is the size of the whole array: what an all-reduce sums, what an all-gather ends with, what a reduce-scatter and an
all-to-all begin with on a device. n devices, k = ceil(log2 n).

    all-reduce      steps    bytes that a device sends   source
    ring            2 (n-1)  2 S (n-1)/n                 Patarasuk & Yuan 2009
    butterfly       2 k      2 S (n-1)/n                 recursive halving and doubling, Thakur et al. 2005, section 4.5
    tree            2 k      2 S                         two binary trees, each half of S: Sanders et al. 2009; NCCL 2.4
    hierarchical    reduce-scatter inside the block of the lowest level, all-reduce of a share between blocks,
                    all-gather inside

An all-gather or reduce-scatter is half of a ring, butterfly or hierarchical all-reduce; trees have no such half. An
all-to-all has nothing to pass on: a device sends each other one its part of S/n, by itself.

    all-to-all      n-1      S (n-1)/n, each part over   pairwise exchange, Thakur et al. 2005, section 4.6
                             all levels between the two

On a torus whose dimensions are known, and on a hypercube, far partners share wires: `meshtrain.cluster.topology` counts
them. On GPUs the choice is NCCL's: `meshtrain.cluster.nccl`. Elsewhere the cheapest of these is taken.
"""

import functools
import math
from dataclasses import dataclass

from meshtrain.cluster import nccl
from meshtrain.cluster.topology import TORUS, Group, Load

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "permute"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE)


@dataclass(frozen=True)
class Cost:
    seconds: float
    algorithm: str


def sent(kind: str, size: int, nbytes: float) -> float:
    """Bytes that one of `size` devices sends, by the algorithms that send least."""
    if size == 1:
        return 0.0
    share = (size - 1) / size
    return nbytes * {ALL_REDUCE: 2 * share, PERMUTE: 1.0}.get(kind, share)


def ring(kind: str, group: Group, nbytes: float) -> float:
    """A ring over all members; on a torus one ring for each direction of a dimension, which the bandwidth counts
    already.
    """
    n = group.size
    passes = 2 if kind == ALL_REDUCE else 1
    if group.paths:
        return passes * _torus_seconds(group, group.paths.ring, nbytes)
    return passes * (
        (n - 1) * group.latency + nbytes * (n - 1) / n / group.bytes_per_second
    )


def butterfly(kind: str, group: Group, nbytes: float) -> float:
    """Halving and doubling among 2^k ranks.

    The ranks beyond, up to as many again, first hand all that they have to one of these and receive the result at the
    end: S and a step each time (Thakur et al. 2005, section 4.5).

    Its partners are 1, 2, 4, ... apart: on a torus their messages share links, n/8 to a link.
    """
    if group.paths:
        load = group.paths.butterfly
        if load:
            return (2 if kind == ALL_REDUCE else 1) * _torus_seconds(
                group, load, nbytes
            )
        return math.inf
    passes = 2 if kind == ALL_REDUCE else 1
    k = group.size.bit_length() - 1
    n = 1 << k
    crossing = max(1.0, n / 8) if group.topology == TORUS else 1.0
    folded = 0.0 if n == group.size else group.latency + nbytes / group.bytes_per_second
    return passes * (
        folded
        + k * group.latency
        + crossing * nbytes * (n - 1) / n / group.bytes_per_second
    )


def tree(kind: str, group: Group, nbytes: float) -> float:
    """Two binary trees, pipelined; only all-reduce. Members that share a block cross it once for all of them.

    On a torus an edge to a rank 2^l away passes all wires on the way. So an edge of each of the k levels shares a wire,
    as if the ranks stood along one dimension.
    """
    if kind != ALL_REDUCE:
        return math.inf
    if group.paths:
        return 2 * _torus_seconds(group, group.paths.tree, nbytes)
    k = math.ceil(math.log2(group.size))
    crossing = k if group.topology == TORUS else 1
    return 2 * k * group.latency + 2 * crossing * nbytes / group.bytes_per_second


def hierarchical(kind: str, group: Group, nbytes: float) -> float:
    """Level by level: inside the lowest block first, then each member with its like in the other blocks, on its
    share.
    """
    if len(group.hops) < 2:
        return math.inf
    passes = 2 if kind == ALL_REDUCE else 1
    seconds = 0.0
    share = float(nbytes)
    for hop in group.hops:
        steps = (
            hop.paths.ring.hops
            if hop.paths
            else min(hop.fan - 1, 2 * math.ceil(math.log2(hop.fan)))
        )
        seconds += passes * (
            steps * hop.latency + share * (hop.fan - 1) / hop.fan / hop.bytes_per_second
        )
        share /= hop.fan
    return seconds


def exchange(group: Group, nbytes: float) -> tuple[float, float]:
    """An all-to-all's (seconds of latency if one message follows the other, seconds of bytes), level by level.

    Nobody shares the work of crossing a level: what leaves a block is all that its members send to others. On a torus a
    message passes n/4 wires on its way along a ring of n, of which it has two directions: n/8 times as much as to a
    neighbour, if n is that large.
    """
    n = group.size
    inside = 1
    latency = 0.0
    seconds = 0.0
    for hop in group.hops:
        others = min(inside * hop.fan, n) - inside
        crossing = max(1.0, n / 8) if group.topology == TORUS else 1.0
        latency += others * (hop.latency + hop.detour)
        seconds += crossing * nbytes * others / n / hop.bytes_per_second * hop.slower
        inside += others
    return latency, seconds


def permute(group: Group, nbytes: float) -> float:
    """One message to a neighbour, over the widest level that any of the neighbours must cross, and on another rail if
    it stands there.
    """
    if group.paths:
        return _torus_seconds(group, group.paths.permute, nbytes)
    latency = max(h.latency + h.detour for h in group.hops)
    return latency + nbytes / min(h.bytes_per_second / h.slower for h in group.hops)


def _torus_seconds(group: Group, load: Load, nbytes: float) -> float:
    return load.hops * group.latency + load.load * nbytes / group.bytes_per_second


ALGORITHMS = {
    "ring": ring,
    "butterfly": butterfly,
    "tree": tree,
    "hierarchical": hierarchical,
}


@functools.lru_cache(maxsize=65536)
def best(kind: str, group: Group, nbytes: float) -> Cost:
    """The cheapest algorithm for a collective of `nbytes` (S above) over a group."""
    if group.size == 1 or not group.hops:
        return Cost(0.0, "none")
    if kind == PERMUTE:
        return Cost(permute(group, nbytes), "direct")
    return min(
        (Cost(seconds, name) for name, seconds in all_of(kind, group, nbytes).items()),
        key=lambda c: c.seconds,
    )


def all_of(kind: str, group: Group, nbytes: float) -> dict[str, float]:
    """Seconds by algorithm, those that do not apply left out."""
    if kind == ALL_TO_ALL:
        latency, seconds = exchange(group, nbytes)
        if group.library == "nccl":
            return {"direct": nccl.direct(latency, seconds)}
        return {"pairwise": latency + seconds}
    if group.library == "nccl":
        return dict(nccl.costs(2 if kind == ALL_REDUCE else 1, group, nbytes))
    costs = {name: f(kind, group, nbytes) for name, f in ALGORITHMS.items()}
    return {name: seconds for name, seconds in costs.items() if math.isfinite(seconds)}
