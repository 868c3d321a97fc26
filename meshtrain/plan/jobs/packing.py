"""Jobs placed one after the other by a rule, over time, and what comes of it.

    first fit   the nodes of the lowest numbers that have room
    best fit    the block of links that is left with least, lowest level first; in it the fullest nodes that have room
    balance     the emptiest nodes

First fit and best fit are bin packing's (Johnson et al. 1974), with blocks of links as the bins of jobs of several
nodes.

Jobs of a higher priority are tried first, those of one priority in their order. When a job ends, all that still wait
are tried again: one that has no room does not hold up those behind it (backfilling), and nobody who runs is stopped.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from meshtrain.cluster.cluster import Cluster
from meshtrain.plan.estimate import Plan
from meshtrain.plan.jobs.requests import (
    JobRequest,
    JobShape,
    Speeds,
    first_block,
    hours,
)

Nodes = list[int]
Numbers = tuple[int, ...]
Free = Sequence[int]  # devices of each node


@dataclass(frozen=True)
class Blocks:
    """Nodes by block of links, level by level, the lowest first; all nodes are the last level's one block."""

    levels: tuple[tuple[range, ...], ...]

    @property
    def lowest(self) -> tuple[range, ...]:
        return self.levels[0]


def blocks_of(cluster: Cluster) -> Blocks:
    """The blocks of nodes that a cluster's links make. A block of a fraction of a node is not looked at."""
    nodes = cluster.nodes
    lowest = first_block(cluster)
    sizes = [link.devices // cluster.devices_per_node for _, link in cluster.levels()]
    sizes = [*(size for size in sizes if lowest <= size < nodes), nodes]
    return Blocks(
        tuple(
            tuple(range(at, min(at + size, nodes)) for at in range(0, nodes, size))
            for size in sizes
        )
    )


def first_fit(
    shape: JobShape, free: Free, blocks: Blocks, together: bool
) -> Nodes | None:
    """The nodes for a job, of the free devices by node, or None if there is no room; so do the others."""
    for block in blocks.lowest if together else blocks.levels[-1]:
        if len(room := _room(shape, free, block)) >= shape.nodes:
            return room[: shape.nodes]
    return None


def best_fit(
    shape: JobShape, free: Free, blocks: Blocks, together: bool
) -> Nodes | None:
    levels = (
        blocks.levels[-1:]
        if shape.nodes == 1
        else blocks.levels[:1]
        if together
        else blocks.levels
    )
    return next(
        (
            nodes
            for level in levels
            if (nodes := _chosen(shape, free, level, fullest=True))
        ),
        None,
    )


def balance(
    shape: JobShape, free: Free, blocks: Blocks, together: bool
) -> Nodes | None:
    return _chosen(
        shape, free, blocks.lowest if together else blocks.levels[-1], fullest=False
    )


def _room(shape: JobShape, free: Free, block: range) -> Nodes:
    return [node for node in block if free[node] >= shape.each]


def _chosen(
    shape: JobShape, free: Free, level: Sequence[range], fullest: bool
) -> Nodes | None:
    """The fullest or emptiest nodes of the fullest or emptiest block of a level, of those with room."""
    sign = 1 if fullest else -1
    fitting = [
        block for block in level if len(_room(shape, free, block)) >= shape.nodes
    ]
    if not fitting:
        return None
    block = min(
        fitting, key=lambda block: (sign * sum(free[n] for n in block), block.start)
    )
    return sorted(
        sorted(_room(shape, free, block), key=lambda n: (sign * free[n], n))[
            : shape.nodes
        ]
    )


Rule = Callable[[JobShape, Free, Blocks, bool], Nodes | None]
RULES: dict[str, Rule] = {
    "first_fit": first_fit,
    "best_fit": best_fit,
    "balance": balance,
}


@dataclass(frozen=True)
class Order:
    """Decides a packing: the jobs by number, which of its shapes each tries first, and the rule."""

    jobs: Numbers
    first: Numbers  # by number of the job
    rule: str


@dataclass(frozen=True, eq=False)
class PlacedJob:
    """A job where it lies. Times in hours from now; the end is infinite where nobody knows it."""

    request: JobRequest
    shape: JobShape
    devices: Numbers  # numbered through all nodes, node by node
    start: float
    end: float
    plan: Plan | None

    def group_by_node(self, per_node: int) -> dict[int, Numbers]:
        """Devices of each node, numbered in the node."""
        nodes: dict[int, Numbers] = {}
        for device in self.devices:
            nodes[device // per_node] = (
                *nodes.get(device // per_node, ()),
                device % per_node,
            )
        return nodes


@dataclass(frozen=True, eq=False)
class Packing:
    """Who lies where, and who nowhere."""

    cluster: Cluster
    requests: Sequence[JobRequest]
    placed: tuple[PlacedJob, ...]
    order: Order = field(repr=False)

    @property
    def now(self) -> tuple[PlacedJob, ...]:
        """Jobs that run at once."""
        return tuple(placed for placed in self.placed if placed.start == 0)

    @property
    def free(self) -> list[int]:
        """Devices that are free now, by node."""
        per_node = self.cluster.devices_per_node
        left = [per_node] * self.cluster.nodes
        for placed in self.now:
            for device in placed.devices:
                left[device // per_node] -= 1
        return left

    @property
    def utilisation(self) -> float:
        """Share of the devices that is busy now."""
        return 1 - sum(self.free) / self.cluster.devices

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free devices, now.

        A block is what a job could have without a neighbour on its nodes' devices: the free devices of one node, or all
        nodes that are free as a whole. 0 where nothing is free.
        """
        free = self.free
        per_node = self.cluster.devices_per_node
        if sum(free):
            return 1 - max(max(free), free.count(per_node) * per_node) / sum(free)
        return 0.0

    @property
    def balance(self) -> float:
        """1 - standard deviation / mean of the nodes' load now; 1 where all are idle.

        It is below 0 where few nodes have all of it.
        """
        load = [self.cluster.devices_per_node - left for left in self.free]
        return 1 - pstdev(load) / fmean(load) if any(load) else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all that run now and have a config."""
        return sum(placed.plan.tokens_per_second for placed in self.now if placed.plan)

    @property
    def ends(self) -> list[float]:
        """Hours until each job is done that fits the cluster and of which one knows how long it takes; infinite where
        it waits for one of which nobody knows.
        """
        there = {placed.request.job.name for placed in self.placed}
        waiting = [
            math.inf
            for request in self.requests
            if request.shapes and request.job.name not in there
        ]
        return [placed.end for placed in self.placed if placed.end < math.inf] + waiting

    @property
    def mean_hours(self) -> float:
        return fmean(self.ends) if self.ends else math.inf

    @property
    def last_hours(self) -> float:
        return max(self.ends, default=math.inf)


class Packer:
    """Packs one list of requests on one cluster, again and again."""

    def __init__(
        self, cluster: Cluster, requests: Sequence[JobRequest], speeds: Speeds
    ) -> None:
        self.cluster = cluster
        self.requests = requests
        self.speeds = speeds
        self.blocks: Blocks = blocks_of(cluster)

    def sort_by_priority(self) -> Numbers:
        """The jobs that have a shape, by priority and then in their order."""
        fitting = (
            number for number, request in enumerate(self.requests) if request.shapes
        )
        return tuple(
            sorted(fitting, key=lambda number: -self.requests[number].job.priority)
        )

    def usual(self, rule: str) -> Order:
        return Order(self.sort_by_priority(), (0,) * len(self.requests), rule)

    def pack(self, order: Order, later: bool = True) -> Packing:
        """Places the jobs in an order; with `later` those too that have to wait for others to end."""
        per_node = self.cluster.devices_per_node
        free = [list(range(per_node)) for _ in range(self.cluster.nodes)]
        waiting = list(order.jobs)
        placed = list[PlacedJob]()
        running: list[tuple[float, int]] = []
        now = 0.0
        while True:
            for number in list(waiting):
                if (job := self._place(number, order, free, now)) is None:
                    continue
                waiting.remove(number)
                if job.end < math.inf:
                    heapq.heappush(running, (job.end, len(placed)))
                placed.append(job)
            if not (later and waiting and running):
                return Packing(self.cluster, self.requests, tuple(placed), order)
            now = running[0][0]
            # All that end together leave before somebody is let in.
            while running and running[0][0] == now:
                for device in placed[heapq.heappop(running)[1]].devices:
                    free[device // per_node].append(device % per_node)
            for left in free:
                left.sort()

    def _place(
        self, number: int, order: Order, free: list[list[int]], now: float
    ) -> PlacedJob | None:
        request = self.requests[number]
        first = order.first[number]
        counts = [len(left) for left in free]
        rule = RULES[order.rule]
        for shape in (
            request.shapes[first],
            *request.shapes[:first],
            *request.shapes[first + 1 :],
        ):
            nodes = rule(shape, counts, self.blocks, request.job.together)
            if nodes is None:
                continue
            per_node = self.cluster.devices_per_node
            devices = tuple(
                node * per_node + device
                for node in nodes
                for device in free[node][: shape.each]
            )
            for node in nodes:
                del free[node][: shape.each]
            plan = self.speeds.plan_on(shape, devices)
            return PlacedJob(
                request, shape, devices, now, now + hours(request.job, plan), plan
            )
        return None
