"""What the rules on steps look at: the loss, the rate, the time since the last row. Each signal is a value; `after` makes the next one.

A signal hears rows of metrics.jsonl (step), of resources/RANK.jsonl (process), and that time has passed (tick). It gives readings: a
number for its rule, and what to say of it. What a reading means is the table's (`thresholds`), and when it is said is `rules`'.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Literal, NamedTuple

from meshtrain.survive.beat import HOST
from meshtrain.telemetry.thresholds import (
    BY_RULE,
    ENOUGH,
    INTERVALS,
    LATEST_LOSSES,
    LATEST_RATES,
    LEAST_INTERVAL,
    LOSSES,
    RATES,
    UNKNOWN,
)

Row = Mapping[str, Any]
Heard = Literal["step", "process", "tick"]
WAIT = "wait"
STEPPING = (*HOST, WAIT)  # phases that belong to steps


class Reading(NamedTuple):
    """A rule's value at a moment, of one rank where it is about one; the sentence for when it is bad and for when it is over."""

    rule: str
    value: float
    sentence: str
    over: str
    rank: int | None = None


class Signal:
    """Base of the signals below."""

    def after(self, row: Row, heard: Heard, now: float) -> "tuple[Signal, Sequence[Reading]]":
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

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        if heard != "step" or "loss" not in row:
            return self, ()
        told = ("loss",) if "loss_scale" in row else ("loss", "grad_norm")
        wrong = next((name for name in told if name in row and number(row, name) is None), None)
        bad = 0 if wrong is None else self.bad + 1
        name = wrong or "loss"
        value = row[name] if row[name] is not None else "not finite"
        sentence = f"the {name.replace('grad_', 'gradient ')} of step {row.get('step')} is {value}"
        reading = Reading("loss_not_finite", bad, sentence, "loss and gradient are finite again")
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

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
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
        reading = Reading(
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

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        rate = number(row, "tokens_per_second") if heard == "step" else None
        if rate is None:
            return self, ()
        window = self.window.add(rate, learns=not BY_RULE["throughput_drop"].is_bad(self.value))
        if not window.knows:
            return Throughput(window), ()
        newest, usual = median_low(window.latest), median_low(window.usual)
        value = newest / usual if usual else 1.0
        reading = Reading(
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

    def after(self, row: Row, heard: Heard, now: float) -> tuple[Signal, Sequence[Reading]]:
        if self.last is None:
            return replace(self, last=now, rows=int(heard == "step")), ()
        passed = max(0.0, now - self.last)
        if heard == "step":
            # The first row's interval is the start's.
            intervals = (*self.intervals, passed)[-INTERVALS:] if self.rows else ()
            spent = None if self.spent is None else 0.0
            reading = Reading("stalled", 0.0, "", f"step {row.get('step')} was taken after {passed:.0f} s")
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
        reading = Reading(
            "stalled", still / usual, f"no step was taken for {passed:.0f} s{between}", "steps are taken again"
        )
        return after, (reading,)
