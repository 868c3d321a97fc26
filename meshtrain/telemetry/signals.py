"""Turns rows into the readings that the alert rules judge.

A signal hears rows of metrics.jsonl (step), of resources/RANK.jsonl (process), and that time has passed (tick, an empty
row). It gives readings: a number for its rule, and a sentence on it. The table of `thresholds` says what a reading
means; `alerts` reports it.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import Any, Literal, NamedTuple, Protocol

from meshtrain.survive.heartbeat import KIND_OF, STEPPING
from meshtrain.survive.stragglers import judge
from meshtrain.telemetry import thresholds
from meshtrain.telemetry.thresholds import BY_RULE, HOUR
from meshtrain.units import size

Row = Mapping[str, Any]
Heard = Literal["step", "process", "tick"]

BETWEEN = 10.0  # seconds between two looks at the disk that are kept
FAR = 24 * 365.0  # hours: longer than that is never
MOST_WAITING = 10_000  # samples of ranks that are not looked at yet


class SignalReading(NamedTuple):
    """A rule's value at a moment, of one rank where it is about one; the sentence for when it is bad and for when it is
    over.
    """

    rule: str
    value: float
    sentence: str
    over: str
    rank: int | None = None


class Signal(Protocol):
    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        """Yields the readings that a row brings. `now`: seconds since 1970."""


def number(row: Row, name: str) -> float | None:
    """Returns a finite number of a row; None if it has none."""
    value = row.get(name)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def phases_of(row: Row, heard: Heard) -> Mapping[str, float] | None:
    """Returns the seconds by phase of a process's row; None if it has none."""
    phases = row.get("phase_seconds")
    return phases if heard == "process" and isinstance(phases, Mapping) else None


def host_of(row: Row) -> str:
    return f" on {row['host']}" if row.get("host") else ""


class LossFinite:
    """Reads whether the newest loss and gradient are numbers.

    A row has them as they are; one that was read back has null.

    The gradient is the first to go, and ends a run before there is another loss; but float16's loss scale skips such
    steps.
    """

    def __init__(self) -> None:
        self._bad = 0  # rows in a row

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        if heard != "step" or "loss" not in row:
            return
        names = ("loss",) if "loss_scale" in row else ("loss", "grad_norm")
        wrong = next(
            (name for name in names if name in row and number(row, name) is None), None
        )
        self._bad = 0 if wrong is None else self._bad + 1
        name = wrong or "loss"
        value = row[name] if row[name] is not None else "not finite"
        sentence = f"the {name.replace('grad_', 'gradient ')} of step {row.get('step')} is {value}"
        yield SignalReading(
            "loss_not_finite", self._bad, sentence, "loss and gradient are finite again"
        )


class Window:
    """The newest values, and before them the usual ones, which learn nothing while a rule finds the newest bad."""

    def __init__(self, rule: str, newest: int, usual: int) -> None:
        self._threshold = BY_RULE[rule]
        self._bad = False
        self.newest: deque[float] = deque(maxlen=newest)
        self.usual: deque[float] = deque(maxlen=usual)

    def add(self, value: float) -> bool:
        """Returns whether there are values enough to call any usual."""
        if len(self.newest) == self.newest.maxlen and not self._bad:
            self.usual.append(self.newest[0])
        self.newest.append(value)
        return len(self.usual) >= thresholds.ENOUGH

    def reading(self, value: float, sentence: str, over: str) -> SignalReading:
        self._bad = self._threshold.is_bad(value)
        return SignalReading(self._threshold.rule, value, sentence, over)


class LossSpike:
    """The median of the newest losses against the median and the median absolute deviation of those before.

    Deviations count as at least 1% of the loss: of a run that is nearly still, every breath would be a spike.
    """

    def __init__(self) -> None:
        self._losses = Window("loss_spike", thresholds.LATEST_LOSSES, thresholds.LOSSES)

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        loss = number(row, "loss") if heard == "step" else None
        losses = self._losses
        if loss is None or not losses.add(loss):
            return
        newest = median_low(losses.newest)
        usual = median_low(losses.usual)
        # 1.4826 makes of the median absolute deviation the standard deviation, where noise is normal.
        spread = max(
            1.4826 * median_low([abs(x - usual) for x in losses.usual]),
            0.01 * abs(usual),
            1e-12,
        )
        value = (newest - usual) / spread
        yield losses.reading(
            value,
            f"the loss is {newest:.4g} (median of {len(losses.newest)} rows) where it was {usual:.4g}, "
            f"{value:.1f} times its usual deviation above",
            f"the loss is {newest:.4g}, near the {usual:.4g} that is usual",
        )


