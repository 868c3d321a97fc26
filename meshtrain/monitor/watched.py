"""Watches a run: what is known of it at this moment, from the ends of its files, read on from where the last look ended.

`lagging` says which process the others wait for, or has not been heard of, from the newest sample of each; who is slow, `survive.stragglers` says.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config import Config, ConfigError, short
from meshtrain.plan.estimate import Plan
from meshtrain.report.facts import RunFacts, best, config_of, planned, sampled, written
from meshtrain.report.rows import Columns
from meshtrain.report.summary import Summary, summarise
from meshtrain.run.best import Best, evaluation_of
from meshtrain.run.directory import ALERTS, CONFIG, METRICS
from meshtrain.run.lock import in_use
from meshtrain.run.rows import Row, RowReader
from meshtrain.survive import history as histories
from meshtrain.survive import stragglers
from meshtrain.survive.heartbeat import STEPPING
from meshtrain.survive.records import Node
from meshtrain.survive.store import SURVIVE
from meshtrain.units import duration

ROWS, SAMPLES = 400, 2  # that are kept: of steps, and of each process
RECENT = 50  # of the rows, of which figures are: how it is now
TAIL, SAMPLE_TAIL = 1 << 18, 1 << 14  # bytes before the ends of files with which it begins
MOST_RANKS = 256
SILENT = 3.0  # times the time between samples, without one
FRESH = 30.0  # seconds for which a supervisor's record says that the run goes on


@dataclass(frozen=True)
class Look:
    """A run at one moment. `summary`: none where there is no run yet."""

    name: str
    directory: Path
    summary: Summary | None
    columns: Columns  # of the newest rows
    alerts: tuple[str, ...]  # that fire
    phases: str  # what its processes do
    lagging: tuple[str, ...]
    memory: float | None  # bytes of the fullest device
    left: float | None  # seconds until the last step

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.summary is not None and self.summary.state == "done"


class WatchedRun:
    """One run directory, looked at again and again; it need not be there yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rows: deque[Row] = deque(maxlen=ROWS)
        self._metrics, self._alerts = RowReader(directory / METRICS, TAIL), RowReader(directory / ALERTS, TAIL)
        self._firing: dict[tuple[object, object], Row] = {}
        self._samples: dict[int, tuple[RowReader, deque[Row]]] = {}
        self._config_of: float | None = None
        self._config: Config | None = None
        self._plan: Plan | None = None
        self._best: Best | None = None  # none: to be read from all rows

    def look(self) -> Look:
        """What is new, put together with what was."""
        name = short(self.directory.name or self.directory)
        try:
            begun = (self.directory / CONFIG).exists() or (self.directory / METRICS).exists()
        except (OSError, ValueError):
            begun = False
        if not begun:
            return Look(name, self.directory, None, Columns(), (), "", (), None, None)
        self._read_config()
        for row in self._metrics.new():
            step = row.get("step")
            # A run that went on from a checkpoint takes some steps again.
            while self._rows and isinstance(step, int) and self._step(-1) >= step:
                self._rows.pop()
                self._best = None
            self._rows.append(row)
            if self._best is not None and (found := evaluation_of(row)) and found[0] > self._best.last:
                self._best.add(*found)
        if self._best is None:
            self._best = best(self.directory)
        for alert in self._alerts.new():
            self._firing[str(alert.get("rule")), str(alert.get("rank"))] = alert
        samples = self._sampled()
        columns = _columns(self._rows)
        nodes = self._nodes()
        kept = {rank: _columns(found) for rank, found in samples.items()}
        if self._plan is None and columns.rows:
            self._plan = planned(self._config, None, columns, kept, [])
        recent = _columns(list(self._rows)[-RECENT:])
        summary = summarise(self._facts(recent, kept, nodes))
        hosts = {
            rank: short(found[-1]["host"])
            for rank, found in samples.items()
            if found and isinstance(found[-1].get("host"), str)
        }
        return Look(
            name, self.directory, summary, columns, tuple(self._alerts_firing()), _phases(nodes, samples),
            tuple(lagging(samples, hosts)), _memory(columns, samples), self._left(summary),
        )  # fmt: skip

    def _step(self, i: int) -> float:
        return histories.number(self._rows[i].get("step")) or 0.0

    def _read_config(self) -> None:
        stamp = written(self.directory / CONFIG)
        if stamp is None or stamp == self._config_of:
            return
        self._config_of = stamp
        self._config = config_of(self.directory, [])
        self._plan = None

    def _sampled(self) -> dict[int, Sequence[Row]]:
        for rank, path in list(sampled(self.directory).items())[:MOST_RANKS]:
            if rank not in self._samples:
                self._samples[rank] = RowReader(path, SAMPLE_TAIL), deque(maxlen=SAMPLES)
        for follower, kept in self._samples.values():
            kept.extend(follower.new())
        return {rank: list(kept) for rank, (_, kept) in self._samples.items()}

    def _nodes(self) -> dict[str, Node]:
        try:
            return histories.read_records(self.directory)[0] if (self.directory / SURVIVE).is_dir() else {}
        except ConfigError:
            return {}

    def _facts(self, columns: Columns, samples: Mapping[int, Columns], nodes: Mapping[str, Node]) -> RunFacts:
        now, held = time.time(), in_use(self.directory)
        # Between two generations no process holds the directory, and yet the run goes on.
        tended = any(now - node.wall < FRESH and node.state != "ended" for node in nodes.values())
        return RunFacts(
            directory=self.directory, now=now, config=self._config, plan=self._plan, steps=columns,
            torn=self._metrics.torn, written=written(self.directory / METRICS) or written(self.directory / CONFIG),
            best=self._best or Best(), in_use=True if tended else held, samples=samples,
        )  # fmt: skip

    def _alerts_firing(self) -> list[str]:
        return [
            f"{histories.text(alert.get('rule'))}: {histories.text(alert.get('sentence'))}"
            for alert in self._firing.values()
            if alert.get("state") == "firing"
        ]

    def _left(self, summary: Summary) -> float | None:
        if summary.state != "going on" or not summary.speed or not summary.steps:
            return None
        return summary.speed.median * (summary.steps - summary.step)


