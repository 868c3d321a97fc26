"""A described cluster: nodes of devices, the links between them by level, and what fails how often.

    spine   ┌───────────────┴──────────────┐
    rail    ├──────────┐        ├──────────┐
    node   [12345678] [12345678] ...

A level joins blocks of `devices` devices; a message goes over the lowest level whose block holds both ends.
"""

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshtrain.config import ConfigError, MeshConfig, short
from meshtrain.config.load import filled, read_given
from meshtrain.config.schema import key
from meshtrain.errors import nearest
from meshtrain.plan.cluster.accelerators import ACCELERATORS, Accelerator, Peak

DIRECTORY = Path(__file__).parent / "known"


# The bounds are wider than any machine of 2026 and narrower than a slip of units.
SECONDS, ONE_WAY = "seconds (3 µs are 3e-06)", "GB/s that one device sends in one direction (400 Gbit/s are 50)"


@dataclass(frozen=True)
class Link:
    """One level of the network, seen from one device."""

    devices: int = key(0, "devices in a block of this level; 0: there is no such level", least=0)
    latency: float = key(0.0, "seconds for the first byte", least=0.0, most=0.01, unit=SECONDS)
    bandwidth: float = key(0.0, "GB/s that one device can send (one direction)", least=0.01, most=5000.0, unit=ONE_WAY)
    sums: bool = key(False, "its switches sum, as NVLink SHARP does: NCCL's all-reduces in a machine are cheaper")


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


EXAMPLE = "it needs at least 'accelerator: {name: h100}' and 'links: {node: {devices: 8, bandwidth: 450}}'"
LEVELS = ("island", "node", "rail", "spine")


@dataclass(frozen=True)
class Hop:
    """A level as a group of devices meets it: `fan` blocks of the level below (or devices) meet in one block here."""

    level: str
    fan: int
    latency: float
    bytes_per_second: float
    members: int  # devices of the group in one of the blocks that meet: they share the work of crossing
    sums: bool = False


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

    @functools.cached_property
    def bytes_per_second(self) -> float:
        """What one device can send when all of the group send at once, members of a block sharing its way out evenly."""
        return min((h.bytes_per_second * h.members for h in self.hops), default=math.inf)


@dataclass(frozen=True)
class Cluster:
    name: str = key("", "what the report calls it")
    nodes: int = key(1, "machines", least=1)
    devices_per_node: int = key(8, "accelerators in a machine", least=1)
    shared: bool = key(
        False, "fake devices: all devices are one machine, and the accelerator's figures are of all of them together"
    )
    topology: Literal["fat_tree", "torus", "dragonfly", "flat"] = key("fat_tree", "shape of the network between nodes")
    failures_per_device_hour: float = key(
        2e-5,
        "failures that stop the job, per device and hour; Llama 3 (section 3.3.4): 419 in 54 days of 16,384 GPUs",
        least=0.0,
        most=1.0,
        unit="failures per device and hour (one in 50,000 hours is 2e-05)",
    )
    restart_seconds: float = key(
        300.0, "from a failure to the first step after the restart", least=0.0, most=86400.0, unit="seconds"
    )
    storage_bandwidth: float = key(
        1.0, "GB/s that one node writes to the checkpoint store", least=0.001, most=1000.0, unit="GB/s of one node"
    )
    host_bandwidth: float = key(
        20.0, "GB/s at which one device copies to its host", least=0.01, most=1000.0, unit="GB/s of one device"
    )
    price_per_device_hour: float = key(0.0, "price of one device for an hour, in any currency", least=0.0)
    accelerator: Accelerator = field(default_factory=Accelerator)
    links: Links = field(default_factory=Links)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def levels(self) -> tuple[tuple[str, Link], ...]:
        """The levels that there are, innermost first."""
        return tuple((name, getattr(self.links, name)) for name in LEVELS if getattr(self.links, name).devices)

    def group(self, size: int, stride: int) -> Group:
        """The group of `size` devices that stand `stride` apart in the numbering."""
        device = self.accelerator
        library = "nccl" if device.platform == "gpu" else ""
        return _group(self.levels(), device.efficiency.link, self.topology, library, size, stride)

    def axis(self, name: str, mesh: MeshConfig) -> Group:
        """The group of a mesh axis, or of several joined by +; devices are numbered with pipeline outermost, then data, tensor
        innermost."""
        strides = {"tensor": 1, "data": mesh.tensor, "pipeline": mesh.tensor * mesh.data}
        axes = name.split("+")
        return self.group(math.prod(getattr(mesh, axis) for axis in axes), min(strides[axis] for axis in axes))


