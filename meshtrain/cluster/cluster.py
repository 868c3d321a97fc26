"""A described cluster: nodes of devices, the links between them by level, and what fails how often.

    spine   ┌───────────────┴──────────────┐
    rail    ├──────────┐        ├──────────┐
    node   [12345678] [12345678] ...

A level joins blocks of `devices` devices; a message goes over the lowest level whose block holds both ends. The
network's shape says what else messages meet on the way: `meshtrain.cluster.topology`.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from meshtrain.cluster import topology as shapes
from meshtrain.cluster.accelerators import (
    ACCELERATORS,
    Accelerator,
    Peak,
    canonical,
    reaching,
)
from meshtrain.cluster.topology import (
    DRAGONFLY,
    FAT_TREE,
    HYPERCUBE,
    LEVELS,
    RAILS,
    TORUS,
    Group,
    Legs,
    Levels,
    Links,
)
from meshtrain.config import Config, ConfigError, MeshConfig, short
from meshtrain.config.load import filled, read_given
from meshtrain.config.mesh import EXPERT
from meshtrain.config.schema import key
from meshtrain.errors import nearest

DIRECTORY = Path(__file__).parent / "known"
EXAMPLE = "it needs at least 'accelerator: {name: h100}' and 'links: {node: {devices: 8, bandwidth: 450}}'"


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class Cluster:
    name: str = key("", "what the report calls it")
    nodes: int = key(1, "machines", least=1)
    devices_per_node: int = key(8, "accelerators in a machine", least=1)
    shared: bool = key(False, "fake devices: all devices are one machine, and the accelerator's figures are of all of "
                              "them together")
    topology: Literal["fat_tree", "rail_optimised", "torus", "dragonfly", "hypercube", "flat"] = key(
        FAT_TREE, "shape of the network"
    )
    dimensions: tuple[int, ...] = key(
        (), "torus: places along each dimension, neighbours in the last; the level that joins as many is the torus",
        least=1
    )
    between_rails: Literal["node", "spine"] = key(
        "node", "rail_optimised: the way to a device of another number in its node, over the node's links first "
                "(NCCL's PXN) or over the spine"
    )
    failures_per_device_hour: float = key(
        2e-5, "failures that stop the job, per device and hour; Llama 3 (section 3.3.4): 419 in 54 days of 16,384 GPUs",
        least=0.0, most=1.0, unit="failures per device and hour (one in 50,000 hours is 2e-05)"
    )
    restart_seconds: float = key(
        300.0, "from a failure to the first step after the restart",
        least=0.0, most=86400.0, unit="seconds"
    )
    save_seconds: float = key(
        0.2, "for which a save stops training however little it copies (barrier, directory, names of arrays): the "
             "quickstart's 10 MB, median of 10",
        least=0.0, most=3600.0, unit="seconds"
    )
    save_seconds_per_host: float = key(
        0.002, "the stop's growth: each host calls at one barrier; MegaScale (Jiang et al. 2024, section 4.4): "
               "several seconds on 1,536",
        least=0.0, most=60.0, unit="seconds a host"
    )
    storage_bandwidth: float = key(
        1.0, "GB/s that one node writes to the checkpoint store",
        least=0.001, most=1000.0,
        unit="GB/s of one node"
    )
    storage_bandwidth_total: float = key(
        200.0, "GB/s that the store takes from all nodes at once, however many; a large store of its own kind: Llama "
               "3's takes 2,000 (section 3.3.1)",
        least=0.001, most=1e6, unit="GB/s of the store"
    )
    host_bandwidth: float = key(
        20.0, "GB/s at which one device copies to its host",
        least=0.01, most=1000.0,
        unit="GB/s of one device"
    )
    price_per_device_hour: float = key(0.0, "price of one device for an hour, in any currency", least=0.0)
    device_order: tuple[str, ...] = key(
        (), "devices as HOST/NUMBER, neighbours by their links, as the probe found them; mesh.cluster has a mesh take "
            "them so"
    )
    accelerator: Accelerator = field(default_factory=Accelerator)
    links: Links = field(default_factory=Links)
    # fmt: on

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def levels(self) -> Levels:
        """The levels that there are, innermost first."""
        return tuple((name, getattr(self.links, name)) for name in LEVELS if getattr(self.links, name).devices)

    def group(self, size: int, stride: int) -> Group:
        """The group of `size` devices that stand `stride` apart in the numbering."""
        return self._group(((size, stride),))

    def axis(self, name: str, mesh: MeshConfig) -> Group:
        """The group of a mesh axis, or of several joined by +; devices are numbered as `mesh.order` says.

        `expert` alone is the group that shares experts, whatever axes that lies over.
        """
        # a search asks half a million times
        if (name, mesh) not in self._axes:
            axes = mesh.expert_axes if name == EXPERT else name.split("+")
            self._axes[name, mesh] = self.join_legs((mesh.ways(axis), mesh.stride(axis)) for axis in axes)
        return self._axes[name, mesh]

    @functools.cached_property
    def _axes(self) -> dict[tuple[str, MeshConfig], Group]:
        return {}

    def join_legs(self, legs: Iterable[tuple[int, int]]) -> Group:
        """The group of the devices that legs span together, each (how many, how far apart in the numbering)."""
        return self._group(tuple(leg for leg in legs if leg[0] > 1) or ((1, 1),))

    def _group(self, legs: Legs) -> Group:
        device = self.accelerator
        library = "nccl" if device.platform == "gpu" else ""
        return shapes.group(self.levels(), device.efficiency.link, self.network, library, legs)

    @functools.cached_property
    def network(self) -> shapes.Network:
        """The shape, with what it needs."""
        torus, level = shapes.torus_of(self.levels(), self.topology, self.dimensions)
        return shapes.Network(self.topology, self.between_rails, self.devices_per_node, torus, level)

    @property
    def bisection(self) -> float:
        """GB/s that one half of all devices can send to the other half over the highest level at once."""
        if not self.levels():
            return 0.0
        name, top = self.levels()[-1]
        devices = top.devices
        network = self.network
        if network.torus and network.torus_level == name:
            return network.torus.bisection * top.reached * (devices // network.torus.size) / network.torus.links
        blocks = devices // (self.levels()[-2][1].devices if len(self.levels()) > 1 else 1)
        # Of a dragonfly's links some lead to groups of the same half.
        across = blocks / 2 / max(1, blocks - 1) if self.topology == DRAGONFLY else 1.0
        return devices / 2 * top.reached * across


def load_cluster(path: str | Path) -> Cluster:
    """The checked cluster of a YAML file; ConfigError (one sentence) otherwise.

    If the accelerator is known by name, ours or its driver's, its data sheet fills in what the file leaves out.
    """
    values = read_given(Cluster, path, "cluster description", "--cluster", EXAMPLE)
    source = short(path)
    device = values.get("accelerator", {})
    sheet = ACCELERATORS.get(canonical(device.get("name", "")))
    if sheet:
        device["name"] = sheet.name
    cluster = filled(Cluster(accelerator=sheet or Accelerator()), values)
    if sheet and sheet.platform != "cpu":
        _check_scale(cluster.accelerator, sheet, source)
    return checked(cluster, source)


SHEET = ("memory", "bandwidth", "watts", "peak.float32", "peak.bfloat16", "peak.float16", "peak.float8")


def _check_scale(device: Accelerator, sheet: Accelerator, source: str) -> None:
    """Refuses figures that are far from the data sheet's, as those in other units are: TB/s for GB/s."""
    for name in SHEET:
        figure, expected = (operator.attrgetter(name)(accelerator) for accelerator in (device, sheet))
        if figure and expected and not 1 / 50 < figure / expected < 50:
            raise ConfigError(
                f"{source}: accelerator.{name} is {figure:g}, and the data sheet of {sheet.name} says {expected:g}; "
                "is it in another unit? Leave it out, or describe the device under a name of its own."
            )


