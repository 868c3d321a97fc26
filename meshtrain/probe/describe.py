"""A cluster file of what was measured, which `meshtrain.plan --cluster` reads: its links by level, its devices.

    mesh                               levels
    tensor 4, all of a machine    ──►  node   {devices: 4}
    data 2, between machines      ──►  rail   {devices: 8}

An axis joins blocks of those before it, as a level does; axes whose links are alike make one level. A link's figures
are those of a permute over its axis, in which every device sends at once: what collectives are made of.

Where devices that fast links join are not neighbours in the mesh, axes mix levels. Then the levels are those that the
pairs of devices show (`meshtrain.cluster.levels`), and `device_order` has them in an order that keeps to the links;
probed once more with `mesh.cluster` naming the file, the axes tell the figures of all devices sending at once.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml

from meshtrain.cluster.accelerators import ACCELERATORS
from meshtrain.cluster.algorithms import PERMUTE
from meshtrain.cluster.levels import ALIKE, Clustered, clustered
from meshtrain.cluster.topology import Cable, Link
from meshtrain.config import ConfigError
from meshtrain.config.key import keys
from meshtrain.config.mesh import ORDER
from meshtrain.plan.compute import product
from meshtrain.probe.figures import Devices, Probe

# The inner and the outer name of levels in a machine and between machines.
INSIDE = ("island", "node")
BETWEEN = ("rail", "spine")


@dataclass(frozen=True)
class Level:
    devices: int
    latency: float
    bandwidth: float  # bytes/s
    inside: bool  # a machine

    def unlike(self, other: "Level") -> float:
        """Returns how many times the figures differ; without end between a machine and the network."""
        if self.inside != other.inside:
            return math.inf
        pairs = ((self.latency, other.latency), (self.bandwidth, other.bandwidth))
        return max(max(a, b, 1e-9) / max(min(a, b), 1e-9) for a, b in pairs)


def cluster_pairs(probe: Probe) -> Clustered | None:
    """Returns how devices stand together, where pairs were measured and show several levels.

    Some pairs alone, as the probe takes them of many devices, can confirm the order that there is, and tell of no
    other.
    """
    if probe.pairs is None:
        return None
    together = clustered(probe.pairs.sizes, probe.pairs.seconds)
    every = not np.isnan(probe.pairs.seconds[:, ~np.eye(probe.size, dtype=bool)]).any()
    if len(together.levels) > 1 and (every or together.is_ordered):
        return together
    return None


def _is_inside(probe: Probe, blocks: Iterable[Iterable[int]]) -> bool:
    return all(
        len({probe.machines[device] for device in block}) == 1 for block in blocks
    )


def _pair_levels(probe: Probe, together: Clustered) -> list[Level]:
    return [
        Level(one.devices, one.latency, one.bandwidth, _is_inside(probe, one.blocks))
        for one in together.levels
    ]


def _axis_levels(probe: Probe) -> list[Level]:
    by_axis: list[Level] = []
    block = 1
    for axis in reversed(ORDER):
        block *= probe.mesh.ways(axis)
        inside = _is_inside(
            probe, (range(i, i + block) for i in range(0, probe.size, block))
        )
        lines = [
            collective.line
            for collective in probe.collectives_over(axis)
            if collective.kind == PERMUTE
        ]
        by_axis += [
            Level(block, line.latency, line.bandwidth, inside) for line in lines
        ]
    return by_axis


def levels(probe: Probe) -> dict[str, Level]:
    """Returns levels by the planner's names, innermost first."""
    together = cluster_pairs(probe)
    by_distance = (
        _pair_levels(probe, together)
        if together and not together.is_ordered
        else _axis_levels(probe)
    )
    while len(by_distance) > 1:
        gap, at = min(
            (a.unlike(b), i) for i, (a, b) in enumerate(itertools.pairwise(by_distance))
        )
        most = max(
            sum(level.inside is side for level in by_distance) for side in (True, False)
        )
        if gap > ALIKE and most <= len(INSIDE):
            break
        by_distance[at : at + 2] = [_joined(by_distance[at], by_distance[at + 1])]
    named: dict[str, Level] = {}
    for side, names in ((True, INSIDE), (False, BETWEEN)):
        of_side = [level for level in by_distance if level.inside is side]
        # One level alone is a machine's, or between neighbouring machines.
        named |= zip(
            names if len(of_side) > 1 else (names[side],), of_side, strict=False
        )
    return named


