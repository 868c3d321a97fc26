"""Links by level, and groups of devices as they meet them.

What shares a way out of a block is slowed by it:

    a group of 16, 4 apart, on nodes of 8     node   fan 2, members 1      pairs in each node
                                              rail   fan 8, members 2      8 nodes, whose pairs share the way
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from meshtrain.config.schema import key
from meshtrain.plan.cluster.topology import DRAGONFLY, HYPERCUBE, RAILS, Paths, Torus, hypercube, to_one_other

# The bounds are wider than any machine of 2026 and narrower than a slip of units.
SECONDS, ONE_WAY = "seconds (3 µs are 3e-06)", "GB/s that one device sends in one direction (400 Gbit/s are 50)"


@dataclass(frozen=True)
class Link:
    """One level of the network, seen from one device."""

    devices: int = key(0, "devices in a block of this level; 0: there is no such level", least=0)
    latency: float = key(0.0, "seconds for the first byte", least=0.0, most=0.01, unit=SECONDS)
    bandwidth: float = key(0.0, "GB/s that one device can send (one direction)", least=0.01, most=5000.0, unit=ONE_WAY)
    sums: bool = key(False, "its switches sum, as NVLink SHARP does: NCCL's all-reduces in a machine are cheaper")
    oversubscription: float = key(
        1.0,
        "times that what a block's devices can send exceeds what its switches carry out of it to this level; Llama 3 (section 3.3.1): 7 between pods",
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

    latency: float = key(0.0, "seconds for the first byte", least=0.0, most=0.1, unit=SECONDS)
    bandwidth: float = key(0.0, "GB/s that one device can send (one direction)", least=0.001, most=200.0, unit=ONE_WAY)


@dataclass(frozen=True)
class Links:
    island: Link = field(default_factory=Link)
    node: Link = field(default_factory=Link)
    rail: Cable = field(default_factory=Cable)
    spine: Cable = field(default_factory=Cable)


LEVELS = ("island", "node", "rail", "spine")


Levels = tuple[tuple[str, Link], ...]  # that there are, innermost first


Legs = tuple[tuple[int, int], ...]  # (devices, how far apart in the numbering): one for each axis of a group


class Network(NamedTuple):
    """The shape of a cluster's network. The torus joins the blocks below its level, or devices."""

    topology: str
    between_rails: str
    devices_per_node: int
    torus: Torus | None
    torus_level: str


@dataclass(frozen=True)
class Hop:
    """A level as a group of devices meets it: `fan` blocks of the level below (or devices) meet in one block here."""

    level: str
    fan: int
    latency: float
    bytes_per_second: float
    members: int  # devices of the group in one of the blocks that meet: they share the work of crossing
    sums: bool = False
    paths: Paths | None = None  # on a torus; bytes_per_second is then what rings reach
    detour: float = 0.0  # seconds more for a message to a device of another rail
    slower: float = 1.0  # and how many times as long its bytes take


@dataclass(frozen=True, eq=False)
class Group:
    """Devices that talk to each other, and the levels they cross, lowest first. Equal groups of a cluster are one object."""

    size: int
    hops: tuple[Hop, ...]
    topology: str = "fat_tree"
    library: str = ""  # nccl, or the best of all algorithms

    @functools.cached_property
    def latency(self) -> float:
        return max((h.latency for h in self.hops), default=0.0)

    @property
    def paths(self) -> Paths | None:
        """Of a group that lies on a torus, and nowhere else."""
        return self.hops[0].paths if len(self.hops) == 1 else None

    @functools.cached_property
    def bytes_per_second(self) -> float:
        """What one device can send when all of the group send at once, members of a block sharing its way out evenly."""
        return min((h.bytes_per_second * h.members for h in self.hops), default=math.inf)


@functools.lru_cache(maxsize=4096)
def group(levels: Levels, reached: float, network: Network, library: str, legs: Legs) -> Group:
    """The group of devices that legs span; `reached`: share of a link's bandwidth."""
    size, stride = math.prod(n for n, _ in legs), min(apart for _, apart in legs)
    hops, inside, block = [], 1, 1
    for name, link in levels:
        members = math.prod(max(1, min(n, link.devices // apart)) for n, apart in legs)
        if members > inside:
            fan = math.ceil(members / inside)
            hop = Hop(name, fan, link.latency, link.reached * 1e9 * reached, inside, link.sums)
            hops.append(_met(hop, levels, network, block, stride))
            inside = members
        block = link.devices
    return Group(size, tuple(hops), network.topology if not network.torus else "", library)


def _met(hop: Hop, levels: Levels, network: Network, block: int, stride: int) -> Hop:
    """The hop with what the network's shape does to it. `block`: devices of each of the blocks that meet there."""
    if network.torus and hop.level == network.torus_level:
        paths = network.torus.paths(hop.fan, max(1, stride // block))
        return dataclasses.replace(hop, bytes_per_second=hop.bytes_per_second * paths.share, paths=paths)
    if network.topology == DRAGONFLY and hop.level == levels[-1][0]:
        narrower = to_one_other(levels[-1][1].devices // block)
        return dataclasses.replace(hop, bytes_per_second=hop.bytes_per_second / narrower)
    # A group that keeps to one number in each node keeps to its rail.
    if network.topology == RAILS and hop.level == "rail" and stride % network.devices_per_node:
        links = dict(levels)
        if network.between_rails == "node":
            slower = max(1.0, links["rail"].reached / links["node"].reached)
            return dataclasses.replace(hop, detour=links["node"].latency, slower=slower)
        detour = max(0.0, links["spine"].latency - hop.latency)
        return dataclasses.replace(hop, detour=detour, slower=links["rail"].reached / links["spine"].reached)
    return hop


def torus_of(levels: Levels, topology: str, dimensions: tuple[int, ...]) -> tuple[Torus | None, str]:
    """The torus of a network and the level that it is; a hypercube joins the blocks of its highest level."""
    below = 1
    for name, link in levels:
        places = link.devices // below
        if dimensions and math.prod(dimensions) == places:
            return Torus(dimensions), name
        if topology == HYPERCUBE and name == levels[-1][0]:
            return hypercube(places), name
        below = link.devices
    return None, ""
