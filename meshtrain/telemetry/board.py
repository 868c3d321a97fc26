"""The newest values of a process, as families for its page of metrics; on the first process also what all processes have.

Each process tells of itself. The first one also tells the step's metrics, which are the same for all, and of each process metric the
least, the median and the greatest value with the rank of its process: a few hundred series, however many processes there are.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from meshtrain.telemetry.catalogue import METRICS, PREFIX, PROCESSES_RANK, Metric, Source
from meshtrain.telemetry.exposition import Family, Labels, flat

Row = Mapping[str, Any]
FEW = 64  # processes, of which each scrape has the newest
MOST_SILENT = 3.0  # looks at the samples of a process until it is left out, if there is no new one


class Board:
    """Called as a listener of the hub. `totals`: of the hub. `every`: seconds between two looks at the samples of other processes."""

    def __init__(self, rank: int, host: str, run: str, totals: Mapping[str, float], every: float) -> None:
        self._rank, self._totals, self._every = rank, totals, every
        self._info: Labels = (("run", run), ("rank", str(rank)), ("host", host))
        self._step: dict[str, Any] = {}
        self._own: Row = {}
        self._sums: dict[str, dict[Labels, float]] = {}
        self._all: dict[int, tuple[float, Row]] = {}
        self._of_all: list[Family] = []
        self._next = 0.0  # time to look at all, by time.monotonic
        self._lock = threading.Lock()

    def __call__(self, row: Row, source: Source) -> None:
        with self._lock:
            if source == "step":
                # What this row does not know, such as the loss of the last evaluation, is what it was.
                self._step |= row
                return
            self._all[row["rank"]] = time.monotonic(), row
            if row["rank"] == self._rank:
                self._own = row
                for metric in _counters("process"):
                    sums = self._sums.setdefault(metric.name, {})
                    for labels, value in flat(row.get(metric.name), metric.labels):
                        sums[labels] = sums.get(labels, 0.0) + value

    def tick(self, now: float) -> None:
        """Looks at many processes beside the scrapes, and as often as they are read: thousands take longer than a scrape may."""
        if len(self._all) > FEW and time.monotonic() >= self._next:
            self._look()

    def _look(self) -> None:
        """At all processes that were heard lately."""
        now = time.monotonic()
        self._next = now + self._every
        with self._lock:
            rows = {rank: row for rank, (at, row) in self._all.items() if at >= now - MOST_SILENT * self._every}
        self._of_all = list(_over_processes(rows)) if len(rows) > 1 else []

    def families(self) -> Iterator[Family]:
        """What is known by now."""
        if len(self._all) <= FEW:
            self._look()
        with self._lock:
            step, own, totals = dict(self._step), self._own, dict(self._totals)
            sums = {name: dict(of) for name, of in self._sums.items()}
            of_all = self._of_all
        yield Family(PREFIX + "process", "info", "what this process is", samples=[(self._info, 1)])
        for metric in METRICS:
            if metric.source == "step" and self._rank:
                continue
            family = Family(metric.exposed, metric.kind, metric.meaning, metric.unit)
            if metric.kind == "gauge":
                found = (own if metric.source == "process" else step).get(metric.name)
                family.samples = list(flat(found, metric.labels))
            elif metric.source == "step":
                family.samples = [((), totals[metric.name])] if metric.name in step else []
            else:
                family.samples = list(sums.get(metric.name, {}).items())
            yield family
        yield from of_all


def _over_processes(rows: Mapping[int, Row]) -> Iterator[Family]:
    ranks = Family(PROCESSES_RANK, "gauge", "the process that a value over all processes is of, by metric and over")
    for metric in METRICS:
        if metric.source != "process":
            continue
        found: dict[Labels, list[tuple[float, int]]] = {}
        for rank, row in rows.items():
            for labels, value in flat(row.get(metric.name), metric.labels):
                kept = tuple(label for label in labels if label[0] != "device")
                found.setdefault(kept, []).append((value, rank))
        family = Family(metric.over_processes, "gauge", f"over all processes: {metric.meaning}", metric.unit)
        for labels, values in found.items():
            for over, pick in (("min", min), ("median", statistics.median_low), ("max", max)):
                value, rank = pick(values)
                family.samples.append(((*labels, ("over", over)), value))
                ranks.samples.append(((("metric", metric.name), *labels, ("over", over)), rank))
        yield family
    yield ranks


def _counters(source: Source) -> list[Metric]:
    return [metric for metric in METRICS if metric.source == source and metric.kind == "counter"]
