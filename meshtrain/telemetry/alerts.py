"""Alerts: rows are judged by the table of thresholds, and a listener of the hub hands what begins or is over to the
sinks.

    row ──► signals ──► readings ──┐         bad for long enough          good for long enough
                                   ├─► quiet ───────────────────► firing ─────────────────────► quiet
    thresholds ────────────────────┘             one alert                    one alert  ──► log, file, webhook, command

So each alert is given once when it begins and once when it is over, and what lies between `fires` and `clears` changes
nothing. The listener belongs to a run's first process, which knows all rows.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshtrain.config import Config
from meshtrain.config.telemetry import AlertTarget, alert_target
from meshtrain.errors import refusal, say
from meshtrain.run.directory import ALERTS
from meshtrain.run.hooks import Listener, RowSource
from meshtrain.run.rows import read
from meshtrain.telemetry import signals
from meshtrain.telemetry.signals import Heard, Row, Signal, SignalReading
from meshtrain.telemetry.sinks import PATIENCE, Log, Sink, sink
from meshtrain.telemetry.thresholds import BY_RULE, Severity


@dataclass(frozen=True)
class Alert:
    """One that begins or is over.

    `time`: seconds since 1970; `limit`: what `value` went beyond, or came back behind.
    """

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
        """Returns a line of alerts.jsonl: what is not known is left out."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Judge:
    """Judges rows one after the other; it looks at no clock and no file."""

    def __init__(self) -> None:
        self._signals: tuple[Signal, ...] = (
            signals.LossFinite(),
            signals.LossSpike(),
            signals.Throughput(),
            signals.Stalled(),
            signals.Memory(),
            signals.Disk(),
            signals.SlowRank(),
            signals.Goodput(),
        )
        self._step: int | None = None
        # Of a rule and rank: whether it fires, and since when readings say otherwise.
        self._firing: set[tuple[str, int | None]] = set()
        self._since: dict[tuple[str, int | None], float] = {}

    def __call__(self, row: Row, heard: Heard, now: float) -> list[Alert]:
        """Returns the alerts that a row brings (empty at a tick, which is heard now and then).

        `now`: seconds since 1970.
        """
        if heard == "step" and isinstance(row.get("step"), int):
            self._step = row["step"]
        readings = [
            reading
            for signal in self._signals
            for reading in signal.hear(row, heard, now)
        ]
        return [
            alert
            for reading in readings
            if (alert := self._follow(reading, now)) is not None
        ]

    def _follow(self, reading: SignalReading, now: float) -> Alert | None:
        threshold = BY_RULE[reading.rule]
        subject = (reading.rule, reading.rank)
        fires = subject not in self._firing  # if the reading turns
        if not (
            threshold.is_bad(reading.value)
            if fires
            else threshold.is_good(reading.value)
        ):
            self._since.pop(subject, None)
            return None
        since = self._since[subject] = min(self._since.get(subject, now), now)
        if now - since < threshold.seconds:
            return None
        del self._since[subject]
        (self._firing.add if fires else self._firing.remove)(subject)
        return Alert(
            time=now,
            step=self._step,
            rule=reading.rule,
            state="firing" if fires else "resolved",
            severity=threshold.severity,
            value=reading.value,
            limit=threshold.fires if fires else threshold.clears,
            sentence=f"{reading.sentence if fires else reading.over}.",
            rank=reading.rank,
        )


class Alerts(Listener):
    """Judges each row, and the time in which no row comes; sends the alerts."""

    name = "alerts"

    def __init__(self, config: Config, directory: Path) -> None:
        self._judge = Judge()
        self._sinks: list[Sink] = []
        targets = [alert_target(text) for text in config.telemetry.alerts]
        earlier = (
            resolved_at_start(directory / ALERTS)
            if AlertTarget("file") in targets
            else ()
        )
        for target in targets:
            try:
                self._sinks.append(sink(target, directory))
            except OSError as error:
                say(
                    f"alerts are not written to {directory / ALERTS}: {refusal(error)}; training goes on."
                )
        for alert in earlier:
            self._send(alert)

    def on_row(self, row: Row, source: RowSource) -> None:
        # A row of a step waits a while for the hub; other machines' clocks may be wrong.
        now = row.get("time") if source == "step" else None
        for alert in self._judge(row, source, now or time.time()):
            self._send(alert.row())

    def on_tick(self, now: float) -> None:
        for alert in self._judge({}, "tick", now):
            self._send(alert.row())

    def on_failure(self) -> None:
        """The run ends on an error, which it says on stderr itself."""
        self._sinks = [one for one in self._sinks if not isinstance(one, Log)]

    def close(self) -> None:
        """Waits a bounded time for what is on its way."""
        deadline = time.monotonic() + PATIENCE
        for one in self._sinks:
            one.close(deadline)

    def _send(self, alert: Mapping[str, Any]) -> None:
        for one in self._sinks:
            one.send(alert)


def resolved_at_start(path: Path) -> Sequence[Mapping[str, Any]]:
    """Returns what an earlier process of the run left firing, resolved: it has ended, and this one judges anew."""
    newest: dict[Any, dict[str, Any]] = {}
    # None that could be read.
    with contextlib.suppress(OSError):
        for row in read(path)[0]:
            if {"rule", "state", "severity", "sentence"} <= row.keys():
                newest[row["rule"], row.get("rank")] = row
    resolved = {
        "time": time.time(),
        "state": "resolved",
        "sentence": "the process that said so has ended.",
    }
    return [row | resolved for row in newest.values() if row["state"] == "firing"]