class Throughput:
    """The median of the newest rates over the run's usual one.

    A median does not see the rows that a save, an evaluation or a compilation makes long; where most are so, they are
    usual.
    """

    def __init__(self) -> None:
        self._rates = Window(
            "throughput_drop", thresholds.LATEST_RATES, thresholds.RATES
        )

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        rate = number(row, "tokens_per_second") if heard == "step" else None
        rates = self._rates
        if rate is None or not rates.add(rate):
            return
        newest = median_low(rates.newest)
        usual = median_low(rates.usual)
        value = newest / usual if usual else 1.0
        yield rates.reading(
            value,
            f"the run makes {newest:,.0f} tokens/s, {value:.0%} of the {usual:,.0f} that it made",
            f"the run makes {newest:,.0f} tokens/s again, of {usual:,.0f} that are usual",
        )


class Stalled:
    """Seconds since the last row over the usual seconds between two.

    Only the first process's seconds in the phases of a step count: it says itself when it compiles, evaluates or saves.
    Where nobody samples what it does, and before there is a usual interval, UNKNOWN seconds are the usual ten
    intervals.
    """

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=thresholds.INTERVALS)
        # When the last row was heard, or anything at all
        self._last: float | None = None
        self._begun = False  # a row was heard
        # Seconds in a step's phases since; None: nobody says
        self._stepping: float | None = None

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        if self._last is None:
            self._last = now
            self._begun = heard == "step"
            return
        passed = max(0.0, now - self._last)
        if heard == "step":
            # The first row's interval is the start's.
            if self._begun:
                self._intervals.append(passed)
            self._last = now
            self._begun = True
            self._stepping = None if self._stepping is None else 0.0
            yield SignalReading(
                "stalled",
                0.0,
                "",
                f"step {row.get('step')} was taken after {passed:.0f} s",
            )
            return
        if heard == "process":
            if row.get("rank", 0) != 0 or (phases := phases_of(row, heard)) is None:
                return
            stepping = sum(float(phases.get(phase, 0.0)) for phase in STEPPING)
            # A sample may reach back to before the last row.
            self._stepping = min(passed, (self._stepping or 0.0) + stepping)
        usual = thresholds.UNKNOWN / BY_RULE["stalled"].fires
        between = ""
        if self._intervals:
            median = median_low(self._intervals)
            between = f", where {median:.3g} s lie between two"
            usual = (
                usual
                if self._stepping is None
                else max(median, thresholds.LEAST_INTERVAL)
            )
        still = passed if self._stepping is None else self._stepping
        sentence = f"no step was taken for {passed:.0f} s{between}"
        yield SignalReading("stalled", still / usual, sentence, "steps are taken again")


class Memory:
    """Reads the memory of each rank's devices and cgroup; the rank heard first on a machine tells the machine's."""

    def __init__(self) -> None:
        self._tells: dict[str, int] = {}  # rank by host

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        if heard != "process":
            return
        rank = row.get("rank", 0)
        where = f"rank {rank}{host_of(row)}"
        ratios = {
            "memory_limit": (
                number(row, "memory_limit_used_ratio"),
                f"of the memory that it may use, {where}",
            )
        }
        if self._tells.setdefault(str(row.get("host")), rank) == rank:
            ratios["machine_memory"] = (
                number(row, "memory_used_ratio"),
                f"of its memory, the machine of {where}",
            )
        if devices := _devices(row):
            name, used = max(devices.items(), key=lambda one: one[1])
            ratios["device_memory"] = used, f"of its memory, device {name} of {where}"
        for rule, (ratio, who) in ratios.items():
            if ratio is not None:
                words = f"{who} has {ratio:.0%} in use"
                yield SignalReading(rule, ratio, words, words, rank)


def _devices(row: Row) -> dict[str, float]:
    used = row.get("device_memory_used_bytes")
    limit = row.get("device_memory_limit_bytes")
    if not isinstance(used, Mapping) or not isinstance(limit, Mapping):
        return {}
    known = {name: (number(used, name), number(limit, name)) for name in used}
    return {name: a / b for name, (a, b) in known.items() if a is not None and b}


