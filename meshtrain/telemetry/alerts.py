"""Alerts: one pure function judges rows, and a listener of the hub hands what it finds to the sinks.

    row ──► signals ──► readings ──┐         bad for long enough          good for long enough
                                   ├─► quiet ───────────────────► firing ─────────────────────► quiet
    thresholds ────────────────────┘             one alert                    one alert  ──► log, file, webhook, command

So each alert is given once when it begins and once when it is over, and what lies between `fires` and `clears` changes nothing. The
listener belongs to a run's first process, which knows all rows.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshtrain.config import Config
from meshtrain.config.telemetry import AlertTarget, alert_target
from meshtrain.errors import refusal, say
from meshtrain.run.directory import ALERTS
from meshtrain.run.rows import read
from meshtrain.telemetry.signals import (
    Disk,
    Goodput,
    Heard,
    LossFinite,
    LossSpike,
    Memory,
    Row,
    Signal,
    SignalReading,
    SlowRank,
    Stalled,
    Throughput,
)
from meshtrain.telemetry.sinks import PATIENCE, Log, Sink, sink
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
class AlertState:
    """All that is remembered between two rows."""

    signals: tuple[Signal, ...] = (
        LossFinite(), LossSpike(), Throughput(), Stalled(), Memory(), Disk(), SlowRank(), Goodput(),
    )  # fmt: skip
    standings: Mapping[Subject, Standing] = field(default_factory=dict)
    step: int | None = None


def judge(
    state: AlertState, row: Row, heard: Heard, now: float, thresholds: Mapping[str, Threshold] = BY_RULE
) -> tuple[AlertState, Sequence[Alert]]:
    """The state after a row (empty at a tick, which is heard now and then), and the alerts that it brings. `now`: seconds since 1970.

    A rule that has none of the thresholds is not judged.
    """
    signals: list[Signal] = []
    readings: list[SignalReading] = []
    for signal in state.signals:
        following, more = signal.after(row, heard, now)
        signals.append(following)
        readings += more
    step = row["step"] if heard == "step" and isinstance(row.get("step"), int) else state.step
    alerts, standings = [], dict(state.standings)
    for reading in readings:
        threshold = thresholds.get(reading.rule)
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


def _follow(standing: Standing, reading: SignalReading, threshold: Threshold, now: float) -> Standing:
    turns = threshold.is_good(reading.value) if standing.firing else threshold.is_bad(reading.value)
    if not turns:
        return Standing(standing.firing)
    since = now if standing.since is None else min(standing.since, now)
    if now - since >= threshold.seconds:
        return Standing(not standing.firing)
    return Standing(standing.firing, since)


def _alert(reading: SignalReading, threshold: Threshold, firing: bool, step: int | None, now: float) -> Alert:
    return Alert(
        time=now, step=step, rule=reading.rule, state="firing" if firing else "resolved", severity=threshold.severity,
        value=reading.value, limit=threshold.fires if firing else threshold.clears,
        sentence=f"{reading.sentence if firing else reading.over}.", rank=reading.rank,
    )  # fmt: skip


class Alerts:
    """Called with each row on the hub's thread. `tick` is for the time in which no row comes; `close` for the end."""

    name = "alerts"

    def __init__(self, config: Config, directory: Path) -> None:
        self._state = AlertState()
        self._sinks: list[Sink] = []
        targets = [alert_target(text) for text in config.telemetry.alerts]
        standing = left_standing(directory / ALERTS) if AlertTarget("file") in targets else ()
        for target in targets:
            try:
                self._sinks.append(sink(target, directory))
            except OSError as error:
                say(f"alerts are not written to {directory / ALERTS}: {refusal(error)}; training goes on.")
        for alert in standing:
            self._send(alert)

    def __call__(self, row: Mapping[str, Any], source: Heard) -> None:
        # A row of a step waits a while for the hub; other machines' clocks may be wrong.
        now = row.get("time") if source == "step" else None
        self._judge(row, source, now or time.time())

    def tick(self, now: float) -> None:
        """Time has passed; `now` in seconds since 1970."""
        self._judge({}, "tick", now)

    def failing(self) -> None:
        """The run ends on an error, which it says on stderr itself."""
        self._sinks = [one for one in self._sinks if not isinstance(one, Log)]

    def close(self) -> None:
        """Waits a bounded time for what is on its way."""
        deadline = time.monotonic() + PATIENCE
        for one in self._sinks:
            one.close(deadline)

    def _judge(self, row: Mapping[str, Any], heard: Heard, now: float) -> None:
        self._state, alerts = judge(self._state, row, heard, now)
        for alert in alerts:
            self._send(alert.row())

    def _send(self, alert: Mapping[str, Any]) -> None:
        for one in self._sinks:
            one.send(alert)


def left_standing(path: Path) -> Sequence[Mapping[str, Any]]:
    """What an earlier process of the run left firing, resolved: it has ended, and this one judges anew."""
    newest: dict[Any, dict[str, Any]] = {}
    rows: Sequence[dict[str, Any]] = ()
    # None that could be read.
    with contextlib.suppress(OSError):
        rows, _ = read(path)
    for row in rows:
        if {"rule", "state", "severity", "sentence"} <= row.keys():
            newest[row["rule"], row.get("rank")] = row
    return [
        row | {"time": time.time(), "state": "resolved", "sentence": "the process that said so has ended."}
        for row in newest.values()
        if row["state"] == "firing"
    ]
