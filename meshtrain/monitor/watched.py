"""Watches a run: what is known of it at this moment, from the ends of its files, read on from where the last look
ended.

`lagging` says which process the others wait for, or has not been heard of, from the newest sample of each; who is slow,
`survive.stragglers` says.
"""

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.config import Config, ConfigError, short
from meshtrain.plan.estimate import Plan
from meshtrain.report.facts import RunFacts, best, config_of, planned, sampled, written
from meshtrain.report.rows import Columns
from meshtrain.report.samples import samples_in
from meshtrain.report.summary import Summary, summarise
from meshtrain.run.best import Best, evaluation_of
from meshtrain.run.directory import ALERTS, CONFIG, METRICS
from meshtrain.run.lock import in_use
from meshtrain.run.rows import Row, RowReader
from meshtrain.survive import stragglers
from meshtrain.survive.heartbeat import STEPPING
from meshtrain.survive.history import (
    History,
    number,
    plain,
    read_plans,
    read_records,
    text,
)
from meshtrain.survive.records import Node, RestartPlan
from meshtrain.survive.reliability import Failure, failures
from meshtrain.survive.store import SURVIVE
from meshtrain.telemetry.catalogue import RECENT_ROWS
from meshtrain.units import duration

# that are kept: of steps, and of each process
ROWS = 400
SAMPLES = 2
# bytes before the ends of files with which it begins
TAIL = 1 << 18
SAMPLE_TAIL = 1 << 14
MOST_RANKS = 256
SILENT = 3.0  # times the time between samples, without one
FRESH = 30.0  # seconds for which a supervisor's record says that the run goes on


@dataclass(frozen=True)
class Look:
    """A run at one moment. `summary`: none where there is no run yet."""

    name: str
    directory: Path
    summary: Summary | None = None
    columns: Columns = field(default_factory=Columns)  # of the newest rows
    alerts: tuple[str, ...] = ()  # that fire
    phases: str = ""  # what its processes do
    lagging: tuple[str, ...] = ()
    memory: float | None = None  # bytes of the fullest device
    left: float | None = None  # seconds until the last step
    # Of a supervised run: which generation goes on, and who has been silent for longest
    life: str = ""
    faults: tuple[Failure, ...] = ()
    # the prompt and the text of the newest evaluation's first
    sample: tuple[str, str] | None = None

    @property
    def ended(self) -> bool:
        """Returns whether nothing more will come."""
        return self.summary is not None and self.summary.state == "done"

    def as_json(self) -> dict[str, Any]:
        """Returns the look for programs: the figures are those of `report --json`, of the last rows."""
        about = {
            name: getattr(self, name)
            for name in (
                "alerts",
                "phases",
                "lagging",
                "memory",
                "left",
                "life",
                "sample",
            )
        }
        summary = None if self.summary is None else asdict(self.summary)
        return plain(
            {
                "run": str(self.directory),
                "summary": summary,
                **about,
                "faults": list(map(asdict, self.faults)),
            }
        )  # type: ignore[no-any-return]


def is_run(directory: Path) -> bool:
    """Returns whether a directory has what a run writes first."""
    try:
        return (directory / CONFIG).exists() or (directory / METRICS).exists()
    except (OSError, ValueError):
        return False


