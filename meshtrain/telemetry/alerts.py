"""The listener that turns rows into alerts: rules judge, sinks tell.

    rows of steps, and of all processes ──► judge ──► alerts ──► log, file, webhook, command

It belongs to a run's first process, which knows all rows.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.config import Config
from meshtrain.errors import refusal, say
from meshtrain.run.directory import ALERTS
from meshtrain.telemetry import entries
from meshtrain.telemetry.entries import Entry
from meshtrain.telemetry.rules import Options, State, judge
from meshtrain.telemetry.signals import Heard
from meshtrain.telemetry.sinks import PATIENCE, Log, Sink, sink


class Alerts:
    """Called with each row on the hub's thread. `tick` is for the time in which no row comes; `close` for the end."""

    name = "alerts"

    def __init__(self, config: Config, directory: Path, options: Options | None = None) -> None:
        self._options, self._state = options, State()
        self._sinks: list[Sink] = []
        found = [entries.check(entry) for entry in config.telemetry.alerts]
        standing = left_standing(directory / ALERTS) if Entry("file") in found else ()
        for entry in found:
            try:
                self._sinks.append(sink(entry, directory))
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
        self._state, alerts = judge(self._state, row, heard, now, self._options)
        for alert in alerts:
            self._send(alert.row())

    def _send(self, alert: Mapping[str, Any]) -> None:
        for one in self._sinks:
            one.send(alert)


def left_standing(path: Path) -> Sequence[Mapping[str, Any]]:
    """What an earlier process of the run left firing, resolved: it has ended, and this one judges anew."""
    found: dict[Any, dict[str, Any]] = {}
    try:
        text = path.read_bytes()
    except OSError:
        # There is none yet, or none that could be read.
        text = b""
    for row in _rows(text):
        if {"rule", "state", "severity", "sentence"} <= row.keys():
            found[row["rule"], row.get("rank")] = row
    return [
        row | {"time": time.time(), "state": "resolved", "sentence": "the process that said so has ended."}
        for row in found.values()
        if row["state"] == "firing"
    ]


def _rows(text: bytes) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; what is none is left out."""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row