@functools.lru_cache(maxsize=4096)
def _group(
    levels: tuple[tuple[str, Link], ...], reached: float, topology: str, library: str, size: int, stride: int
) -> Group:
    hops, inside = [], 1
    for name, link in levels:
        members = max(1, min(size, link.devices // stride))
        if members > inside:
            fan = math.ceil(members / inside)
            hops.append(Hop(name, fan, link.latency, link.bandwidth * 1e9 * reached, inside, link.sums))
            inside = members
    return Group(size, tuple(hops), topology, library)


def load_cluster(path: str | Path) -> Cluster:
    """The checked cluster of a YAML file; ConfigError (one sentence) otherwise. What it does not give of an accelerator known by
    name, that one's data sheet does."""
    given, source = read_given(Cluster, path, "cluster description", "--cluster", EXAMPLE), short(path)
    named = ACCELERATORS.get(given.get("accelerator", {}).get("name", ""))
    cluster = filled(Cluster(accelerator=named or Accelerator()), given)
    if named and named.platform != "cpu":
        _check_scale(cluster.accelerator, named, source)
    return checked(cluster, source)


SHEET = ("memory", "bandwidth", "watts", "peak.float32", "peak.bfloat16", "peak.float16", "peak.float8")


def _check_scale(given: Accelerator, named: Accelerator, source: str) -> None:
    """Refuses figures that are far from the data sheet's, as those in other units are: TB/s for GB/s."""
    for name in SHEET:
        figure, sheet = (operator.attrgetter(name)(one) for one in (given, named))
        if figure and sheet and not 1 / 50 < figure / sheet < 50:
            raise ConfigError(
                f"{source}: accelerator.{name} is {figure:g}, and the data sheet of {named.name} says {sheet:g}; "
                "is it in another unit? Leave it out, or describe the device under a name of its own."
            )


def checked(cluster: Cluster, source: str) -> Cluster:
    """The cluster with a name; ConfigError where a figure is missing or makes no sense."""
    accelerator = cluster.accelerator
    missing = [n for n in ("memory", "bandwidth") if not getattr(accelerator, n)]
    missing += [] if accelerator.peak.float32 else ["peak.float32"]
    if missing:
        needed = f"accelerator.{', accelerator.'.join(missing)}"
        if accelerator.name in ACCELERATORS:
            raise ConfigError(f"{source}: {needed} is 0; leave it out for what the data sheet says.")
        raise ConfigError(
            f"{source}: accelerator.name is {short(repr(accelerator.name))}, which is not one of {', '.join(ACCELERATORS)}"
            + (nearest(accelerator.name, ACCELERATORS) or f"; a new one needs {needed}.")
        )
    if accelerator.reserved >= accelerator.memory:
        raise ConfigError(
            f"{source}: accelerator.reserved {accelerator.reserved:g} GiB leaves nothing of its memory of {accelerator.memory:g} GiB."
        )
    levels = cluster.levels()
    before: tuple[str, Link] | None = None
    for name, link in levels:
        if not link.bandwidth:
            raise ConfigError(
                f"{source}: links.{name}.bandwidth is 0; give the GB/s that one device can send over this level."
            )
        if before and link.devices <= before[1].devices:
            raise ConfigError(
                f"{source}: links.{name}.devices {link.devices} is not more than links.{before[0]}.devices {before[1].devices}; "
                "levels must grow from island to spine."
            )
        before = name, link
    reach = levels[-1][1].devices if levels else 1
    if not cluster.shared and reach < cluster.devices:
        top = "rail or spine" if cluster.nodes > 1 else "node"
        raise ConfigError(
            f"{source}: no link joins all {cluster.devices} devices ({cluster.nodes} nodes of {cluster.devices_per_node}): the widest level given "
            f"reaches {reach}; add links.{top} with devices: {cluster.devices}."
        )
    return dataclasses.replace(cluster, name=cluster.name or Path(source).stem)


def resized(cluster: Cluster, devices: int) -> Cluster:
    """The same kind of cluster with at least this many devices, its highest level stretched to join them."""
    if cluster.shared:
        return _divided(cluster, devices)
    per_node = cluster.devices_per_node
    nodes = math.ceil(devices / per_node)
    if devices < per_node:
        nodes, per_node = 1, devices
    levels: dict[str, Any] = dict(cluster.levels())
    if levels and nodes > cluster.nodes:
        top = list(levels)[-1]
        levels[top] = dataclasses.replace(levels[top], devices=max(levels[top].devices, nodes * per_node))
    return dataclasses.replace(
        cluster, nodes=nodes, devices_per_node=per_node, links=dataclasses.replace(cluster.links, **levels)
    )


def _divided(cluster: Cluster, devices: int) -> Cluster:
    """One machine faked to be several devices: each has its part of memory, bandwidth and arithmetic."""
    whole = cluster.accelerator
    part = dataclasses.replace(
        whole,
        memory=whole.memory / devices,
        reserved=whole.reserved / devices,
        bandwidth=whole.bandwidth / devices,
        peak=Peak(*(rate / devices for rate in dataclasses.astuple(whole.peak))),
    )
    node = dataclasses.replace(cluster.links.node, devices=max(devices, 1))
    return dataclasses.replace(
        cluster, nodes=1, devices_per_node=devices, accelerator=part, shared=False, links=Links(node=node)
    )


def named(name: str, devices: int) -> Cluster:
    """A known cluster (`known/NAME.yaml`, one for each accelerator) or a path; sized for `devices`.

    A file keeps its own size; a bare name is as large as the mesh needs.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        cluster = load_cluster(name)
        return resized(cluster, devices) if cluster.shared else cluster
    if name in known():
        return resized(known()[name], devices)
    raise ConfigError(
        f"--cluster {short(name)}: there is no such file or accelerator; give a YAML file or one of {', '.join(known())}"
        + (nearest(name, known()) or ".")
    )


@functools.cache
def known() -> dict[str, Cluster]:
    """The clusters that come along, by name: of each accelerator the machines that it is sold in."""
    return {path.stem: load_cluster(path) for path in sorted(DIRECTORY.glob("*.yaml"))}
