"""What the alert rules look at, as values: each signal is immutable, and `after` makes the next one.

A signal hears rows of metrics.jsonl (step), of resources/RANK.jsonl (process), and that time has passed (tick). It gives readings: a
number for its rule, and a sentence on it. What a reading means is the table's (`thresholds`); `alerts` says when it is reported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Literal, NamedTuple

from meshtrain.survive.heartbeat import KIND_OF, STEPPING
from meshtrain.survive.stragglers import judge
from meshtrain.telemetry.thresholds import (
    BY_RULE,
    ENOUGH,
    FILLING_FROM,
    FILLING_OVER,
    HOUR,
    INTERVALS,
    LATEST_LOSSES,
    LATEST_RATES,
    LEAST_INTERVAL,
    LEAST_JUDGED,
    LOSSES,
    RATES,
    ROOM,
    SAMPLES,
    UNKNOWN,
)
from meshtrain.units import size

Row = Mapping[str, Any]
Heard = Literal["step", "process", "tick"]


class SignalReading(NamedTuple):
    """A rule's value at a moment, of one rank where it is about one; the sentence for when it is bad and for when it is over."""

    rule: str
    value: float
    sentence: str
    over: str
    rank: int | None = None


class Signal:
    """Base of the signals below."""

    def after(self, row: Row, heard: Heard, now: float) -> "tuple[Signal, Sequence[SignalReading]]":
        """The signal that has heard the row too (empty at a tick), and its readings. `now`: seconds since 1970."""
        raise NotImplementedError