def _joined(inner: Level, outer: Level) -> Level:
    latency = math.sqrt(inner.latency * outer.latency) or max(
        inner.latency, outer.latency
    )
    return replace(
        outer, latency=latency, bandwidth=math.sqrt(inner.bandwidth * outer.bandwidth)
    )


def to_yaml(probe: Probe) -> str:
    """Returns the cluster file; ConfigError where something that it holds was not measured."""
    devices = probe.devices
    links = levels(probe)
    if devices is None or (probe.size > 1 and not links):
        raise ConfigError(
            "a cluster file needs collectives and products; leave --only out."
        )
    sizes = set(Counter(probe.machines).values())
    if len(sizes) > 1:
        raise ConfigError(
            f"a cluster file has machines of one size, and these have {' and '.join(map(str, sorted(sizes)))} "
            "devices; give a smaller --mesh."
        )
    machines = len(set(probe.machines))
    # Fake devices share one machine, whose figures the planner divides; where their links differ the file says what
    # each has.
    shared = probe.platform == "cpu" and links.keys() <= {"node"}
    ways = probe.size if shared else 1
    described = {
        "name": f"measured-{probe.kind}",
        "nodes": machines,
        "devices_per_node": probe.size // machines,
        "shared": shared,
        "topology": "flat" if machines == 1 else "fat_tree",
        "accelerator": {"name": probe.kind}
        | (
            _shares(probe.kind, devices)
            if knows(probe)
            else _figures(probe, devices, ways)
        ),
        "links": {name: _link(name, level) for name, level in links.items()},
    }
    if (together := cluster_pairs(probe)) and probe.names:
        described["device_order"] = [probe.names[device] for device in together.order]
    return yaml.safe_dump(described, sort_keys=False)


def knows(probe: Probe) -> bool:
    """Returns whether the planner has a data sheet of the devices; a CPU's is of another machine."""
    return probe.kind in ACCELERATORS and probe.platform != "cpu"


def _shares(kind: str, devices: Devices) -> dict[str, Any]:
    sheet = ACCELERATORS[kind]
    full = replace(sheet, efficiency=replace(sheet.efficiency, matmul=1.0))
    seconds = product(full, devices.dtype, devices.side, devices.side, devices.side)
    reached = {
        "matmul": devices.matmul[devices.dtype] * seconds / (2 * devices.side**3),
        "memory": devices.memory_rate / (sheet.bandwidth * 1e9),
        "link": 1.0,
    }
    efficiency = {
        name: _short(min(max(share, 0.001), 1.0)) for name, share in reached.items()
    }
    return {
        "memory": _short(devices.memory_bytes / 2**30),
        "reserved": 0.0,
        "efficiency": efficiency,
    }


def _figures(probe: Probe, devices: Devices, ways: int) -> dict[str, Any]:
    return {
        "platform": probe.platform,
        "memory": _short(devices.memory_bytes * ways / 2**30),
        "bandwidth": _short(devices.memory_rate * ways / 1e9),
        "peak": {
            dtype: _short(rate * ways / 1e12) for dtype, rate in devices.matmul.items()
        },
        "efficiency": {
            "matmul": 1.0,
            "half_size": 0.0,
            "attention": 0.5,
            "memory": 1.0,
            "link": 1.0,
            "exposed": 1.0,
        },
    }


def _link(name: str, level: Level) -> dict[str, float]:
    """Within the bounds that the planner sets, which only a machine that does other things is beyond."""
    bounds = keys(Link if name in INSIDE else Cable)
    link: dict[str, float] = {"devices": level.devices}
    for key, figure in (
        ("latency", level.latency),
        ("bandwidth", level.bandwidth / 1e9),
    ):
        least = bounds[key].least
        most = bounds[key].most
        assert least is not None and most is not None
        link[key] = _short(min(max(figure, least), most))
    return link


def _short(number: float) -> float:
    return float(f"{number:.3g}")
