"""Reads, with distrust, what the nodes of a run have written: events, plans and nodes' records, on one clock.

Only JSON is read, of bounded size, from files whose names follow the pattern. A line or file that is cut off or
malformed is left out and counted. Every node writes by its own clock; the leaders have logged how far those differ
(`clock`), and this file puts all of them on one.
"""

import contextlib
import errno
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.files import entries, retried
from meshtrain.run.rows import decode as decode_rows
from meshtrain.survive.records import LARGEST, NAME, Node, RestartPlan, decode
from meshtrain.survive.store import SURVIVE, read_file

EVENTS_MOST = 256 * 2**20  # bytes that are read of a node's events
NO_FILE = (
    errno.ENOENT,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,
)  # what stands there is none of ours
FAR = 1e11  # seconds, 3,000 years; what is beyond it is no time

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class RunEvent:
    """One line of a node: `time` in seconds since 1970 on the clock of the history."""

    time: float
    node: str
    name: str
    fields: Fields

    def number(self, key: str) -> float | None:
        return number(self.fields.get(key))

    def integer(self, key: str) -> int | None:
        return integer(self.fields.get(key))

    def text(self, key: str) -> str:
        return text(self.fields.get(key))


@dataclass(frozen=True)
class History:
    """All of it, in order of time; `wall` of plans and records is on its clock, of which a node's is `ahead` by so many
    seconds.
    """

    events: tuple[RunEvent, ...]
    plans: tuple[RestartPlan, ...]
    records: Mapping[str, Node]
    ahead: Mapping[str, float]
    torn: int  # lines and files that could not be read

    @property
    def over(self) -> bool:
        """Returns whether the newest decision is that the run has ended."""
        return bool(self.plans) and self.plans[-1].state == "over"

    @property
    def newest(self) -> float:
        """Returns the last moment that anything is known of: the last event or plan, and the nodes' last records if the
        run is not over.
        """
        times = [event.time for event in self.events[-1:]] + [
            plan.wall for plan in self.plans[-1:]
        ]
        times += [record.wall for record in self.records.values() if not self.over]
        return max(times, default=0.0)

    def of(self, *names: str) -> Iterator[RunEvent]:
        return (event for event in self.events if event.name in names)


# --- values that anybody may have written


def number(value: object) -> float | None:
    """Returns a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < FAR and math.isfinite(value) else None


def integer(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < FAR:
        return value
    return None


def text(value: object) -> str:
    """Returns a text as it may stand in a table; empty for anything else."""
    return short(value) if isinstance(value, str) else ""


def plain(value: Any) -> Any:
    """Converts a value to one that JSON can hold: an infinite or undefined number becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    # A number of NumPy's has one of Python's.
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def date(time: float) -> datetime:
    return datetime.fromtimestamp(min(max(time, 0.0), 2 * FAR), UTC)


# --- files


def read(run: Path) -> History:
    """Reads all that the nodes of `run` have written; ConfigError if `run` is not a supervised run."""
    directory = _folder(run)
    lines = dict[str, Sequence[Fields]]()
    torn = 0
    for name, path in _named(directory, "events.", ".jsonl"):
        content = _content(path, EVENTS_MOST)
        lines[name], broken = decode_rows((content or b"").splitlines(keepends=True))
        torn += broken + (content is None)
    plans, odd = read_plans(run)
    records, bad = read_records(run)
    return together(lines, plans, records, torn + bad + odd)


def read_plans(run: Path) -> tuple[list[RestartPlan], int]:
    """Returns the leaders' decisions, and how many could not be read."""
    paths = [
        path
        for name, path in _named(_folder(run) / "plans", "", ".json")
        if name.isdecimal()
    ]
    plans = [decode(RestartPlan, _content(path, LARGEST) or b"") for path in paths]
    return [plan for plan in plans if plan is not None], plans.count(None)


def read_records(run: Path) -> tuple[dict[str, Node], int]:
    """Returns each node's record at this moment, and how many could not be read."""
    files = _named(_folder(run) / "nodes", "", ".json")
    nodes = {name: decode(Node, _content(path, LARGEST) or b"") for name, path in files}
    return {name: node for name, node in nodes.items() if node is not None}, list(
        nodes.values()
    ).count(None)


def _content(path: Path, most: int) -> bytes | None:
    """Returns the bytes of a node's file, which is read again while the disk does not answer; None if it does not."""
    try:
        return retried(lambda: read_file(path, most, NO_FILE))
    except OSError:
        return None


def _folder(run: Path) -> Path:
    is_run = False
    with contextlib.suppress(OSError, ValueError):
        if (run / SURVIVE).is_dir():
            return run / SURVIVE
        is_run = run.is_dir()
    if is_run:
        raise ConfigError(
            f"{short(run)} is not a run of `meshtrain survive`: it holds no directory {SURVIVE}/."
        )
    raise ConfigError(f"there is no run directory {short(run)}.")


def _named(directory: Path, before: str, after: str) -> list[tuple[str, Path]]:
    files = [path.name for path in entries(directory)]
    inner = {
        f[len(before) : len(f) - len(after)]: f
        for f in files
        if f.startswith(before) and f.endswith(after)
    }
    return [
        (name, directory / inner[name])
        for name in sorted(inner)
        if NAME.fullmatch(name)
    ]


# --- one clock


def together(
    lines: Mapping[str, Iterable[Fields]],
    plans: Sequence[RestartPlan],
    records: Mapping[str, Node],
    torn: int = 0,
) -> History:
    """Returns a history of what each node wrote, put on one clock. A line without a possible time counts as torn."""
    ahead = clocks(lines)
    events = []
    for node, rows in lines.items():
        for row in rows:
            wall = number(row.get("wall"))
            name = row.get("event")
            if wall is None or not isinstance(name, str):
                torn += 1
            else:
                events.append(RunEvent(wall - ahead.get(node, 0.0), node, name, row))
    decided = [
        replace(p, wall=p.wall - ahead.get(p.leader, 0.0))
        for p in plans
        if number(p.wall) is not None
    ]
    timed = {
        name: record
        for name, record in records.items()
        if number(record.wall) is not None
    }
    alive = {
        name: replace(record, wall=record.wall - ahead.get(name, 0.0))
        for name, record in timed.items()
    }
    torn += len(plans) - len(decided) + len(records) - len(alive)
    events.sort(key=lambda event: event.time)
    decided.sort(key=lambda plan: plan.number)
    return History(tuple(events), tuple(decided), alive, ahead, torn)


def clocks(lines: Mapping[str, Iterable[Fields]]) -> dict[str, float]:
    """Returns by how many seconds each node's clock is ahead of the reference clock, the one compared with most others.

    A leader judges the clocks that it sees; leadership moves, so clocks are compared from node to node. If two nodes
    were compared several times the median counts: a record is seen a moment after it was written, now and then much
    later.
    """
    judged = defaultdict[tuple[str, str], list[float]](list)
    for leader, rows in lines.items():
        for row in rows:
            node = row.get("node")
            ahead = number(row.get("ahead"))
            if (
                row.get("event") == "clock"
                and ahead is not None
                and isinstance(node, str)
                and node != leader
            ):
                judged[leader, node].append(ahead)
    beside = defaultdict[str, list[tuple[str, float]]](list)
    for (leader, node), seconds in judged.items():
        beside[leader].append((node, statistics.median(seconds)))
        beside[node].append((leader, -statistics.median(seconds)))
    known: dict[str, float] = {}
    # A node that nobody has judged is on a clock that nobody doubts.
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
