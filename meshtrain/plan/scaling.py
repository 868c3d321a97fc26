"""How a layout scales: the same batch on more devices (strong), or a batch that grows with them (weak).

Tensor and pipeline stay as they are and the data axis grows, which is how a run is made larger. Amdahl's law (1967)
knows only the part that does not shrink; here every term has its own law: compute falls with the share of the batch,
the bubble stays where microbatches run out, collectives over data grow with the number of hops.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshtrain.cluster.cluster import Cluster, resized
from meshtrain.config import Config, ConfigError, check, replaced
from meshtrain.config.follow import microbatch_rows
from meshtrain.plan.estimate import Plan, estimate

MOST_DEVICES = 16384


@dataclass(frozen=True, eq=False)
class Point:
    """A size of the run; `efficiency` is throughput a device over that of the smallest size."""

    devices: int
    plan: Plan
    efficiency: float

    @property
    def serial(self) -> float:
        """Share of the step that a smaller share of the batch does not shorten: Amdahl's serial part."""
        spent = self.plan.time
        return (
            spent.data + spent.bubble + spent.optimizer + spent.checkpoint
        ) / spent.total


def strong(config: Config, cluster: Cluster, most: int = MOST_DEVICES) -> list[Point]:
    """The config's batch on more and more devices, until the data axis has no sequence left to share."""
    return _points(_grow(config, most), cluster)


def weak(config: Config, cluster: Cluster, most: int = MOST_DEVICES) -> list[Point]:
    """The config's share of the batch on every data rank, on more and more devices."""
    mesh = config.mesh
    batch = config.train.global_batch_size
    factors = [2**k for k in range(most.bit_length()) if mesh.devices << k <= most]
    larger = (
        replaced(
            config, mesh={"data": n * mesh.data}, train={"global_batch_size": n * batch}
        )
        for n in factors
    )
    return _points(larger, cluster)


def _grow(config: Config, most: int) -> Iterator[Config]:
    model_parallel = config.mesh.devices // config.mesh.data
    batch = config.train.global_batch_size
    data = config.mesh.data
    pads = config.train.uneven_batch == "pad"
    size = microbatch_rows(config)  # kept as long as it can be
    while data * model_parallel <= most and (
        batch % data == 0 or (pads and data <= batch)
    ):
        microbatches = (
            math.ceil(batch / data / size) if pads else max(1, batch // data // size)
        )
        if pads or batch // data % microbatches == 0:
            yield replaced(
                config, mesh={"data": data}, parallel={"microbatches": microbatches}
            )
        data *= 2


def _points(configs: Iterable[Config], cluster: Cluster) -> list[Point]:
    points: list[Point] = []
    for config in configs:
        # A schedule's own table has one number of microbatches, which not every size of the run has.
        try:
            check(config)
            planned = estimate(config, grown(cluster, config.mesh.devices))
        except ConfigError:
            continue
        each = planned.tokens_per_second / planned.devices
        first = points[0].plan.tokens_per_second / points[0].devices if points else each
        points.append(Point(planned.devices, planned, each / first))
    return points


def grown(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with more nodes of the same kind if it has fewer devices."""
    return cluster if cluster.devices >= devices else resized(cluster, devices)
