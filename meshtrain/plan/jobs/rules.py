"""Which nodes a job is given: first fit, best fit, balance. Pure functions of the free devices of every node.

    first fit   the nodes of the lowest numbers that have room
    best fit    the block of links that is left with least, lowest level first; in it the fullest nodes that have room
    balance     the emptiest nodes

First fit and best fit are bin packing's (Johnson et al. 1974), with blocks of links as the bins of jobs of several nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.jobs.ways import Way, first_block

Nodes = list[int]


@dataclass(frozen=True)
class Blocks:
    """Nodes by block of links, level by level, the lowest first; all nodes are the last level's one block."""

    levels: tuple[tuple[range, ...], ...]

    @property
    def lowest(self) -> tuple[range, ...]:
        return self.levels[0]


def blocks_of(cluster: Cluster) -> Blocks:
    """The blocks of nodes that a cluster's links make. A block of a fraction of a node is not looked at."""
    nodes, sizes = cluster.nodes, list[int]()
    for _, link in cluster.levels():
        size = link.devices // cluster.devices_per_node
        if first_block(cluster) <= size < nodes:
            sizes.append(size)
    return Blocks(tuple(tuple(range(at, min(at + size, nodes)) for at in range(0, nodes, size)) for size in [*sizes, nodes]))  # fmt: skip


def first_fit(way: Way, free: Sequence[int], blocks: Blocks, together: bool) -> Nodes | None:
    """Free devices by node -> the nodes, or None if there is no room; so do the others."""
    for block in blocks.lowest if together else blocks.levels[-1]:
        if (found := _room(way, free, block))[way.nodes - 1 :]:
            return found[: way.nodes]
    return None


def best_fit(way: Way, free: Sequence[int], blocks: Blocks, together: bool) -> Nodes | None:
    if way.nodes == 1:
        room = _room(way, free, blocks.levels[-1][0])
        return [min(room, key=lambda n: (free[n], n))] if room else None
    for level in (blocks.lowest,) if together else blocks.levels:
        fitting = [block for block in level if len(_room(way, free, block)) >= way.nodes]
        if fitting:
            tightest = min(fitting, key=lambda block: (sum(free[n] for n in block), block.start))
            return sorted(sorted(_room(way, free, tightest), key=lambda n: (free[n], n))[: way.nodes])
    return None


def balance(way: Way, free: Sequence[int], blocks: Blocks, together: bool) -> Nodes | None:
    level = blocks.lowest if together else blocks.levels[-1]
    fitting = [block for block in level if len(_room(way, free, block)) >= way.nodes]
    if not fitting:
        return None
    emptiest = min(fitting, key=lambda block: (-sum(free[n] for n in block), block.start))
    return sorted(sorted(_room(way, free, emptiest), key=lambda n: (-free[n], n))[: way.nodes])


def _room(way: Way, free: Sequence[int], block: range) -> Nodes:
    return [node for node in block if free[node] >= way.each]


Rule = Callable[[Way, Sequence[int], Blocks, bool], Nodes | None]
RULES: dict[str, Rule] = {"first_fit": first_fit, "best_fit": best_fit, "balance": balance}