def checked(cluster: Cluster, source: str) -> Cluster:
    """The cluster with a name; ConfigError where a figure is missing or makes no sense."""
    for problem in itertools.chain(_problems(cluster), _problems_of_shape(cluster)):
        raise ConfigError(f"{source}: {problem}")
    return replace(cluster, name=cluster.name or Path(source).stem)


def _problems(cluster: Cluster) -> Iterator[str]:
    """Yields a sentence for each figure that is missing or makes no sense; those behind the first may not hold."""
    accelerator = cluster.accelerator
    figures = ("memory", "bandwidth", "peak.float32")
    if missing := [name for name in figures if not operator.attrgetter(name)(accelerator)]:
        needed = f"accelerator.{', accelerator.'.join(missing)}"
        if accelerator.name in ACCELERATORS:
            yield f"{needed} is 0; leave it out for what the data sheet says."
        yield (
            f"accelerator.name is {short(repr(accelerator.name))}, which is not one of {', '.join(ACCELERATORS)}"
            + (nearest(accelerator.name, ACCELERATORS) or f"; a new one needs {needed}.")
        )
    if accelerator.reserved >= accelerator.memory:
        yield (
            f"accelerator.reserved {accelerator.reserved:g} GiB leaves nothing of its memory of "
            f"{accelerator.memory:g} GiB."
        )
    levels = cluster.levels()
    for name, link in levels:
        if not link.bandwidth:
            yield f"links.{name}.bandwidth is 0; give the GB/s that one device can send over this level."
    for (inner, below), (name, link) in itertools.pairwise(levels):
        if link.devices <= below.devices:
            yield (
                f"links.{name}.devices {link.devices} is not more than links.{inner}.devices {below.devices}; "
                "levels must grow from island to spine."
            )


