"""The four strategies, and what makes one packing better than another: the goal, a higher priority before a lower one.

The search begins with what the three rules give, and tries other orders of jobs of one priority, other shapes of a job
and other rules: all of them where they are few, else a walk that never takes a worse one (hill climbing, Russell &
Norvig, section 4.1) from seeded random changes. It is bounded by the number of packings and not by a clock, so that the
same input gives the same output.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from meshtrain.plan.jobs.listed import Jobs
from meshtrain.plan.jobs.packing import RULES, Order, Packer, Packing

STRATEGIES = (*RULES, "search")
MOST_PACKINGS = 2000
LEAST_PACKINGS = 50
WORK = 400_000  # jobs x nodes that all packings of a search may look at: a few seconds

Score = tuple[float, ...]


def strategies(packer: Packer, jobs: Jobs) -> dict[str, Packing]:
    """The packing of each strategy."""
    packings = {rule: packer.pack(packer.usual(rule)) for rule in RULES}
    best = Search(packer, jobs.goal, jobs.seed).best(list(packings.values()))
    return packings | {"search": packer.pack(best)}


def score(packing: Packing, goal: str) -> Score:
    """Returns how good a packing is, as far as it is known now; larger is better.

    The goal's figure of each priority counts first, highest priority first; then the other goals, fewer nodes a job,
    and larger free blocks.
    """
    priorities = sorted(
        {request.job.priority for request in packing.requests}, reverse=True
    )
    figures = {"utilisation": _busy, "throughput": _tokens, "latency": _done}
    by_priority = [
        part for priority in priorities for part in figures[goal](packing, priority)
    ]
    spread = sum(placed.shape.nodes for placed in packing.now)
    return (
        *by_priority,
        *_busy(packing),
        *_tokens(packing),
        -spread,
        -packing.fragmentation,
    )


def _busy(packing: Packing, priority: int | None = None) -> Score:
    return (
        sum(
            p.shape.devices
            for p in packing.now
            if priority in (None, p.request.job.priority)
        ),
    )


def _tokens(packing: Packing, priority: int | None = None) -> Score:
    chosen = [p.plan for p in packing.now if priority in (None, p.request.job.priority)]
    return (math.fsum(plan.tokens_per_second for plan in chosen if plan),)


def _done(packing: Packing, priority: int) -> Score:
    ends = sorted(p.end for p in packing.placed if p.request.job.priority == priority)
    return (len(ends), -math.fsum(ends), -ends[-1] if ends else 0.0)


class Search:
    """A search for the best order of a packer's jobs."""

    def __init__(self, packer: Packer, goal: str, seed: int) -> None:
        self.packer = packer
        self.goal = goal
        self.random = random.Random(seed)
        size = max(1, len(packer.sort_by_priority())) * packer.cluster.nodes
        self.most = max(LEAST_PACKINGS, min(MOST_PACKINGS, WORK // size))

    def best(self, begun: list[Packing]) -> Order:
        """The best order that is found; no packing that was begun with is better."""
        scores = [(score(packing, self.goal), packing.order) for packing in begun]
        top, best = max(scores, key=lambda pair: pair[0])
        for order in self._all() if self._count() <= self.most else ():
            if (found := self._score(order)) > top:
                top = found
                best = order
        for _ in range(self.most * (self._count() > self.most)):
            order = self._changed(best)
            # What is as good is taken too: a better one may lie behind it.
            if (found := self._score(order)) >= top:
                top = found
                best = order
        return best

    def _score(self, order: Order) -> Score:
        return score(self.packer.pack(order, later=self.goal == "latency"), self.goal)

    def _classes(self) -> list[list[int]]:
        """The jobs of each priority, highest first."""
        priority = [request.job.priority for request in self.packer.requests]
        return [
            list(group)
            for _, group in itertools.groupby(
                self.packer.sort_by_priority(), key=lambda n: priority[n]
            )
        ]

    def _count(self) -> int:
        shapes = math.prod(
            len(self.packer.requests[n].shapes) for n in self.packer.sort_by_priority()
        )
        return (
            shapes
            * len(RULES)
            * math.prod(math.factorial(len(group)) for group in self._classes())
        )

    def _all(self) -> Iterator[Order]:
        orders = itertools.product(
            *(itertools.permutations(group) for group in self._classes())
        )
        for classes in orders:
            jobs = tuple(itertools.chain.from_iterable(classes))
            for first in itertools.product(
                *(range(max(1, len(r.shapes))) for r in self.packer.requests)
            ):
                yield from (Order(jobs, first, rule) for rule in RULES)

    def _changed(self, order: Order) -> Order:
        """One or two random changes."""
        for _ in range(self.random.choice((1, 1, 2))):
            order = self._change(order)
        return order

    def _change(self, order: Order) -> Order:
        kind = self.random.random()
        if kind < 0.1:
            return replace(order, rule=self.random.choice(list(RULES)))
        at = self.random.randrange(len(order.jobs))
        job = order.jobs[at]
        requests = self.packer.requests
        if kind < 0.3 and len(requests[job].shapes) > 1:
            first = self.random.randrange(len(requests[job].shapes))
            return replace(
                order, first=(*order.first[:job], first, *order.first[job + 1 :])
            )
        like = [
            n
            for n, other in enumerate(order.jobs)
            if requests[other].job.priority == requests[job].job.priority
        ]
        to = self.random.choice(like)
        jobs = [other for other in order.jobs if other != job]
        return replace(order, jobs=(*jobs[:to], job, *jobs[to:]))
