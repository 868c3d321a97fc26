"""The ways to run a job, each so many nodes with as many devices in every one, and how fast it is where it lies.

Nodes share a run's devices evenly (`meshtrain.launch`), and a tensor axis that a node can hold stays inside one. A job takes as few
nodes as it can, or up to twice as many where those are not free.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshtrain.config import Config, ConfigError, load
from meshtrain.config.follow import differences
from meshtrain.plan import advice
from meshtrain.plan.cluster.cluster import Cluster, resized
from meshtrain.plan.estimate import Plan, estimate
from meshtrain.plan.jobs.listed import Job, Jobs
from meshtrain.plan.search import search

MOST_SPREAD = 2  # times the fewest nodes that would do


@dataclass(frozen=True)
class Way:
    """`nodes` nodes with `each` devices in every one; the config is None where only the devices are known."""

    nodes: int
    each: int
    config: Config | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.each


@dataclass(frozen=True, eq=False)
class Request:
    """A job and its ways, best first; without any the sentence that says why."""

    job: Job
    ways: tuple[Way, ...]
    reason: str = ""
    plans: tuple[Plan, ...] = ()  # one for each number of devices, on nodes side by side


@dataclass(frozen=True)
class Speeds:
    """Seconds of a step by way and place; those that were asked for once are kept."""

    cluster: Cluster
    known: dict[tuple[Way, Cluster], Plan] = field(default_factory=dict)

    def at(self, way: Way, devices: Sequence[int]) -> Plan | None:
        """The plan of a way on these devices of the cluster, numbered through all nodes."""
        if way.config is None:
            return None
        sizes = tuple(_share(devices, link.devices) for _, link in self.cluster.levels())
        place = _seen(self.cluster, way, sizes)
        if (way, place) not in self.known:
            self.known[way, place] = estimate(way.config, place)
        return self.known[way, place]

    def side_by_side(self, way: Way) -> Plan | None:
        """The plan of a way where none else is: on the first nodes, or evenly in the fewest blocks of links, whichever is faster."""
        block, per_node = first_block(self.cluster), self.cluster.devices_per_node
        blocks = math.ceil(way.nodes / block)
        layouts: list[Sequence[int]] = [range(way.nodes)]
        if way.nodes % blocks == 0:
            inside = range(way.nodes // blocks)
            evenly = [at * block + node for at in range(blocks) for node in inside]
            # The last block may be smaller.
            layouts += [evenly] if evenly[-1] < self.cluster.nodes else []
        plans = [self.at(way, [n * per_node + d for n in nodes for d in range(way.each)]) for nodes in layouts]
        return min((plan for plan in plans if plan), key=lambda plan: plan.seconds, default=None)


def _share(devices: Sequence[int], block: int) -> int:
    """Devices in a block of a level: the fewest of any block that they touch, since the slowest sets the pace."""
    counts = Counter(device // block for device in devices)
    return block if len(counts) == 1 else min(counts.values())


@functools.lru_cache(maxsize=4096)
def _seen(cluster: Cluster, way: Way, sizes: tuple[int, ...]) -> Cluster:
    """The cluster as the devices of a job see it: of each level the devices of its own that a block holds."""
    levels: dict[str, Any] = {
        name: replace(link, devices=size) for (name, link), size in zip(cluster.levels(), sizes, strict=True)
    }
    return replace(cluster, nodes=way.nodes, devices_per_node=way.each, links=replace(cluster.links, **levels))


def requests(jobs: Jobs, cluster: Cluster, speeds: Speeds) -> list[Request]:
    """What each job asks for, in the order of the file."""
    block = first_block(cluster)
    return [_request(job, jobs, cluster, speeds, block) for job in jobs.jobs]


def first_block(cluster: Cluster) -> int:
    """Nodes in a block of the lowest level above a node; all of them where no level divides them."""
    sizes = [link.devices // cluster.devices_per_node for _, link in cluster.levels()]
    return next((size for size in sizes if 1 < size < cluster.nodes), cluster.nodes)


def configured(job: Job) -> Config:
    """The config of a job that has one."""
    try:
        return load(job.config, job.set)
    except ConfigError as error:
        raise ConfigError(f"job {job.name}: {error}") from None


def wanted(job: Job) -> int:
    """The most devices that a job may take."""
    return max(job.any_of) if job.any_of else job.devices or configured(job).mesh.devices


def _request(job: Job, jobs: Jobs, cluster: Cluster, speeds: Speeds, block: int) -> Request:
    reasons, plans, ways = list[str](), list[Plan](), list[Way]()
    for devices in dict.fromkeys(job.any_of or (wanted(job),)):
        legal, reason = _legal(job, devices, cluster, block)
        if legal and legal[0].config is not None:
            plan = speeds.side_by_side(legal[0])
            assert plan is not None
            plans.append(plan)
        ways += legal
        reasons += [reason] if reason else []
    if jobs.goal == "utilisation":
        ways.sort(key=lambda way: (-way.devices, way.nodes))
    else:
        ways.sort(key=lambda way: (-_rate(way, speeds), -way.devices, way.nodes))
    return Request(job, tuple(ways), "" if ways else "; ".join(dict.fromkeys(reasons)), tuple(plans))


def _rate(way: Way, speeds: Speeds) -> float:
    """Tokens a second where it lies best."""
    plan = speeds.side_by_side(way)
    return plan.tokens_per_second if plan else 0.0


def _legal(job: Job, devices: int, cluster: Cluster, block: int) -> tuple[list[Way], str]:
    """The ways to take so many devices, those of the fewest nodes first; or the reason why there is none."""
    if devices > cluster.devices:
        return [], f"it takes {devices} devices, and {cluster.name} has {cluster.devices}"
    shapes = _shapes(devices, cluster)
    if not shapes:
        return [], f"{devices} devices do not divide into at most {cluster.nodes} nodes of {cluster.devices_per_node}"
    if job.together:
        least = shapes[0][0]
        most = 1 if devices <= cluster.devices_per_node else block
        shapes = [shape for shape in shapes if shape[0] <= most]
        if not shapes:
            return [], f"together it takes {least} nodes of one block of links, and a block has {block}"
    if not job.config:
        return [Way(*shapes[0])], ""
    config, reason = _layout(job, devices, cluster)
    if config is None:
        return [], reason
    tensor, survive = config.mesh.tensor, config.survive
    held = [each for _, each in shapes if each % tensor == 0] or [shapes[0][1]]
    ways = [Way(nodes, each, config) for nodes, each in shapes if each in held and survive.wanted in (1, nodes)]
    if not ways:
        return (
            [],
            f"its config is for {survive.wanted} nodes (survive.wanted), which cannot share its {devices} devices",
        )
    return ways, ""


def _shapes(devices: int, cluster: Cluster) -> list[tuple[int, int]]:
    """Every (nodes, devices in each) that shares the devices evenly, fewest nodes first."""
    per_node = cluster.devices_per_node
    found = [
        (devices // each, each) for each in range(min(devices, per_node), 0, -1)
        if devices % each == 0 and devices // each <= cluster.nodes
    ]  # fmt: skip
    return [(nodes, each) for nodes, each in found if nodes <= MOST_SPREAD * found[0][0]]


def _layout(job: Job, devices: int, cluster: Cluster) -> tuple[Config | None, str]:
    """The config on so many devices: its own mesh, or the fastest layout that fits."""
    config = configured(job)
    if not job.devices and not job.any_of:
        plan = estimate(config, resized(cluster, devices))
        return (config, "") if plan.fits else (None, advice.sentence(plan, advice.cheapest(plan)).rstrip("."))
    try:
        found = _searched(config, resized(cluster, devices), devices)
    except ConfigError as error:
        return None, str(error).rstrip(".")
    if found is None:
        usable = cluster.accelerator.usable_bytes / 2**30
        return (
            None,
            f"no layout on {devices} devices fits into the {usable:.1f} GiB that {cluster.accelerator.name} has for it",
        )
    return found, ""


@functools.lru_cache(maxsize=256)
def _searched(config: Config, cluster: Cluster, devices: int) -> Config | None:
    plans = search(config, cluster, devices, best=1).plans
    return plans[0].config if plans else None


def settings(before: Config, after: Config) -> list[str]:
    """What `--set` takes to make one config of another that a search found: only mesh and parallel differ."""
    changed = differences(asdict(before), asdict(after))
    return [f"{path}={_text(value)}" for path, _, value in changed if path.startswith(("mesh.", "parallel."))]


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def hours(job: Job, plan: Plan | None) -> float:
    """How long a job runs where its plan is; infinite where nothing says so."""
    if job.hours:
        return job.hours
    if plan is None:
        return math.inf
    return plan.seconds * (job.steps or plan.config.train.steps) / 3600
