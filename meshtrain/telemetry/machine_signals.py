"""What the rules on processes and their machines look at: memory, disk, ranks that keep the others waiting, where an hour went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, NamedTuple

from meshtrain.survive.beat import HOST, KIND_OF
from meshtrain.telemetry.signals import STEPPING, Heard, Reading, Row, Signal, number
from meshtrain.telemetry.thresholds import BY_RULE, FILLING_FROM, FILLING_OVER, HOUR, LEAST_JUDGED, ROOM, SAMPLES

BETWEEN = 10.0  # seconds between two looks at the disk that are kept
FAR = 24 * 365.0  # hours: longer than that is never
MOST_WAITING = 10_000  # samples of ranks that are not looked at yet


@dataclass(frozen=True)
class Memory(Signal):
    """Of each rank: its devices, its cgroup; and its machine, of which the rank tells that was heard of it first."""

    tells: Mapping[str, int] = field(default_factory=dict)  # rank by host

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        if heard != "process":
            return self, ()
        rank = row.get("rank", 0)
        host, where = str(row.get("host")), f"rank {rank}{_host(row)}"
        after = self if host in self.tells else replace(self, tells={**self.tells, host: rank})
        found = {"memory_limit": (number(row, "memory_limit_used_ratio"), f"of the memory that it may use, {where}")}
        if after.tells[host] == rank:
            found["machine_memory"] = number(row, "memory_used_ratio"), f"of its memory, the machine of {where}"
        if devices := _devices(row):
            name, used = max(devices.items(), key=lambda one: one[1])
            found["device_memory"] = used, f"of its memory, device {name} of {where}"
        readings = []
        for rule, (ratio, who) in found.items():
            if ratio is not None:
                words = f"{who} has {ratio:.0%} in use"
                readings.append(Reading(rule, ratio, words, words, rank))
        return after, readings


def _devices(row: Row) -> dict[str, float]:
    """Memory used over the limit by device, of those of which both are known."""
    used, limit = row.get("device_memory_used_bytes"), row.get("device_memory_limit_bytes")
    if not isinstance(used, Mapping) or not isinstance(limit, Mapping):
        return {}
    known = {name: (number(used, name), number(limit, name)) for name in used}
    return {name: a / b for name, (a, b) in known.items() if a is not None and b}


@dataclass(frozen=True)
class Disk(Signal):
    """Of the run directory, which all ranks share, as the first one sees it: room for the next save, and hours until it is full.

    The slope is that between the medians of the window's first and last third: saves that come and go are no slope.
    """

    free: tuple[tuple[float, float], ...] = ()  # (time, bytes)
    save: float = 0.0  # bytes of the newest checkpoint

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        if heard == "step":
            save = number(row, "checkpoint_bytes")
            return (self if save is None else replace(self, save=save)), ()
        if heard == "tick" or row.get("rank", 0) != 0 or (free := number(row, "disk_free_bytes")) is None:
            return self, ()
        need = max(ROOM, self.save)
        words = f"the run's disk has {_size(free)} free, and {_size(need)} are needed for the next save and for rows"
        readings = [Reading("disk_space", free / need, words, words)]
        points = self.free
        if not points or now - points[-1][0] >= BETWEEN:
            points = (*(point for point in points if now - point[0] <= HOUR), (now, free))
        used = number(row, "disk_used_ratio")
        if (slope := _slope(points)) is not None:
            hours = min(FAR, free / -slope / HOUR) if slope < 0 and (used is None or used > FILLING_FROM) else FAR
            words = f"the run's disk is full in {hours:.1f} hours at the pace of the last ones: {_size(free)} are free"
            over = f"the run's disk, with {_size(free)} free, no longer fills up soon"
            readings.append(Reading("disk_filling", hours, words, over))
        return replace(self, free=points), readings


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Bytes a second; None if the points lie too close together to tell."""
    if len(points) < 3 or points[-1][0] - points[0][0] < FILLING_OVER:
        return None
    third = len(points) // 3
    first, last = points[:third], points[-third:]
    seconds = median_low([t for t, _ in last]) - median_low([t for t, _ in first])
    return (median_low([b for _, b in last]) - median_low([b for _, b in first])) / seconds