def number(row: Row, name: str) -> float | None:
    """A finite number of a row; None if it has none."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True)
class LossFinite(Signal):
    """Whether the newest loss and gradient are numbers. A row has them as they are, one that was read back has null, and says so.

    The gradient is the first to go, and ends a run before there is another loss; but float16's loss scale skips such steps.
    """

    bad: int = 0  # rows in a row

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
        if heard != "step" or "loss" not in row:
            return self, ()
        told = ("loss",) if "loss_scale" in row else ("loss", "grad_norm")
        wrong = next((name for name in told if name in row and number(row, name) is None), None)
        bad = 0 if wrong is None else self.bad + 1
        name = wrong or "loss"
        value = row[name] if row[name] is not None else "not finite"
        sentence = f"the {name.replace('grad_', 'gradient ')} of step {row.get('step')} is {value}"
        reading = SignalReading("loss_not_finite", bad, sentence, "loss and gradient are finite again")
        return LossFinite(bad), (reading,)


@dataclass(frozen=True)
class Window:
    """The newest values, and before them the usual ones, which learn nothing while a rule finds the newest bad."""

    newest: int
    most: int  # usual ones
    latest: tuple[float, ...] = ()
    usual: tuple[float, ...] = ()

    def add(self, value: float, learns: bool) -> "Window":
        values = (*self.latest, value)
        leaving = values[: -self.newest] if learns or not self.knows else ()
        return replace(self, latest=values[-self.newest :], usual=(self.usual + leaving)[-self.most :])

    @property
    def knows(self) -> bool:
        """Whether there are values enough to call any usual."""
        return len(self.usual) >= ENOUGH


@dataclass(frozen=True)
class LossSpike(Signal):
    """The median of the newest losses against the median and the median absolute deviation of those before.

    Deviations count as at least 1% of the loss: of a run that is nearly still, every breath would be a spike.
    """

    window: Window = Window(LATEST_LOSSES, LOSSES)
    value: float = 0.0

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
        loss = number(row, "loss") if heard == "step" else None
        if loss is None:
            return self, ()
        window = self.window.add(loss, learns=not BY_RULE["loss_spike"].is_bad(self.value))
        if not window.knows:
            return LossSpike(window), ()
        newest, usual = median_low(window.latest), median_low(window.usual)
        # 1.4826 makes of the median absolute deviation the standard deviation, where noise is normal.
        spread = max(1.4826 * median_low([abs(x - usual) for x in window.usual]), 0.01 * abs(usual), 1e-12)
        value = (newest - usual) / spread
        reading = SignalReading(
            "loss_spike", value,
            f"the loss is {newest:.4g} (median of {len(window.latest)} rows) where it was {usual:.4g}, {value:.1f} times its usual deviation above",
            f"the loss is {newest:.4g}, near the {usual:.4g} that is usual",
        )  # fmt: skip
        return LossSpike(window, value), (reading,)


@dataclass(frozen=True)
class Throughput(Signal):
    """The median of the newest rates over the run's usual one.

    A median does not see the rows that a save, an evaluation or a compilation makes long; where most are so, they are usual.
    """

    window: Window = Window(LATEST_RATES, RATES)
    value: float = 1.0

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
        rate = number(row, "tokens_per_second") if heard == "step" else None
        if rate is None:
            return self, ()
        window = self.window.add(rate, learns=not BY_RULE["throughput_drop"].is_bad(self.value))
        if not window.knows:
            return Throughput(window), ()
        newest, usual = median_low(window.latest), median_low(window.usual)
        value = newest / usual if usual else 1.0
        reading = SignalReading(
            "throughput_drop", value,
            f"the run makes {newest:,.0f} tokens/s, {value:.0%} of the {usual:,.0f} that it made",
            f"the run makes {newest:,.0f} tokens/s again, of {usual:,.0f} that are usual",
        )  # fmt: skip
        return Throughput(window, value), (reading,)


@dataclass(frozen=True)
class Stalled(Signal):
    """Seconds since the last row over the usual seconds between two.

    Only the first process's seconds in the phases of a step count: it says itself when it compiles, evaluates or saves. Where nobody
    samples what it does, and before there is a usual interval, UNKNOWN seconds are the usual ten intervals.
    """

    intervals: tuple[float, ...] = ()
    last: float | None = None  # when the last row was heard, or anything at all
    rows: int = 0
    spent: float | None = None  # seconds in a step's phases since; None: nobody says

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
        if self.last is None:
            return replace(self, last=now, rows=int(heard == "step")), ()
        passed = max(0.0, now - self.last)
        if heard == "step":
            # The first row's interval is the start's.
            intervals = (*self.intervals, passed)[-INTERVALS:] if self.rows else ()
            spent = None if self.spent is None else 0.0
            reading = SignalReading("stalled", 0.0, "", f"step {row.get('step')} was taken after {passed:.0f} s")
            return Stalled(intervals, now, self.rows + 1, spent), (reading,)
        after = self
        if heard == "process":
            if row.get("rank", 0) != 0 or not isinstance(phases := row.get("phase_seconds"), Mapping):
                return self, ()
            stepping = sum(float(phases.get(phase, 0.0)) for phase in STEPPING)
            # A sample may reach back to before the last row.
            after = replace(self, spent=min(passed, (self.spent or 0.0) + stepping))
        known = after.spent is not None and bool(after.intervals)
        usual = max(median_low(after.intervals), LEAST_INTERVAL) if known else UNKNOWN / BY_RULE["stalled"].fires
        still = passed if after.spent is None else after.spent
        between = f", where {median_low(after.intervals):.3g} s lie between two" if after.intervals else ""
        reading = SignalReading(
            "stalled", still / usual, f"no step was taken for {passed:.0f} s{between}", "steps are taken again"
        )
        return after, (reading,)


BETWEEN = 10.0  # seconds between two looks at the disk that are kept
FAR = 24 * 365.0  # hours: longer than that is never
MOST_WAITING = 10_000  # samples of ranks that are not looked at yet


@dataclass(frozen=True)
class Memory(Signal):
    """Of each rank: its devices, its cgroup; and its machine, of which the rank tells that was heard of it first."""

    tells: Mapping[str, int] = field(default_factory=dict)  # rank by host

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
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
                readings.append(SignalReading(rule, ratio, words, words, rank))
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

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
        if heard == "step":
            save = number(row, "checkpoint_bytes")
            return (self if save is None else replace(self, save=save)), ()
        if heard == "tick" or row.get("rank", 0) != 0 or (free := number(row, "disk_free_bytes")) is None:
            return self, ()
        need = max(ROOM, self.save)
        words = f"the run's disk has {size(free)} free, and {size(need)} are needed for the next save and for rows"
        readings = [SignalReading("disk_space", free / need, words, words)]
        points = self.free
        if not points or now - points[-1][0] >= BETWEEN:
            points = (*(point for point in points if now - point[0] <= HOUR), (now, free))
        used = number(row, "disk_used_ratio")
        if (slope := _slope(points)) is not None:
            hours = min(FAR, free / -slope / HOUR) if slope < 0 and (used is None or used > FILLING_FROM) else FAR
            words = f"the run's disk is full in {hours:.1f} hours at the pace of the last ones: {size(free)} are free"
            over = f"the run's disk, with {size(free)} free, no longer fills up soon"
            readings.append(SignalReading("disk_filling", hours, words, over))
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
    """Of a rank: its seconds in each of STEPPING. `earlier`: the one that came before, of whatever rank."""

    rank: int
    host: str
    seconds: tuple[float, ...]
    earlier: Any  # a Sample, or None
    waiting: int  # how many they are


@dataclass(frozen=True)
class SlowRank(Signal):
    """Ranks that keep the others waiting, as `survive.stragglers` judges them, over their last samples."""

    ranks: Mapping[int, tuple[Sample, ...]] = field(default_factory=dict)
    # Since the last round: of thousands of ranks nothing is copied for each.
    newest: Sample | None = None
    watched: frozenset[int] = frozenset()  # whose score was ever not good: of the others nothing need be said

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
        if heard != "process" or not isinstance(phases := row.get("phase_seconds"), Mapping):
            return self, ()
        seconds = tuple(float(phases.get(phase, 0.0)) for phase in STEPPING)
        waiting = self.newest.waiting + 1 if self.newest else 1
        after = replace(self, newest=Sample(row.get("rank", 0), _host(row), seconds, self.newest, waiting))
        # Once a round, with the first one's sample; should that one sample no more, before they become too many.
        return after._look() if row.get("rank", 0) == 0 or waiting >= MOST_WAITING else (after, ())

    def _look(self) -> "tuple[SlowRank, Sequence[SignalReading]]":
        ranks, new, sample = dict(self.ranks), [], self.newest
        while sample is not None:
            new.append(sample._replace(earlier=None))
            sample = sample.earlier
        for one in reversed(new):
            ranks[one.rank] = (*ranks.get(one.rank, ()), one)[-SAMPLES:]
        spent = {
            rank: dict(zip(STEPPING, map(sum, zip(*(one.seconds for one in samples), strict=True)), strict=True))
            for rank, samples in ranks.items()
            if len(samples) >= SAMPLES // 2
        }
        threshold, watched, readings = BY_RULE["slow_rank"], set(self.watched), []
        for rank, pace in judge(spent).items():
            if not threshold.is_good(pace.score):
                watched.add(rank)
            if rank in watched:
                who = f"rank {rank}{ranks[rank][-1].host}"
                over = f"{who} is as fast as the others (score {pace.score:.2f})"
                readings.append(SignalReading("slow_rank", pace.score, f"{who} is slow: {pace.words()}", over, rank))
        return SlowRank(ranks, None, frozenset(watched)), readings


@dataclass(frozen=True)
class Goodput(Signal):
    """The share of the last hour that the first process spent in steps: dispatching, waiting for devices, logging.

    The hour begins with the first step, so that a start, which takes long, is not held against a run.
    """

    began: bool = False
    spent: tuple[tuple[float, float, float], ...] = ()  # (time, seconds in steps, seconds)

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[SignalReading]]:
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
        return replace(self, spent=spent), (SignalReading("goodput_low", share, words, words),)


def _host(row: Row) -> str:
    return f" on {row['host']}" if row.get("host") else ""