def _columns(rows: Iterable[Row]) -> Columns:
    columns = Columns()
    for row in rows:
        columns.add(row)
    return columns


def _phases(nodes: Mapping[str, Node], samples: Mapping[int, Sequence[Row]]) -> str:
    """What the processes do now, as their supervisors say; without these, how rank 0 has spent the time of its newest sample."""
    ranks = [node.rank for node in nodes.values() if node.rank is not None and node.state == "running"]
    if ranks:
        by_phase: dict[str, list[float]] = {}
        for rank in ranks:
            by_phase.setdefault(histories.text(rank.phase), []).append(rank.phase_age)
        return ", ".join(
            f"{len(ages)} in {phase} for {duration(round(max(ages), 1))}" for phase, ages in by_phase.items()
        )
    newest = samples[0][-1] if samples.get(0) else {}
    phases = newest.get("phase_seconds")
    spent = {str(k): v for k, v in phases.items() if histories.number(v)} if isinstance(phases, dict) else {}
    whole = sum(spent.values())
    largest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{short(name)} {seconds / whole:.0%}" for name, seconds in largest if seconds >= 0.005 * whole)


def _memory(columns: Columns, samples: Mapping[int, Sequence[Row]]) -> float | None:
    in_use = [float(value) for value in columns.known("memory_in_use_bytes")[-1:]]
    for rows in samples.values():
        used = rows[-1].get("device_memory_used_bytes") if rows else None
        values = used.values() if isinstance(used, dict) else [used]
        in_use += [n for value in values if (n := histories.number(value)) is not None]
    return max(in_use, default=None)


def lagging(samples: Mapping[int, Sequence[Row]], hosts: Mapping[int, str]) -> list[str]:
    """Returns a sentence for each process that lags, from the last two samples (or one) of each rank."""
    times = {
        rank: [t for row in rows if (t := histories.number(row.get("time"))) is not None]
        for rank, rows in samples.items()
    }
    newest = {rank: known[-1] for rank, known in times.items() if known}
    if len(newest) < 2:
        return []
    names = {rank: f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}" for rank in samples}
    gaps = [known[-1] - known[-2] for known in times.values() if len(known) > 1 and known[-1] > known[-2]]
    every, last = statistics.median(gaps) if gaps else None, max(newest.values())
    silent = {rank: last - time for rank, time in newest.items() if every and last - time > SILENT * every}
    spent = {rank: _spent(rows[-1]) for rank, rows in samples.items() if rows}
    return [
        *(f"{names[rank]} has said nothing for {duration(seconds)}" for rank, seconds in silent.items()),
        *(f"{names[rank]} is slow: {pace.words()}" for rank, pace in stragglers.judge(spent).items() if pace.is_slow),
    ]


def _spent(sample: Row) -> dict[str, float]:
    phases = sample.get("phase_seconds")
    return {name: histories.number(phases.get(name)) or 0.0 for name in STEPPING} if isinstance(phases, dict) else {}
