"""What failures cost: mean time between them, how often to write a checkpoint, and how much of the time is left for training.

Failures of devices are taken to be independent and memoryless, at a constant rate a device-hour.
"""

import math
from dataclasses import dataclass

from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.estimate import Plan


def mean_time_between(rate: float, devices: int) -> float:
    """Seconds between failures of any of `devices`, each failing `rate` times an hour."""
    return 3600 / (rate * devices) if rate else math.inf


def young(write: float, between: float) -> float:
    """Seconds of work between checkpoints that lose least, to first order (Young 1974): sqrt(2 C M)."""
    return math.sqrt(2 * write * between)


def daly(write: float, between: float) -> float:
    """The same to higher order (Daly 2006, equation 37); M where the write takes more than half of it."""
    if write >= 2 * between or math.isinf(between):
        return between
    x = math.sqrt(write / (2 * between))
    return math.sqrt(2 * write * between) * (1 + x / 3 + x * x / 9) - write


def goodput(interval: float, write: float, restart: float, between: float) -> float:
    """Share of the time that goes into steps that count (Daly 2006, equation 20): exact for memoryless failures.

    Work of `interval` seconds, then a write of `write`, again until done; a failure costs what was not written and a
    restart, which may fail too.
    """
    if math.isinf(between):
        return interval / (interval + write)
    exponent = (interval + write) / between
    if exponent > 700 or restart / between > 700:
        return 0.0
    return interval / (between * math.exp(restart / between) * math.expm1(exponent))


def survival(needed: int, devices: int, rate: float, hours: float) -> float:
    """Probability that at least `needed` of `devices` work for `hours` without a failure: the binomial's upper tail."""
    if needed <= 0:
        return 1.0
    if needed > devices:
        return 0.0
    p = math.exp(-rate * hours)
    if p == 1.0:
        return 1.0
    logs = [
        math.lgamma(devices + 1) - math.lgamma(k + 1) - math.lgamma(devices - k + 1)
        + k * math.log(p) + (devices - k) * math.log1p(-p)
        for k in range(needed, devices + 1)
    ]  # fmt: skip
    top = max(logs)
    return min(1.0, math.exp(top) * math.fsum(math.exp(x - top) for x in logs))


@dataclass(frozen=True)
class Faults:
    """Failures of a plan's devices and what they leave of its time. Times in seconds."""

    between: float
    write: float  # for which a checkpoint stops training
    interval: float  # best, by Daly
    interval_steps: int
    goodput: float  # at the best interval
    configured_goodput: float | None  # at checkpoint.every; none when that is 0
    spares: int  # further nodes with which the job is 99% sure to have its devices for a day without repairs


def faults(plan: Plan) -> Faults:
    """Failures of a plan on its cluster."""
    cluster, devices = plan.cluster, plan.devices
    between = mean_time_between(cluster.failures_per_device_hour, devices)
    write = sum(item.nbytes for item in plan.memory if item.between_steps) / (cluster.host_bandwidth * 1e9)
    interval = daly(write, between)
    step = plan.seconds - plan.time.checkpoint
    steps = max(1, round(interval / step)) if math.isfinite(interval) else 0
    every = plan.config.checkpoint.every
    restart = cluster.restart_seconds
    return Faults(
        between=between,
        write=write,
        interval=interval,
        interval_steps=steps,
        goodput=goodput(steps * step, write, restart, between) if steps else 1.0,
        configured_goodput=goodput(every * step, write, restart, between) if every else None,
        spares=spares(cluster, devices, hours=24.0),
    )


def spares(cluster: Cluster, devices: int, hours: float, sure: float = 0.99) -> int:
    """Nodes beyond those needed so that with probability `sure` enough are left after `hours`."""
    needed = math.ceil(devices / cluster.devices_per_node)
    rate = cluster.failures_per_device_hour * cluster.devices_per_node
    extra = 0
    while survival(needed, needed + extra, rate, hours) < sure:
        extra += 1
    return extra