class Disk:
    """Reads the room for the next save in the run directory, and the hours until it is full.

    All ranks share the directory; the first one tells.

    The slope joins the medians of the window's first and last third: saves that come and go do not tilt it.
    """

    def __init__(self) -> None:
        # (time, bytes) of the last hour
        self.free: deque[tuple[float, float]] = deque()
        self._save = 0.0  # bytes of the newest checkpoint

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        if heard == "step":
            self._save = number(row, "checkpoint_bytes") or self._save
        if (
            heard != "process"
            or row.get("rank", 0) != 0
            or (free := number(row, "disk_free_bytes")) is None
        ):
            return
        need = max(thresholds.ROOM, self._save)
        words = f"the run's disk has {size(free)} free, and {size(need)} are needed for the next save and for rows"
        yield SignalReading("disk_space", free / need, words, words)
        if not self.free or now - self.free[-1][0] >= BETWEEN:
            while self.free and now - self.free[0][0] > HOUR:
                self.free.popleft()
            self.free.append((now, free))
        if (slope := self._slope()) is None:
            return
        used = number(row, "disk_used_ratio")
        fills = slope < 0 and (used is None or used > thresholds.FILLING_FROM)
        hours = min(FAR, free / -slope / HOUR) if fills else FAR
        words = f"the run's disk is full in {hours:.1f} hours at the pace of the last ones: {size(free)} are free"
        yield SignalReading(
            "disk_filling",
            hours,
            words,
            f"the run's disk, with {size(free)} free, no longer fills up soon",
        )

    def _slope(self) -> float | None:
        """Bytes a second; None if the points lie too close together to tell."""
        points = list(self.free)
        if len(points) < 3 or points[-1][0] - points[0][0] < thresholds.FILLING_OVER:
            return None
        third = len(points) // 3
        (began, before), (ended, after) = (
            (median_low([t for t, _ in part]), median_low([b for _, b in part]))
            for part in (points[:third], points[-third:])
        )
        return (after - before) / (ended - began)


class SlowRank:
    """Ranks that keep the others waiting, as `survive.stragglers` judges them, over their last samples."""

    def __init__(self) -> None:
        self._samples: dict[
            int, deque[tuple[float, ...]]
        ] = {}  # by rank, the seconds in each of STEPPING
        self._hosts: dict[int, str] = {}
        self._waiting = 0  # samples since the last look
        self._watched: set[int] = (
            set()
        )  # whose score was ever not good: of the others nothing need be said

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        if (phases := phases_of(row, heard)) is None:
            return
        rank = row.get("rank", 0)
        seconds = tuple(float(phases.get(phase, 0.0)) for phase in STEPPING)
        self._samples.setdefault(rank, deque(maxlen=thresholds.SAMPLES)).append(seconds)
        self._hosts[rank] = host_of(row)
        self._waiting += 1
        # Once a round, with the first one's sample; should that one sample no more, before they become too many.
        if rank == 0 or self._waiting >= MOST_WAITING:
            self._waiting = 0
            yield from self._look()

    def _look(self) -> Iterator[SignalReading]:
        spent = {
            rank: dict(zip(STEPPING, map(sum, zip(*samples, strict=True)), strict=True))
            for rank, samples in self._samples.items()
            if len(samples) >= thresholds.SAMPLES // 2
        }
        for rank, pace in judge(spent).items():
            if not BY_RULE["slow_rank"].is_good(pace.score):
                self._watched.add(rank)
            if rank in self._watched:
                who = f"rank {rank}{self._hosts[rank]}"
                over = f"{who} is as fast as the others (score {pace.score:.2f})"
                yield SignalReading(
                    "slow_rank",
                    pace.score,
                    f"{who} is slow: {pace.words()}",
                    over,
                    rank,
                )


class Goodput:
    """The share of the last hour that the first process spent in steps: dispatching, waiting for devices, logging.

    The hour begins with the first step, so that a start, which takes long, is not held against a run.
    """

    def __init__(self) -> None:
        self._begun = False
        self._spent: deque[tuple[float, float, float]] = (
            deque()
        )  # (time, seconds in steps, seconds)

    def hear(self, row: Row, heard: Heard, now: float) -> Iterator[SignalReading]:
        self._begun |= heard == "step"
        phases = phases_of(row, heard)
        if not self._begun or phases is None or row.get("rank", 0) != 0:
            return
        while self._spent and now - self._spent[0][0] > HOUR:
            self._spent.popleft()
        steps = sum(
            float(s) for phase, s in phases.items() if KIND_OF.get(phase) == "step"
        )
        self._spent.append((now, steps, sum(map(float, phases.values()))))
        whole = sum(seconds for _, _, seconds in self._spent)
        if whole >= thresholds.LEAST_JUDGED:
            share = sum(seconds for _, seconds, _ in self._spent) / whole
            words = f"{share:.0%} of the last {whole / 60:.0f} minutes went into steps"
            yield SignalReading("goodput_low", share, words, words)
