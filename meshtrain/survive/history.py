"""What the nodes of a run have written down, read with distrust: events, plans, nodes' records, on one clock.

Only JSON is read, of bounded size, from files whose names follow the pattern. What is cut in half, or is not what it should be, is left
out and counted. Every node writes by its own clock; the leaders have noted how far those differ (`clock`), and here all is put on one.
"""

import json
import math
import os
import stat
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.survive.records import LARGEST, NAME, Node, Plan, decode
from meshtrain.survive.store import SURVIVE

EVENTS_MOST = 256 * 2**20  # bytes that are read of a node's events
FAR = 1e11  # seconds, 3,000 years; what is beyond it is no time

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """One line of a node: `time` in seconds since 1970 on the clock of the whole history."""

    time: float
    node: str
    name: str
    fields: Fields

    def number(self, key: str) -> float | None:
        return number(self.fields.get(key))

    def whole(self, key: str) -> int | None:
        return whole(self.fields.get(key))

    def text(self, key: str) -> str:
        return text(self.fields.get(key))


@dataclass(frozen=True)
class History:
    """All of it, in order of time; `wall` of plans and records is on its clock, of which a node's is `ahead` by so many seconds."""

    events: tuple[Event, ...]
    plans: tuple[Plan, ...]
    records: Mapping[str, Node]
    ahead: Mapping[str, float]
    torn: int

    @property
    def over(self) -> bool:
        """Whether the newest decision is that the run has ended."""
        return bool(self.plans) and self.plans[-1].state == "over"

    @property
    def newest(self) -> float:
        """The last moment that anything is known of: of an ended run its last event, else also the nodes' last records."""
        times = [event.time for event in self.events[-1:]]
        times += [plan.wall for plan in self.plans[-1:]]
        times += [record.wall for record in self.records.values() if not self.over]
        return max(times, default=0.0)

    def of(self, *names: str) -> Iterator[Event]:
        return (event for event in self.events if event.name in names)


def number(value: object) -> float | None:
    """A finite number, or none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < FAR and math.isfinite(value) else None


def date(time: float) -> datetime:
    """A time of a history, as a date."""
    return datetime.fromtimestamp(min(max(time, 0.0), 2 * FAR), UTC)


def whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < FAR else None


def text(value: object) -> str:
    """A text as it may stand in a table; empty for anything else."""
    return short(value) if isinstance(value, str) else ""


def folder(run: Path) -> Path:
    """Where the supervisors of `run` write; ConfigError if it is no such run."""
    found = run / SURVIVE
    try:
        if found.is_dir():
            return found
        there = run.is_dir()
    except (OSError, ValueError):
        there = False
    if there:
        raise ConfigError(f"{short(run)} is no run of `meshtrain.survive`: it holds no directory {SURVIVE}/.")
    raise ConfigError(f"there is no run directory {short(run)}.")


def read(run: Path) -> History:
    """All that the nodes of `run` have written; ConfigError if `run` is no run under supervision."""
    at, torn = folder(run), 0
    lines: dict[str, list[Fields]] = {}
    for name, path in _named(at, "events.", ".jsonl"):
        lines[name], bad = _lines(path)
        torn += bad
    plans = [
        decode(Plan, _bytes(path, LARGEST)) for name, path in _named(at / "plans", "", ".json") if name.isdecimal()
    ]
    records, bad = read_records(run)
    return together(lines, [plan for plan in plans if plan is not None], records, torn + bad + plans.count(None))


def read_records(run: Path) -> tuple[dict[str, Node], int]:
    """What each node says of itself at this moment, and how many records could not be read."""
    read = {name: decode(Node, _bytes(path, LARGEST)) for name, path in _named(folder(run) / "nodes", "", ".json")}
    return {name: node for name, node in read.items() if node is not None}, list(read.values()).count(None)


def together(
    lines: Mapping[str, Iterable[Fields]], plans: Iterable[Plan], records: Mapping[str, Node], torn: int = 0
) -> History:
    """A history of what each node wrote, put on one clock. What bears no time that can be is torn."""
    ahead = clocks(lines)
    events, decided, alive = [], [], {}
    for node, written in lines.items():
        for line in written:
            wall, name = number(line.get("wall")), line.get("event")
            if wall is None or not isinstance(name, str):
                torn += 1
                continue
            events.append(Event(wall - ahead.get(node, 0.0), node, name, line))
    for plan in plans:
        if (wall := number(plan.wall)) is None:
            torn += 1
            continue
        decided.append(replace(plan, wall=wall - ahead.get(plan.leader, 0.0)))
    for name, record in records.items():
        if (wall := number(record.wall)) is None:
            torn += 1
            continue
        alive[name] = replace(record, wall=wall - ahead.get(name, 0.0))
    events.sort(key=lambda event: event.time)
    decided.sort(key=lambda plan: plan.number)
    return History(tuple(events), tuple(decided), alive, ahead, torn)


def clocks(lines: Mapping[str, Iterable[Fields]]) -> dict[str, float]:
    """By how many seconds each node's clock is ahead of one of them, that of whoever stands beside most others.

    A leader judges the clocks that it sees; leadership moves, so what is said goes from node to node. Of several judgements of the same
    two the median: a record is seen a moment after it was written, now and then much later.
    """
    said: dict[tuple[str, str], list[float]] = {}
    for leader, written in lines.items():
        for line in written:
            node, ahead = line.get("node"), number(line.get("ahead"))
            if line.get("event") == "clock" and ahead is not None and isinstance(node, str) and node != leader:
                said.setdefault((leader, node), []).append(ahead)
    beside: dict[str, list[tuple[str, float]]] = {}
    for (leader, node), found in said.items():
        beside.setdefault(leader, []).append((node, statistics.median(found)))
        beside.setdefault(node, []).append((leader, -statistics.median(found)))
    known: dict[str, float] = {}
    # Nodes of whom nobody has judged are on a clock that nobody doubts.
    for first in sorted(beside, key=lambda name: (-len(beside[name]), name)):
        waiting = [] if first in known else [first]
        known.setdefault(first, 0.0)
        while waiting:
            near = waiting.pop()
            for other, ahead in beside[near]:
                if other not in known:
                    known[other] = known[near] + ahead
                    waiting.append(other)
    return known


def _named(directory: Path, before: str, after: str) -> list[tuple[str, Path]]:
    """Files whose name is a node's between `before` and `after`, by that name."""
    try:
        found = os.listdir(directory)
    except OSError:
        return []
    inner = {f[len(before) : len(f) - len(after)]: f for f in found if f.startswith(before) and f.endswith(after)}
    return [(name, directory / inner[name]) for name in sorted(inner) if NAME.fullmatch(name)]


def _bytes(path: Path, most: int) -> bytes:
    """What a regular file holds, up to `most`; nothing of a link, a pipe or a device, which whoever writes there could put in its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _object(content: bytes) -> Fields | None:
    """A JSON object; none for anything else."""
    try:
        value = json.loads(content)
    # Not JSON, not UTF-8, a number of thousands of digits; brackets without end.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> tuple[list[Fields], int]:
    """The objects of a file with one on each line, and how many lines were none."""
    found = [_object(line) for line in _bytes(path, EVENTS_MOST).splitlines() if line.strip()]
    return [line for line in found if line is not None], found.count(None)