def _problems_of_shape(cluster: Cluster) -> Iterator[str]:
    """Yields a sentence for what a shape lacks, or has though it is another's, and for devices that no link joins."""
    levels = dict(cluster.levels())
    topology = cluster.topology
    if cluster.dimensions and topology != TORUS:
        yield f"dimensions are a torus's, and topology is {topology}; leave them out."
    below = 1
    joined = []
    for name, link in levels.items():
        blocks = link.devices // below
        joined.append(f"{blocks} at links.{name}")
        if topology == HYPERCUBE and name == [*levels][-1] and blocks.bit_count() > 1:
            yield f"links.{name} joins {blocks} blocks, and a hypercube has a power of two of them."
        below = link.devices
    if cluster.dimensions and cluster.network.torus is None:
        places = math.prod(cluster.dimensions)
        yield (
            f"dimensions {' x '.join(map(str, cluster.dimensions))} are {places} places, and no level joins as many; "
            f"there are {', '.join(joined)}."
        )
    if topology == RAILS:
        needed = ("node", "rail", *["spine"] * (cluster.between_rails == "spine"))
        if missing := [name for name in needed if name not in levels]:
            yield f"a rail-optimised network needs links.{', links.'.join(missing)}."
    elif cluster.between_rails == "spine":
        yield f"between_rails is of rail_optimised networks, and topology is {topology}; leave it out."
    counts = Counter(cluster.device_order)
    if twice := [name for name, times in counts.items() if times > 1]:
        yield f"device_order names {short(twice[0])} twice."
    if cluster.shared:
        return
    if counts and len(counts) != cluster.devices:
        yield f"device_order names {len(counts)} devices, and the cluster has {cluster.devices}."
    # of the highest level; 1 without any
    if below < cluster.devices:
        top = "rail or spine" if cluster.nodes > 1 else "node"
        yield (
            f"no link joins all {cluster.devices} devices ({cluster.nodes} nodes of {cluster.devices_per_node}): the "
            f"widest level given reaches {below}; add links.{top} with devices: {cluster.devices}."
        )


def resized(cluster: Cluster, devices: int) -> Cluster:
    """Returns the same kind of cluster with at least this many devices.

    Its highest level is stretched to join them; one device gets the rates that it reaches alone.
    """
    if cluster.shared:
        return _divided(cluster, devices)
    cluster = replace(cluster, accelerator=reaching(cluster.accelerator, devices))
    per_node = cluster.devices_per_node
    nodes = math.ceil(devices / per_node)
    if devices < per_node:
        nodes = 1
        per_node = devices
    levels: dict[str, Any] = dict(cluster.levels())
    if levels and nodes > cluster.nodes:
        top = list(levels)[-1]
        levels[top] = replace(levels[top], devices=max(levels[top].devices, nodes * per_node))
    return replace(cluster, nodes=nodes, devices_per_node=per_node, links=replace(cluster.links, **levels))


def _divided(cluster: Cluster, devices: int) -> Cluster:
    """One machine faked to be several devices: each has its part of memory, bandwidth and arithmetic."""
    machine = cluster.accelerator
    figures = {name: getattr(machine, name) / devices for name in ("memory", "reserved", "bandwidth")}
    part = replace(machine, **figures, peak=Peak(*(rate / devices for rate in astuple(machine.peak))))
    node = replace(cluster.links.node, devices=max(devices, 1))
    return replace(cluster, nodes=1, devices_per_node=devices, accelerator=part, shared=False, links=Links(node=node))


def usual_cluster(config: Config) -> str:
    """The cluster that a run is planned for when none is named."""
    return config.mesh.cluster or ("cpu" if config.run.fake_devices else "h100")


def named(name: str, devices: int) -> Cluster:
    """A known cluster (`known/NAME.yaml`, one for each accelerator) or a path; sized for `devices`.

    A file keeps its own size; a bare name is as large as the mesh needs.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        cluster = load_cluster(name)
        return resized(cluster, devices) if cluster.shared else cluster
    if name in known():
        return resized(known()[name], devices)
    legal = f"give a YAML file or one of {', '.join(known())}{nearest(name, known()) or '.'}"
    raise ConfigError(f"--cluster {short(name)}: there is no such file or accelerator; {legal}")


def machine_devices(name: str) -> int | None:
    """Returns the devices that a node of a named cluster or of a file's has; None where one machine is faked to be
    several.
    """
    cluster = known()[name] if name in known() else named(name, 1)
    return None if cluster.shared or name == "cpu" else cluster.devices_per_node


@functools.cache
def known() -> dict[str, Cluster]:
    """The clusters that come along, by name: of each accelerator the machines that it is sold in."""
    return {path.stem: load_cluster(path) for path in sorted(DIRECTORY.glob("*.yaml"))}
