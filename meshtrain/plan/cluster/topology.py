"""Shapes of networks: what each needs in a cluster file, and what messages meet on the way.

    topology         the file says besides its levels     what it changes                                          source
    flat             nothing                              nothing: every message has its way to itself
    fat_tree         links.LEVEL.oversubscription: 2      a device's share of the way into that level is 1/2       Leiserson 1985; Al-Fares et al.
                                                                                                                   2008, section 2.1
    rail_optimised   between_rails: node | spine          a switch joins the devices of one number in their        Wang et al. 2023, section 2
                                                          nodes; to others it goes over NVLink first, or the spine
    dragonfly        nothing: groups are the blocks       a block that talks to one other has 1/(g-1) of its       Kim et al. 2008, sections 3, 4
                     below the highest level, g of them   links there, or half of all by way of third blocks
    torus            dimensions: [4, 4, 8]                rings along dimensions; far partners share wires         Dally & Towles 2004, chapter 5
    hypercube        nothing                              a torus whose dimensions are all 2                       Saad & Schultz 1988

A torus has its last dimension's neighbours next to each other in the numbering, as `mesh.order` has its last axis. One whose dimensions
the file leaves out is known by its name alone: a group is a ring of its own, with all of a device's links (`algorithms.butterfly`).

    torus 2 x 4      0 ── 1 ── 2 ── 3 ─┐      a group of 4, 1 apart: a ring all around        two ways
                     │    │    │    │         a group of 2, 1 apart: a part of it             one way
                     4 ── 5 ── 6 ── 7 ─┘      a group of 2, 4 apart: across a dimension of 2  one wire
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

FAT_TREE, RAILS, TORUS, DRAGONFLY, HYPERCUBE = "fat_tree", "rail_optimised", "torus", "dragonfly", "hypercube"


class Meeting(NamedTuple):
    """Of one pass of an algorithm: links that its messages pass one after another, and how many times S / bandwidth it takes."""

    hops: float
    load: float


@dataclass(frozen=True)
class Paths:
    """A group on a torus, by algorithm. The loads of all but `ring` are over the bandwidth that its rings reach: `share` of a device's."""

    share: float
    ring: Meeting
    butterfly: Meeting | None  # of powers of two
    tree: Meeting
    permute: Meeting


class Run(NamedTuple):
    """The part of a group along one dimension of `length`: `members`, each `apart` places from the next."""

    members: int
    apart: int
    length: int

    @property
    def closed(self) -> bool:
        """It goes all around, so that messages may go both ways."""
        return self.members * self.apart == self.length > 2

    @property
    def ways(self) -> float:
        """Links of a device that its rings fill: a part of a dimension is a ring folded, out over one half of the wires and back over
        the other; groups that lie between each other share them."""
        return (2 if self.closed else 1) / self.apart

    @property
    def ring_hops(self) -> int:
        """Links from one member to the next: in a folded ring the next but one is the neighbour."""
        return self.apart * (1 if self.closed or self.members == 2 else 2)

    @property
    def partners(self) -> list[tuple[int, float]]:
        """(links, messages that share the busiest of them) of a butterfly's partners 1, 2, 4, ... members away: as many as lie between
        two partners send over the wire in their middle, and half of them where it is as near the other way around."""
        far = [self.apart << step for step in range(self.members.bit_length() - 1)]
        return [(d, d / 2 if self.closed and 2 * d == self.length else d) for d in far]


@dataclass(frozen=True)
class Torus:
    """Rings in several dimensions, the last one's neighbours next to each other in the numbering."""

    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dimensions)

    @property
    def links(self) -> int:
        """Of one place: two along each dimension, one along a dimension of 2."""
        return sum(min(length, 3) - 1 for length in self.dimensions)

    @property
    def diameter(self) -> int:
        return sum(length // 2 for length in self.dimensions)

    @property
    def bisection(self) -> int:
        """Links, in one direction, between the halves of the longest dimension (Dally & Towles 2004, section 5.2)."""
        longest = max(self.dimensions)
        return self.size // longest * (min(longest, 3) - 1)

    def hops(self, a: int, b: int) -> int:
        """Links from one place to another."""
        found = 0
        for length in reversed(self.dimensions):
            (a, x), (b, y) = divmod(a, length), divmod(b, length)
            found += min(abs(x - y), length - abs(x - y))
        return found

    def runs(self, size: int, stride: int) -> tuple[Run, ...]:
        """How a group of `size` places, `stride` apart in the numbering, lies along the dimensions, the last first."""
        found, inner, left = [], 1, size
        for length in reversed(self.dimensions):
            apart = max(1, stride // inner)
            if left > 1 and apart < length:
                members = min(left, length // apart)
                found.append(Run(members, apart, length))
                left = math.ceil(left / members)
            inner *= length
        return tuple(found)

    @functools.cache  # noqa: B019 - a cluster has one torus
    def paths(self, size: int, stride: int) -> Paths:
        """What the messages of such a group meet, all such groups sending at once.

        Rings run along all dimensions at once, each with its part of the bytes, along one dimension after the other (Jain & Sabharwal
        2010, section 3). So do butterflies: a part begins with each dimension (Ho & Johnsson 1986). Of a tree's levels each has an edge
        over the busiest wire.
        """
        runs = self.runs(size, stride)
        ways = sum(run.ways for run in runs)
        far = [partner for run in runs for partner in run.partners]
        halved = sum(shared / 2 ** (step + 1) for step, (_, shared) in enumerate(far))
        depths = [math.ceil(math.log2(run.members)) / run.ways for run in runs]
        folds = any(run.members.bit_count() > 1 for run in runs)
        edges = [max(self.hops(i * stride, (i + 1) % size * stride) for i in range(size))] if size > 1 else [0]
        return Paths(
            share=ways / self.links,
            ring=Meeting(sum((run.members - 1) * run.ring_hops for run in runs), (size - 1) / size),
            butterfly=None if folds else Meeting(sum(links for links, _ in far), halved * ways / max(1, len(runs))),
            tree=Meeting(sum(links for links, _ in far), max(depths, default=0.0) * ways),
            permute=Meeting(edges[0], max((run.apart for run in runs), default=1) * ways),
        )


def hypercube(places: int) -> Torus:
    """Of a power of two places: a link for each binary digit of their numbers."""
    return Torus((2,) * (places.bit_length() - 1))


def to_one_other(groups: int) -> float:
    """How many times narrower a dragonfly is for a group that sends all to one other than for one that sends to all: it has one of
    g - 1 parts of its links for that, or by way of third groups all of them, twice (Valiant's routing; Kim et al. 2008, section 4.2)."""
    return min(max(groups - 1, 1), 2)


def gray(places: int) -> list[int]:
    """An order of a hypercube's places in which neighbours differ in one digit, the last and the first too (Gray 1953)."""
    return [i ^ (i >> 1) for i in range(places)]