class Sample(NamedTuple):
    """Of a rank: its seconds in each of STEPPING, the last of which is waiting. `earlier`: the one that came before, of whatever rank."""

    rank: int
    host: str
    seconds: tuple[float, ...]
    earlier: Any  # a Sample, or None
    waiting: int  # how many they are


@dataclass(frozen=True)
class SlowRank(Signal):
    """Ranks that are longer on their host than the quickest one, while that waits for them: in SPMD steps take equally long for all.

    A score is 1 less the difference of the shares that host phases have in a rank's steps, over its last samples.
    """

    ranks: Mapping[int, tuple[Sample, ...]] = field(default_factory=dict)
    # Since the last round: of thousands of ranks nothing is copied for each.
    newest: Sample | None = None
    watched: frozenset[int] = frozenset()  # whose score was ever not good: of the others nothing need be said

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        if heard != "process" or not isinstance(phases := row.get("phase_seconds"), Mapping):
            return self, ()
        seconds = tuple(float(phases.get(phase, 0.0)) for phase in STEPPING)
        waiting = self.newest.waiting + 1 if self.newest else 1
        after = replace(self, newest=Sample(row.get("rank", 0), _host(row), seconds, self.newest, waiting))
        # Once a round, with the first one's sample; should that one sample no more, before they become too many.
        return after._look() if row.get("rank", 0) == 0 or waiting >= MOST_WAITING else (after, ())

    def _look(self) -> "tuple[SlowRank, Sequence[Reading]]":
        ranks, new, sample = dict(self.ranks), [], self.newest
        while sample is not None:
            new.append(sample._replace(earlier=None))
            sample = sample.earlier
        for one in reversed(new):
            ranks[one.rank] = (*ranks.get(one.rank, ()), one)[-SAMPLES:]
        shares = {}
        for rank, samples in ranks.items():
            *host, wait = (sum(spent) for spent in zip(*(one.seconds for one in samples), strict=True))
            if len(samples) >= SAMPLES // 2 and (whole := sum(host) + wait) > 0:
                shares[rank] = 1 - wait / whole, HOST[host.index(max(host))]
        least = min((share for share, _ in shares.values()), default=0.0)
        threshold, watched, readings = BY_RULE["slow_rank"], set(self.watched), []
        for rank, (share, phase) in shares.items():
            score = 1 - (share - least)
            if not threshold.is_good(score):
                watched.add(rank)
            if rank in watched:
                who = f"rank {rank}{ranks[rank][-1].host}"
                words = f"{who} keeps the others waiting: {share:.0%} of its steps go on its host, mostly {phase}, and {least:.0%} elsewhere (score {score:.2f})"
                readings.append(
                    Reading("slow_rank", score, words, f"{who} is as fast as the others (score {score:.2f})", rank)
                )
        return SlowRank(ranks, None, frozenset(watched)), readings


@dataclass(frozen=True)
class Goodput(Signal):
    """The share of the last hour that the first process spent in steps: dispatching, waiting for devices, logging.

    The hour begins with the first step, so that a start, which takes long, is not held against a run.
    """

    began: bool = False
    spent: tuple[tuple[float, float, float], ...] = ()  # (time, seconds in steps, seconds)

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        if heard == "step":
            return (self if self.began else replace(self, began=True)), ()
        phases = row.get("phase_seconds")
        if not self.began or heard == "tick" or row.get("rank", 0) != 0 or not isinstance(phases, Mapping):
            return self, ()
        good = sum(float(s) for phase, s in phases.items() if KIND_OF.get(phase) == "step")
        spent = (*(one for one in self.spent if now - one[0] <= HOUR), (now, good, sum(map(float, phases.values()))))
        whole = sum(seconds for _, _, seconds in spent)
        if whole < LEAST_JUDGED:
            return replace(self, spent=spent), ()
        share = sum(seconds for _, seconds, _ in spent) / whole
        words = f"{share:.0%} of the last {whole / 60:.0f} minutes went into steps"
        return replace(self, spent=spent), (Reading("goodput_low", share, words, words),)


def _host(row: Row) -> str:
    return f" on {row['host']}" if row.get("host") else ""


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
