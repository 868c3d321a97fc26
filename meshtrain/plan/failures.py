"""The cost of failures: mean time between them, how often to write a checkpoint, and how much of the time is left for
training.

Failures of devices are taken to be independent and memoryless, at a constant rate a device-hour.

    work τ        copy C   work τ        copy C   ...        training stands still for the copies
                           write W ┤              write W ┤   what a copy holds counts once it is written

The loss is flat around the best interval, and a store is shared: advised is the longest interval, up to an hour, that
gives up at most `GIVEN_UP` of the time.

A checkpoint begins when the one before is written, so that a round takes L = max(τ, W) + C. A failure
loses the checkpoint that it finds half written and all work since: L/2 + min(τ, W) on average, to first order.
"""

import math
from dataclasses import dataclass

from meshtrain.cluster.cluster import Cluster
from meshtrain.plan import memory
from meshtrain.plan.estimate import Plan, save_seconds

GIVEN_UP = 0.005  # of all time, below the best interval's share
HOUR = 3600.0
DAY = 86400.0


def mean_time_between(rate: float, devices: int) -> float:
    """Seconds between failures of any of `devices`, each failing `rate` times an hour."""
    return 3600 / (rate * devices) if rate else math.inf


def young(copy: float, between: float) -> float:
    """Seconds of work between checkpoints that lose least, to first order (Young 1974): sqrt(2 C M)."""
    return math.sqrt(2 * copy * between)


def daly(copy: float, between: float) -> float:
    """The interval of `young` to higher order (Daly 2006, equation 37); M where the copy takes twice as long or
    more.
    """
    if copy >= 2 * between or math.isinf(between):
        return between
    x = math.sqrt(copy / (2 * between))
    return young(copy, between) * (1 + x / 3 + x * x / 9) - copy


def best_interval(copy: float, write: float, between: float) -> float:
    """Seconds of work between checkpoints that lose least where each stops training for `copy` and is `write` later on
    disk.

    While τ is more than W the share that W costs is exp(-W/M), whatever τ: Daly's interval stays. While it is less, a
    round takes W + C however little is done in it, and `goodput` grows with τ up to M.
    """
    return max(daly(copy, between), min(write, between))


def advised_interval(
    copy: float, write: float, restart: float, between: float
) -> float:
    """The longest interval, to a twentieth, that leaves `GIVEN_UP` less for training than the best, or more; beyond the
    best an hour at most, since few devices fail seldom and nobody likes to lose a day.
    """
    best = best_interval(copy, write, between)
    least = goodput(best, copy, restart, between, write) - GIVEN_UP
    interval = best
    while (
        interval * 1.05 <= max(best, HOUR)
        and goodput(interval * 1.05, copy, restart, between, write) >= least > 0
    ):
        interval *= 1.05
    return interval


def goodput(
    interval: float, copy: float, restart: float, between: float, write: float = 0.0
) -> float:
    """Share of the time that goes into steps that count: exact for memoryless failures.

    Work of `interval` seconds and a copy of `copy`, again until done, each written in `write` seconds beside what
    follows; a failure costs what was not written and a restart, which may fail too. With a
    mean life of M seconds, N checkpoints or more are written with probability exp(-(τ + C + W + (N - 1) L)/M). A
    restart makes the life M exp(R/M).
    With W = 0 this is equation 20 of Daly 2006.
    """
    around = max(interval, write) + copy
    if math.isinf(between):
        return interval / around
    if max(around, restart) / between > 700:
        return 0.0
    written = math.exp(-min(interval, write) / between) / math.expm1(around / between)
    return interval * written / (between * math.exp(restart / between))


def lost(interval: float, copy: float, between: float, write: float = 0.0) -> float:
    """Seconds before a failure that count for nothing, on average: a life of M without the rounds whose checkpoint was
    written.
    """
    around = max(interval, write) + copy
    if around / between > 700:
        return between
    return between - around * math.exp(-min(interval, write) / between) / math.expm1(
        around / between
    )


def survival(needed: int, devices: int, rate: float, hours: float) -> float:
    """Probability that at least `needed` of `devices` work for `hours` without a failure: the binomial's upper tail."""
    from scipy.special import bdtr  # only here: it starts slowly

    failing = -math.expm1(-rate * hours)
    # bdtr(k, n, p): of n at most k fail
    return float(bdtr(devices - needed, devices, failing)) if needed <= devices else 0.0


@dataclass(frozen=True)
class FailureCosts:
    """Failures of a plan's devices and what they leave of its time. Times in seconds."""

    between: float
    copy: float  # for which a checkpoint stops training
    write: float  # from then on, until it counts
    interval: float  # best
    interval_steps: int  # advised
    bytes_a_day: float  # that are then written
    lost: float  # by a failure at the advised interval, restart not counted
    goodput: float  # at the advised interval; evaluations do not count
    configured_goodput: float | None  # at checkpoint.every; none when that is 0
    # Further nodes with which the job is 99% sure to have its devices for a day without repairs
    spares: int


def faults(plan: Plan) -> FailureCosts:
    """Failures of a plan on its cluster."""
    cluster = plan.cluster
    devices = plan.devices
    between = mean_time_between(cluster.failures_per_device_hour, devices)
    restart = cluster.restart_seconds
    saved = memory.saved(plan.memory)
    copy, write = save_seconds(cluster, devices, saved)
    interval = best_interval(copy, write, between)
    step = plan.seconds - plan.time.checkpoint
    steps = 0
    if math.isfinite(between):
        advised = advised_interval(copy, write, restart, between)
        steps = max(1, round(advised / step), math.ceil(min(write, between) / step))
    every = plan.config.checkpoint.every
    trained = 1 - plan.time.evaluation / step
    return FailureCosts(
        between=between,
        copy=copy,
        write=write,
        interval=interval,
        interval_steps=steps,
        bytes_a_day=saved * devices * DAY / (max(steps * step, write) + copy)
        if steps
        else 0.0,
        lost=lost(steps * step, copy, between, write) if steps else 0.0,
        goodput=trained
        * (goodput(steps * step, copy, restart, between, write) if steps else 1.0),
        configured_goodput=trained
        * goodput(every * step, copy, restart, between, write)
        if every
        else None,
        spares=spares(cluster, devices, hours=24.0),
    )


def spares(cluster: Cluster, devices: int, hours: float) -> int:
    """Nodes beyond those needed so that with probability 0.99 enough are left after `hours`."""
    needed = math.ceil(devices / cluster.devices_per_node)
    rate = cluster.failures_per_device_hour * cluster.devices_per_node
    extra = 0
    while survival(needed, needed + extra, rate, hours) < 0.99:
        extra += 1
    return extra