class WatchedRun:
    """One run directory, looked at again and again; it need not be there yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rows: deque[Row] = deque(maxlen=ROWS)
        self._metrics = RowReader(directory / METRICS, TAIL)
        self._alerts = RowReader(directory / ALERTS, TAIL)
        self._newest_alerts: dict[tuple[object, object], Row] = {}
        self._samples: dict[int, tuple[RowReader, deque[Row]]] = {}
        self._config_written: float | None = None
        self._config: Config | None = None
        self._plan: Plan | None = None
        self._best: Best | None = None  # none: to be read from all rows
        self._planned: float | None = None  # when a supervisor decided something last
        self._plans: list[RestartPlan] = []

    def look(self) -> Look:
        """Reads what is new; returns it together with what was."""
        name = short(self.directory.name or self.directory)
        if not is_run(self.directory):
            return Look(name, self.directory)
        stamp = written(self.directory / CONFIG)
        if stamp is not None and stamp != self._config_written:
            self._config_written = stamp
            self._config = config_of(self.directory, [])
            self._plan = None
        self._read_rows()
        for alert in self._alerts.new():
            self._newest_alerts[str(alert.get("rule")), str(alert.get("rank"))] = alert
        firing = [
            alert
            for alert in self._newest_alerts.values()
            if alert.get("state") == "firing"
        ]
        samples = self._read_samples()
        columns = _columns(self._rows)
        nodes = self._read_nodes()
        sampled_columns = {rank: _columns(rows) for rank, rows in samples.items()}
        life, faults = self._lives(nodes)
        if self._plan is None and columns.rows:
            self._plan = planned(self._config, None, columns, sampled_columns, [])
        summary = self._summarise(nodes, sampled_columns, stamp)
        return Look(
            name,
            self.directory,
            summary,
            columns,
            tuple(
                f"{text(alert.get('rule'))}: {text(alert.get('sentence'))}"
                for alert in firing
            ),
            _phases(nodes, samples),
            tuple(lagging(samples)),
            _memory(columns, samples),
            _seconds_left(summary),
            life,
            faults,
            _newest_sample(self._rows),
        )

    def _summarise(
        self,
        nodes: Mapping[str, Node],
        samples: Mapping[int, Columns],
        stamp: float | None,
    ) -> Summary:
        """Returns the summary of the last rows; `stamp`: when the config was written."""
        now = time.time()
        held = in_use(self.directory)
        # Between two generations no process holds the directory, and yet the run goes on.
        supervised = any(
            now - node.wall < FRESH and node.state != "ended" for node in nodes.values()
        )
        return summarise(
            RunFacts(
                directory=self.directory,
                now=now,
                config=self._config,
                plan=self._plan,
                steps=_columns(list(self._rows)[-RECENT_ROWS:]),
                torn=self._metrics.torn,
                written=written(self.directory / METRICS) or stamp,
                best=self._best or Best(),
                in_use=True if supervised else held,
                samples=samples,
            )
        )

    def _read_rows(self) -> None:
        for row in self._metrics.new():
            step = row.get("step")
            # A run that went on from a checkpoint takes some steps again.
            while (
                self._rows
                and isinstance(step, int)
                and (number(self._rows[-1].get("step")) or 0.0) >= step
            ):
                self._rows.pop()
                self._best = None
            self._rows.append(row)
            if (
                self._best is not None
                and (evaluation := evaluation_of(row))
                and evaluation[0] > self._best.last
            ):
                self._best.add(*evaluation)
        if self._best is None:
            self._best = best(self.directory)

    def _read_samples(self) -> dict[int, Sequence[Row]]:
        for rank, path in list(sampled(self.directory).items())[:MOST_RANKS]:
            if rank not in self._samples:
                self._samples[rank] = (
                    RowReader(path, SAMPLE_TAIL),
                    deque(maxlen=SAMPLES),
                )
        for reader, rows in self._samples.values():
            rows.extend(reader.new())
        return {rank: list(rows) for rank, (_, rows) in self._samples.items() if rows}

    def _read_nodes(self) -> dict[str, Node]:
        try:
            if (self.directory / SURVIVE).is_dir():
                return read_records(self.directory)[0]
            return {}
        except ConfigError:
            return {}

    def _lives(self, nodes: Mapping[str, Node]) -> tuple[str, tuple[Failure, ...]]:
        stamp = written(self.directory / SURVIVE / "plans")
        if stamp is not None and stamp != self._planned:
            with contextlib.suppress(ConfigError):
                self._plans, _ = read_plans(self.directory)
            self._planned = stamp
        if not self._plans:
            return "", ()
        plan = self._plans[-1]
        now = time.time()
        found = failures(History((), tuple(self._plans), nodes, {}, 0))
        if plan.state == "over":
            return f"over in generation {plan.generation}: {text(plan.reason)}", found
        silent = max(
            ((now - n.wall, n.name) for n in nodes.values() if n.state != "ended"),
            default=None,
        )
        sign = (
            f"; last sign of life of {short(silent[1])} {duration(max(silent[0], 0.0))} ago"
            if silent
            else ""
        )
        members = ", ".join(map(short, plan.members)) or "no node yet"
        return f"generation {plan.generation} on {members}{sign}", found


def _columns(rows: Iterable[Row]) -> Columns:
    columns = Columns()
    for row in rows:
        columns.add(row)
    return columns


def _phases(nodes: Mapping[str, Node], samples: Mapping[int, Sequence[Row]]) -> str:
    """Returns what the processes do now, as their supervisors say; without these, how rank 0 has spent the time of its
    newest sample.
    """
    ages = defaultdict[str, list[float]](list)
    for node in nodes.values():
        if node.rank is not None and node.state == "running":
            ages[text(node.rank.phase)].append(node.rank.phase_age)
    if ages:
        return ", ".join(
            f"{len(of)} in {phase} for {duration(round(max(of), 1))}"
            for phase, of in ages.items()
        )
    phases = samples[0][-1].get("phase_seconds") if 0 in samples else None
    spent = (
        {str(k): v for k, v in phases.items() if number(v)}
        if isinstance(phases, dict)
        else {}
    )
    total = sum(spent.values())
    largest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    return ", ".join(
        f"{short(name)} {seconds / total:.0%}"
        for name, seconds in largest
        if seconds >= 0.005 * total
    )


def _memory(columns: Columns, samples: Mapping[int, Sequence[Row]]) -> float | None:
    sizes = [float(value) for value in columns.known("memory_in_use_bytes")[-1:]]
    for rows in samples.values():
        used = rows[-1].get("device_memory_used_bytes")
        values = used.values() if isinstance(used, dict) else [used]
        sizes += [n for value in values if (n := number(value)) is not None]
    return max(sizes, default=None)


def lagging(samples: Mapping[int, Sequence[Row]]) -> list[str]:
    """Returns a sentence for each process that lags, from the last two samples (or one) of each rank."""
    times = {
        rank: [t for row in rows if (t := number(row.get("time"))) is not None]
        for rank, rows in samples.items()
    }
    newest = {rank: known[-1] for rank, known in times.items() if known}
    if len(newest) < 2:
        return []
    hosts = {rank: rows[-1].get("host") for rank, rows in samples.items()}
    names = {
        rank: f"rank {rank}{f' on {short(host)}' if isinstance(host, str) else ''}"
        for rank, host in hosts.items()
    }
    gaps = [
        known[-1] - known[-2]
        for known in times.values()
        if len(known) > 1 and known[-1] > known[-2]
    ]
    every = statistics.median(gaps) if gaps else None
    last = max(newest.values())
    silent = {
        rank: last - time
        for rank, time in newest.items()
        if every and last - time > SILENT * every
    }
    spent = {rank: _spent(rows[-1]) for rank, rows in samples.items()}
    return [
        *(
            f"{names[rank]} has said nothing for {duration(seconds)}"
            for rank, seconds in silent.items()
        ),
        *(
            f"{names[rank]} is slow: {pace.words()}"
            for rank, pace in stragglers.judge(spent).items()
            if pace.is_slow
        ),
    ]


def _spent(sample: Row) -> dict[str, float]:
    phases = sample.get("phase_seconds")
    if isinstance(phases, dict):
        return {name: number(phases.get(name)) or 0.0 for name in STEPPING}
    return {}


def _newest_sample(rows: Iterable[Row]) -> tuple[str, str] | None:
    """Returns the first sample of the newest evaluation, with its prompt."""
    drawn = [samples[0] for row in rows if (samples := samples_in(row))]
    return drawn[-1] if drawn else None


def _seconds_left(summary: Summary) -> float | None:
    """Returns the seconds until the last step of a run that goes on; None where nobody knows."""
    if summary.state == "going on" and summary.speed and summary.steps:
        return summary.speed.median * (summary.steps - summary.step)
    return None
