"""Alerts as one pure function over rows: judge(state, row, heard, now, options) -> (state, alerts).

    row ──► signals ──► readings ──┐         bad for long enough          good for long enough
                                   ├─► quiet ───────────────────► firing ─────────────────────► quiet
    thresholds ────────────────────┘             one alert                    one alert

So each alert is given once when it begins and once when it is over, and what lies between `fires` and `clears` changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from meshtrain.telemetry.machine_signals import Disk, Goodput, Memory, SlowRank
from meshtrain.telemetry.signals import Heard, LossFinite, LossSpike, Reading, Row, Signal, Stalled, Throughput
from meshtrain.telemetry.thresholds import BY_RULE, Severity, Threshold


@dataclass(frozen=True)
class Alert:
    """One that begins or is over. `time`: seconds since 1970; `limit`: what `value` went beyond, or came back behind."""

    time: float
    step: int | None
    rule: str
    state: Literal["firing", "resolved"]
    severity: Severity
    value: float
    limit: float
    sentence: str
    rank: int | None = None

    def row(self) -> dict[str, Any]:
        """As a line of alerts.jsonl: what is not known is left out."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Standing(NamedTuple):
    """Of a rule (and rank): whether it fires, and since when readings say otherwise."""

    firing: bool = False
    since: float | None = None


Subject = tuple[str, int | None]  # rule, rank


@dataclass(frozen=True)
class Options:
    """The thresholds by rule; a rule that is left out is not judged."""

    thresholds: Mapping[str, Threshold] = field(default_factory=lambda: BY_RULE)


@dataclass(frozen=True)
class State:
    """All that is remembered between two rows."""

    signals: tuple[Signal, ...] = (
        LossFinite(), LossSpike(), Throughput(), Stalled(), Memory(), Disk(), SlowRank(), Goodput(),
    )  # fmt: skip
    standings: Mapping[Subject, Standing] = field(default_factory=dict)
    step: int | None = None


def judge(
    state: State, row: Row, heard: Heard, now: float, options: Options | None = None
) -> tuple[State, Sequence[Alert]]:
    """The state after a row (empty at a tick, which is heard now and then), and the alerts that it brings. `now`: seconds since 1970."""
    options = options or Options()
    signals: list[Signal] = []
    readings: list[Reading] = []
    for signal in state.signals:
        following, found = signal.after(row, heard, now)
        signals.append(following)
        readings += found
    step = row["step"] if heard == "step" and isinstance(row.get("step"), int) else state.step
    alerts, standings = [], dict(state.standings)
    for reading in readings:
        threshold = options.thresholds.get(reading.rule)
        if threshold is None:
            continue
        subject = reading.rule, reading.rank
        before = standings.get(subject, Standing())
        after = _follow(before, reading, threshold, now)
        if after.firing != before.firing:
            alerts.append(_alert(reading, threshold, after.firing, step, now))
        if after == Standing():
            standings.pop(subject, None)
        else:
            standings[subject] = after
    return replace(state, signals=tuple(signals), standings=standings, step=step), alerts


def _follow(standing: Standing, reading: Reading, threshold: Threshold, now: float) -> Standing:
    """What a reading makes of a standing."""
    turns = threshold.is_good(reading.value) if standing.firing else threshold.is_bad(reading.value)
    if not turns:
        return Standing(standing.firing)
    since = now if standing.since is None else min(standing.since, now)
    if now - since >= threshold.seconds:
        return Standing(not standing.firing)
    return Standing(standing.firing, since)


def _alert(reading: Reading, threshold: Threshold, firing: bool, step: int | None, now: float) -> Alert:
    return Alert(
        time=now, step=step, rule=reading.rule, state="firing" if firing else "resolved", severity=threshold.severity,
        value=reading.value, limit=threshold.fires if firing else threshold.clears,
        sentence=f"{reading.sentence if firing else reading.over}.", rank=reading.rank,
    )  # fmt: skip
