"""Links by level, shapes of networks, and groups of devices as they meet them.

Devices that share a way out of a block slow each other:

    a group of 16, 4 apart, on nodes of 8     node   fan 2, members 1      pairs in each node
                                              rail   fan 8, members 2      8 nodes, whose pairs share the way

The shape says what else messages meet on the way:

    topology         the file says besides its levels     what it changes
    flat             nothing                              nothing: every message has its way to itself
    fat_tree         links.LEVEL.oversubscription: 2      a device's share of the way into that level is 1/2
    rail_optimised   between_rails: node | spine          a switch joins the devices of one number in their
                                                          nodes; to others it goes over NVLink first, or the spine
    dragonfly        nothing: groups are the blocks       a block that talks to one other has 1/(g-1) of its
                     below the highest level, g of them   links there, or half of all by way of third blocks
    torus            dimensions: [4, 4, 8]                rings along dimensions; far partners share wires
    hypercube        nothing                              a torus whose dimensions are all 2

Sources: fat_tree: Leiserson 1985; Al-Fares et al. 2008, section 2.1. rail_optimised: Wang et al. 2023, section 2.
dragonfly: Kim et al. 2008, sections 3, 4. torus: Dally & Towles 2004, chapter 5. hypercube: Saad & Schultz 1988.

A torus has its last dimension's neighbours next to each other in the numbering, as `mesh.order` has its last axis. One
whose dimensions the file leaves out is known by its name alone: a group is a ring of its own, with all of a device's
links (`algorithms.butterfly`).

    torus 2 x 4      0 ── 1 ── 2 ── 3 ─┐      a group of 4, 1 apart: a ring all around        two ways
                     │    │    │    │         a group of 2, 1 apart: a part of it             one way
                     4 ── 5 ── 6 ── 7 ─┘      a group of 2, 4 apart: across a dimension of 2  one wire
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshtrain.config.schema import key

FAT_TREE = "fat_tree"
RAILS = "rail_optimised"
TORUS = "torus"
DRAGONFLY = "dragonfly"
HYPERCUBE = "hypercube"
LEVELS = ("island", "node", "rail", "spine")

# The bounds are wider than any machine of 2026 and narrower than a slip of units.
SECONDS = "seconds (3 µs are 3e-06)"
ONE_WAY = "GB/s that one device sends in one direction (400 Gbit/s are 50)"


@dataclass(frozen=True)
class Link:
    """One level of the network, seen from one device."""

    devices: int = key(
        0, "devices in a block of this level; 0: there is no such level", least=0
    )
    latency: float = key(
        0.0, "seconds for the first byte", least=0.0, most=0.01, unit=SECONDS
    )
    bandwidth: float = key(
        0.0,
        "GB/s that one device can send (one direction)",
        least=0.01,
        most=5000.0,
        unit=ONE_WAY,
    )
    sums: bool = key(
        False,
        "its switches sum, as NVLink SHARP does: NCCL's all-reduces in a machine are cheaper",
    )
    oversubscription: float = key(
        1.0,
        "times that what a block's devices can send exceeds what its switches carry out of it to this level; Llama 3 "
        "(section 3.3.1): 7 between pods",
        least=1.0,
        most=64.0,
    )

    @property
    def reached(self) -> float:
        """GB/s that each device can send over this level when all do."""
        return self.bandwidth / self.oversubscription


@dataclass(frozen=True)
class Cable(Link):
    """A level between machines: the world is some 0.1 s wide, and a device has network cards for 1.6 Tbit/s at most."""

    latency: float = key(
        0.0, "seconds for the first byte", least=0.0, most=0.1, unit=SECONDS
    )
    bandwidth: float = key(
        0.0,
        "GB/s that one device can send (one direction)",
        least=0.001,
        most=200.0,
        unit=ONE_WAY,
    )


@dataclass(frozen=True)
class Links:
    island: Link = field(default_factory=Link)
    node: Link = field(default_factory=Link)
    rail: Cable = field(default_factory=Cable)
    spine: Cable = field(default_factory=Cable)


Levels = tuple[tuple[str, Link], ...]  # innermost first, without those of no devices
# (devices, how far apart in the numbering), one for each axis of a group
Legs = tuple[tuple[int, int], ...]


class Load(NamedTuple):
    """The load of one pass of an algorithm: links that its messages pass one after another, and how many times S /
    bandwidth it takes.
    """

    hops: float
    load: float


@dataclass(frozen=True)
class Paths:
    """A group on a torus, by algorithm.

    The loads of all but `ring` are over the bandwidth that its rings reach: `share` of a device's.
    """

    share: float
    ring: Load
    butterfly: Load | None  # of powers of two
    tree: Load
    permute: Load


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
    def links(self) -> float:
        """Links of a device that its rings fill: a part of a dimension is a ring folded, out over one half of the wires
        and back over the other; groups that lie between each other share them.
        """
        return (2 if self.closed else 1) / self.apart

    @property
    def ring_hops(self) -> int:
        """Links from one member to the next: in a folded ring the next but one is the neighbour."""
        return self.apart * (1 if self.closed or self.members == 2 else 2)

    @property
    def partners(self) -> list[tuple[int, float]]:
        """(links, messages that share the busiest of them) of a butterfly's partners 1, 2, 4, ... members away: as many
        as lie between two partners send over the wire in their middle, and half of them where it is as near the other
        way around.
        """
        distances = [
            self.apart << step for step in range(self.members.bit_length() - 1)
        ]
        return [
            (d, d / 2 if self.closed and 2 * d == self.length else d) for d in distances
        ]


@dataclass(frozen=True)
class Torus:
    """Rings in several dimensions, the last one's neighbours next to each other in the numbering."""

    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dimensions)

    @property
    def links(self) -> int:
        """Links of one place: two along each dimension, one along a dimension of 2."""
        return sum(min(length, 3) - 1 for length in self.dimensions)

    @property
    def bisection(self) -> int:
        """Links, in one direction, between the halves of the longest dimension (Dally & Towles 2004, section 5.2)."""
        longest = max(self.dimensions)
        return self.size // longest * (min(longest, 3) - 1)

    def hops(self, a: int, b: int) -> int:
        """Links from one place to another."""
        hops = 0
        for length in reversed(self.dimensions):
            (a, x), (b, y) = divmod(a, length), divmod(b, length)
            hops += min(abs(x - y), length - abs(x - y))
        return hops

    def runs(self, size: int, stride: int) -> tuple[Run, ...]:
        """Returns how a group of `size` places, `stride` apart in the numbering, lies along the dimensions, the last
        first.
        """
        runs = []
        inner = 1
        left = size
        for length in reversed(self.dimensions):
            apart = max(1, stride // inner)
            if left > 1 and apart < length:
                members = min(left, length // apart)
                runs.append(Run(members, apart, length))
                left = math.ceil(left / members)
            inner *= length
        return tuple(runs)

    @functools.cache  # noqa: B019 - a cluster has one torus
    def paths(self, size: int, stride: int) -> Paths:
        """Returns the load that the messages of such a group meet while all such groups send at once.

        Rings run along all dimensions at once, each with its part of the bytes, along one dimension after the other
        (Jain & Sabharwal 2010, section 3). So do butterflies: a part begins with each dimension (Ho & Johnsson 1986).
        Each level of a tree has an edge over the busiest wire.
        """
        runs = self.runs(size, stride)
        links = sum(run.links for run in runs)
        partners = [partner for run in runs for partner in run.partners]
        halved = sum(
            shared / 2 ** (step + 1) for step, (_, shared) in enumerate(partners)
        )
        depths = [math.ceil(math.log2(run.members)) / run.links for run in runs]
        folds = any(run.members.bit_count() > 1 for run in runs)
        edges = (
            [max(self.hops(i * stride, (i + 1) % size * stride) for i in range(size))]
            if size > 1
            else [0]
        )
        hops = sum(distance for distance, _ in partners)
        return Paths(
            share=links / self.links,
            ring=Load(
                sum((run.members - 1) * run.ring_hops for run in runs),
                (size - 1) / size,
            ),
            butterfly=None if folds else Load(hops, halved * links / max(1, len(runs))),
            tree=Load(hops, max(depths, default=0.0) * links),
            permute=Load(edges[0], max((run.apart for run in runs), default=1) * links),
        )


class Network(NamedTuple):
    """The shape of a cluster's network. The torus joins the blocks below its level, or devices."""

    topology: str
    between_rails: str
    devices_per_node: int
    torus: Torus | None
    torus_level: str


def torus_of(
    levels: Levels, topology: str, dimensions: tuple[int, ...]
) -> tuple[Torus | None, str]:
    """The torus of a network and the level that it is; a hypercube joins the blocks of its highest level."""
    below = 1
    for name, link in levels:
        places = link.devices // below
        if dimensions and math.prod(dimensions) == places:
            return Torus(dimensions), name
        if topology == HYPERCUBE and name == levels[-1][0]:
            return Torus((2,) * (places.bit_length() - 1)), name
        below = link.devices
    return None, ""


@dataclass(frozen=True)
class Hop:
    """A level as a group of devices meets it: `fan` blocks of the level below (or devices) meet in one block here."""

    level: str
    fan: int
    latency: float
    bytes_per_second: float
    # Devices of the group in one of the blocks that meet: they share the work of crossing
    members: int
    sums: bool = False
    paths: Paths | None = None  # on a torus; bytes_per_second is then what rings reach
    detour: float = 0.0  # seconds more for a message to a device of another rail
    slower: float = 1.0  # and how many times as long its bytes take


@dataclass(frozen=True, eq=False)
class Group:
    """Devices that talk to each other, and the levels they cross, lowest first.

    Equal groups of a cluster are one object.
    """

    size: int
    hops: tuple[Hop, ...]
    topology: str = FAT_TREE
    library: str = ""  # nccl, or the best of all algorithms

    @functools.cached_property
    def latency(self) -> float:
        return max((h.latency for h in self.hops), default=0.0)

    @property
    def paths(self) -> Paths | None:
        """The paths of a group that lies on a torus, and nowhere else."""
        return self.hops[0].paths if len(self.hops) == 1 else None

    @functools.cached_property
    def bytes_per_second(self) -> float:
        """Returns what one device can send while all of the group send, members of a block sharing its way out
        evenly.
        """
        return min(
            (h.bytes_per_second * h.members for h in self.hops), default=math.inf
        )


@functools.lru_cache(maxsize=4096)
def group(
    levels: Levels,
    reached: float,
    network: Network,
    library: str,
    legs: Legs,
) -> Group:
    """The group of devices that legs span; `reached`: share of a link's bandwidth."""
    size = math.prod(n for n, _ in legs)
    stride = min(apart for _, apart in legs)
    hops = []
    inside = 1
    block = 1
    for name, link in levels:
        members = math.prod(max(1, min(n, link.devices // apart)) for n, apart in legs)
        if members > inside:
            fan = math.ceil(members / inside)
            hop = Hop(
                name, fan, link.latency, link.reached * 1e9 * reached, inside, link.sums
            )
            hops.append(_shape_hop(hop, levels, network, block, stride))
            inside = members
        block = link.devices
    return Group(
        size, tuple(hops), network.topology if not network.torus else "", library
    )


def _shape_hop(
    hop: Hop,
    levels: Levels,
    network: Network,
    block: int,
    stride: int,
) -> Hop:
    """The hop with what the network's shape does to it. `block`: devices of each of the blocks that meet there."""
    if network.torus and hop.level == network.torus_level:
        paths = network.torus.paths(hop.fan, max(1, stride // block))
        return replace(
            hop, bytes_per_second=hop.bytes_per_second * paths.share, paths=paths
        )
    if network.topology == DRAGONFLY and hop.level == levels[-1][0]:
        # To one other group lead one of g - 1 parts of a group's links, or by way of third groups all of them, twice
        # (Valiant's routing; Kim et al. 2008, section 4.2).
        narrower = min(max(levels[-1][1].devices // block - 1, 1), 2)
        return replace(hop, bytes_per_second=hop.bytes_per_second / narrower)
    # A group that keeps to one number in each node keeps to its rail.
    if (
        network.topology == RAILS
        and hop.level == "rail"
        and stride % network.devices_per_node
    ):
        links = dict(levels)
        if network.between_rails == "node":
            slower = max(1.0, links["rail"].reached / links["node"].reached)
            return replace(hop, detour=links["node"].latency, slower=slower)
        detour = max(0.0, links["spine"].latency - hop.latency)
        return replace(
            hop, detour=detour, slower=links["rail"].reached / links["spine"].reached
        )
    return hop
