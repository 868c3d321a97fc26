"""What a collective costs, in the alpha-beta model: alpha seconds a message, beta seconds a byte.

S is the size of the whole array: what an all-reduce sums, what an all-gather ends with, what a reduce-scatter begins with.
n devices, k = ceil(log2 n).

    all-reduce      steps      bytes that a device sends         source
    ring            2 (n-1)    2 S (n-1)/n                       Patarasuk & Yuan 2009
    butterfly       2 k        2 S (n-1)/n                       recursive halving and doubling, Thakur et al. 2005, section 4.5
    tree            2 k        2 S                               two binary trees, each half of S: Sanders et al. 2009; NCCL 2.4
    hierarchical    reduce-scatter inside the block of the lowest level, all-reduce of a share between blocks, all-gather inside

An all-gather or reduce-scatter is half of a ring, butterfly or hierarchical all-reduce; trees have no such half.

On GPUs the choice is NCCL's: `meshtrain.plan.cluster.nccl`. Elsewhere the cheapest of these is taken.
"""

import functools
import math
from dataclasses import dataclass

from meshtrain.plan.cluster import nccl
from meshtrain.plan.cluster.cluster import Group, Hop

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE = "all-reduce", "all-gather", "reduce-scatter", "permute"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE)


@dataclass(frozen=True)
class Cost:
    seconds: float
    algorithm: str


def sent(kind: str, size: int, nbytes: float) -> float:
    """Bytes that one of `size` devices sends, by the algorithms that send least."""
    if size == 1:
        return 0.0
    share = (size - 1) / size
    return nbytes * {ALL_REDUCE: 2 * share, ALL_GATHER: share, REDUCE_SCATTER: share, PERMUTE: 1.0}[kind]


def ring(kind: str, group: Group, nbytes: float) -> float:
    """A ring over all members; on a torus one ring for each direction of a dimension, which the bandwidth counts already."""
    n, passes = group.size, 2 if kind == ALL_REDUCE else 1
    return passes * ((n - 1) * group.latency + nbytes * (n - 1) / n / group.bytes_per_second)


def butterfly(kind: str, group: Group, nbytes: float) -> float:
    """Halving and doubling among 2^k ranks. What is beyond, up to as many again, hands all it has to one of them before and is
    given the result after, S and a step each time (Thakur et al. 2005, section 4.5).

    Its partners are 1, 2, 4, ... apart: on a torus their messages share links, n/8 to a link; on a dragonfly they are sent by way of a
    third group, which doubles the load (Kim et al. 2008, section 4)."""
    passes, k = 2 if kind == ALL_REDUCE else 1, group.size.bit_length() - 1
    n = 1 << k
    crossing = {"torus": max(1.0, n / 8), "dragonfly": 2.0}.get(group.topology, 1.0)
    folded = 0.0 if n == group.size else group.latency + nbytes / group.bytes_per_second
    return passes * (folded + k * group.latency + crossing * nbytes * (n - 1) / n / group.bytes_per_second)


def tree(kind: str, group: Group, nbytes: float) -> float:
    """Two binary trees, pipelined; only all-reduce. Members that share a block cross it once for all of them.

    On a torus an edge to a rank 2^l away passes all wires on the way, so that an edge of each of the k levels shares a wire (as if
    the ranks stood along one dimension)."""
    if kind != ALL_REDUCE:
        return math.inf
    k = math.ceil(math.log2(group.size))
    crossing = k if group.topology == "torus" else 1
    return 2 * k * group.latency + 2 * crossing * nbytes / group.bytes_per_second


def hierarchical(kind: str, group: Group, nbytes: float) -> float:
    """Level by level: inside the lowest block first, then each member with its like in the other blocks, on its share."""
    if len(group.hops) < 2:
        return math.inf
    passes, seconds, share = 2 if kind == ALL_REDUCE else 1, 0.0, float(nbytes)
    for hop in group.hops:
        seconds += _level(hop, passes, share)
        share /= hop.fan
    return seconds


def _level(hop: Hop, passes: int, nbytes: float) -> float:
    steps = min(hop.fan - 1, 2 * math.ceil(math.log2(hop.fan)))
    return passes * (steps * hop.latency + nbytes * (hop.fan - 1) / hop.fan / hop.bytes_per_second)


def permute(group: Group, nbytes: float) -> float:
    """One message to a neighbour, over the widest level that any of the neighbours must cross."""
    return group.latency + nbytes / min(h.bytes_per_second for h in group.hops)


ALGORITHMS = {"ring": ring, "butterfly": butterfly, "tree": tree, "hierarchical": hierarchical}


@functools.lru_cache(maxsize=65536)
def best(kind: str, group: Group, nbytes: float) -> Cost:
    """The cheapest algorithm for a collective of `nbytes` (S above) over a group."""
    if group.size == 1 or not group.hops:
        return Cost(0.0, "none")
    if kind == PERMUTE:
        return Cost(permute(group, nbytes), "direct")
    return min((Cost(seconds, name) for name, seconds in all_of(kind, group, nbytes).items()), key=lambda c: c.seconds)


def all_of(kind: str, group: Group, nbytes: float) -> dict[str, float]:
    """Seconds by algorithm, those that do not apply left out."""
    if group.library == "nccl":
        return dict(nccl.costs(2 if kind == ALL_REDUCE else 1, group, nbytes))
    costs = {name: f(kind, group, nbytes) for name, f in ALGORITHMS.items()}
    return {name: seconds for name, seconds in costs.items() if math.isfinite(seconds)}
