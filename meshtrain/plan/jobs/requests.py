"""The shapes that a job may take, each so many nodes with as many devices in every one, and how fast it is where it
lies.

Nodes share a run's devices evenly (`meshtrain.launch`), and a tensor axis that a node can hold stays inside one. A job
takes as few nodes as it can, or up to twice as many where those are not free.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshtrain.cluster.cluster import Cluster, resized
from meshtrain.config import Config, ConfigError, load
from meshtrain.config.follow import differences
from meshtrain.config.values import as_text
from meshtrain.plan import advice
from meshtrain.plan.estimate import Plan, estimate
from meshtrain.plan.jobs.listed import Jobs, JobSpec
from meshtrain.plan.search import search

MOST_SPREAD = 2  # times the fewest nodes that would do


@dataclass(frozen=True)
class JobShape:
    """`nodes` nodes with `each` devices in every one; the config is None where only the devices are known."""

    nodes: int
    each: int
    config: Config | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.each


@dataclass(frozen=True, eq=False)
class JobRequest:
    """A job and its shapes, best first; without any the sentence that says why."""

    job: JobSpec
    shapes: tuple[JobShape, ...]
    reason: str = ""
    # One for each number of devices, on nodes side by side
    plans: tuple[Plan, ...] = ()


@dataclass(frozen=True)
class Speeds:
    """Seconds of a step by shape and place; those that were asked for once are kept."""

    cluster: Cluster
    known: dict[tuple[JobShape, Cluster], Plan] = field(default_factory=dict)

    def plan_on(self, shape: JobShape, devices: Sequence[int]) -> Plan | None:
        """The plan of a shape on these devices of the cluster, numbered through all nodes."""
        if shape.config is None:
            return None
        sizes = tuple(
            _share(devices, link.devices) for _, link in self.cluster.levels()
        )
        place = _view_cluster(self.cluster, shape, sizes)
        if (shape, place) not in self.known:
            self.known[shape, place] = estimate(shape.config, place)
        return self.known[shape, place]

    def side_by_side(self, shape: JobShape) -> Plan | None:
        """The plan of a shape where no other job is: on the first nodes, or evenly in the fewest blocks of links,
        whichever is faster.
        """
        block = first_block(self.cluster)
        per_node = self.cluster.devices_per_node
        blocks = math.ceil(shape.nodes / block)
        layouts: list[Sequence[int]] = [range(shape.nodes)]
        if shape.nodes % blocks == 0:
            inside = range(shape.nodes // blocks)
            evenly = [at * block + node for at in range(blocks) for node in inside]
            # The last block may be smaller.
            layouts += [evenly] if evenly[-1] < self.cluster.nodes else []
        plans = [
            self.plan_on(
                shape, [n * per_node + d for n in nodes for d in range(shape.each)]
            )
            for nodes in layouts
        ]
        return min(
            (plan for plan in plans if plan),
            key=lambda plan: plan.seconds,
            default=None,
        )


def _share(devices: Sequence[int], block: int) -> int:
    """Devices in a block of a level: the fewest of any block that they touch, since the slowest sets the pace."""
    counts = Counter(device // block for device in devices)
    return block if len(counts) == 1 else min(counts.values())


@functools.lru_cache(maxsize=4096)
def _view_cluster(cluster: Cluster, shape: JobShape, sizes: tuple[int, ...]) -> Cluster:
    """The cluster as the devices of a job see it: of each level the devices of its own that a block holds."""
    levels: dict[str, Any] = {
        name: replace(link, devices=size)
        for (name, link), size in zip(cluster.levels(), sizes, strict=True)
    }
    return replace(
        cluster,
        nodes=shape.nodes,
        devices_per_node=shape.each,
        links=replace(cluster.links, **levels),
    )


def requests(jobs: Jobs, cluster: Cluster, speeds: Speeds) -> list[JobRequest]:
    """The requests of all jobs, in the order of the file."""
    return [_request(job, jobs.goal, cluster, speeds) for job in jobs.jobs]


def first_block(cluster: Cluster) -> int:
    """Nodes in a block of the lowest level above a node; all of them where no level divides them."""
    sizes = [link.devices // cluster.devices_per_node for _, link in cluster.levels()]
    return next((size for size in sizes if 1 < size < cluster.nodes), cluster.nodes)


def configured(job: JobSpec) -> Config:
    """The config of a job that has one."""
    try:
        return load(job.config, job.set, reading=True)
    except ConfigError as error:
        raise ConfigError(f"job {job.name}: {error}") from None


def wanted(job: JobSpec) -> int:
    """The most devices that a job may take."""
    if job.any_of:
        return max(job.any_of)
    return job.devices or configured(job).mesh.devices


class _DoesNotFit(Exception):
    """The reason why a job has no shape, without a full stop."""


def _request(job: JobSpec, goal: str, cluster: Cluster, speeds: Speeds) -> JobRequest:
    reasons = list[str]()
    plans = list[Plan]()
    shapes = list[JobShape]()
    for devices in dict.fromkeys(job.any_of or (wanted(job),)):
        try:
            legal = _legal(job, devices, cluster)
        except _DoesNotFit as reason:
            reasons.append(str(reason))
            continue
        if plan := speeds.side_by_side(legal[0]):
            plans.append(plan)
        shapes += legal

    def tokens_per_second(shape: JobShape) -> float:
        plan = speeds.side_by_side(shape) if goal != "utilisation" else None
        return plan.tokens_per_second if plan else 0.0

    shapes.sort(
        key=lambda shape: (-tokens_per_second(shape), -shape.devices, shape.nodes)
    )
    return JobRequest(
        job,
        tuple(shapes),
        "" if shapes else "; ".join(dict.fromkeys(reasons)),
        tuple(plans),
    )


def _legal(job: JobSpec, devices: int, cluster: Cluster) -> list[JobShape]:
    """The shapes to take so many devices, those of the fewest nodes first."""
    per_node = cluster.devices_per_node
    if devices > cluster.devices:
        raise _DoesNotFit(
            f"it takes {devices} devices, and {cluster.name} has {cluster.devices}"
        )
    sizes = [
        (devices // each, each)
        for each in range(min(devices, per_node), 0, -1)
        if devices % each == 0 and devices // each <= cluster.nodes
    ]
    if not sizes:
        raise _DoesNotFit(
            f"{devices} devices do not divide into at most {cluster.nodes} nodes of {per_node}"
        )
    least = sizes[0][0]
    sizes = [(nodes, each) for nodes, each in sizes if nodes <= MOST_SPREAD * least]
    if job.together:
        block = first_block(cluster)
        sizes = [
            (nodes, each)
            for nodes, each in sizes
            if nodes <= (1 if devices <= per_node else block)
        ]
        if not sizes:
            raise _DoesNotFit(
                f"together it takes {least} nodes of one block of links, and a block has {block}"
            )
    if not job.config:
        return [JobShape(*sizes[0])]
    config = _layout(job, devices, cluster)
    wanted_nodes = config.survive.wanted
    inside = [each for _, each in sizes if each % config.mesh.tensor == 0] or [
        sizes[0][1]
    ]
    shapes = [
        JobShape(n, each, config)
        for n, each in sizes
        if each in inside and wanted_nodes in (1, n)
    ]
    if not shapes:
        raise _DoesNotFit(
            f"its config is for {wanted_nodes} nodes (survive.wanted), which cannot share its {devices} devices"
        )
    return shapes


def _layout(job: JobSpec, devices: int, cluster: Cluster) -> Config:
    """The config on so many devices: its own mesh, or the fastest layout that fits."""
    config = configured(job)
    cluster = resized(cluster, devices)
    if not job.devices and not job.any_of:
        plan = estimate(config, cluster)
        if not plan.fits:
            raise _DoesNotFit(advice.sentence(plan, advice.cheapest(plan)).rstrip("."))
        return config
    try:
        fastest = _fastest(config, cluster, devices)
    except ConfigError as error:
        raise _DoesNotFit(str(error).rstrip(".")) from None
    if fastest is None:
        device = cluster.accelerator
        raise _DoesNotFit(
            f"no layout on {devices} devices fits into the {device.usable_bytes / 2**30:.1f} GiB that {device.name} "
            "has for it"
        )
    return fastest


@functools.lru_cache(maxsize=256)
def _fastest(config: Config, cluster: Cluster, devices: int) -> Config | None:
    plans = search(config, cluster, devices, best=1).plans
    return plans[0].config if plans else None


def settings(before: Config, after: Config) -> list[str]:
    """Settings for `--set` that make one config of another that a search found: only mesh and parallel differ."""
    changed = differences(asdict(before), asdict(after))
    return [
        f"{path}={as_text(value)}"
        for path, _, value in changed
        if path.startswith(("mesh.", "parallel."))
    ]


def hours(job: JobSpec, plan: Plan | None) -> float:
    """Returns how long a job runs where its plan is; infinite if nothing says so."""
    if job.hours:
        return job.hours
    if plan is None:
        return math.inf
    return plan.seconds * (job.steps or plan.config.train.steps) / 3600
