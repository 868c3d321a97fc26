"""Holds what a diagnosis reads and writes: evidence from a run's files; findings, and what cannot be told.

A row or sample that lacks a value says nothing of it: means are over those that do, and None where none does.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from meshtrain.config import Config
from meshtrain.plan.estimate import Plan
from meshtrain.report.rows import Columns
from meshtrain.report.trace.attribution import Attribution
from meshtrain.survive import history as histories
from meshtrain.survive.heartbeat import STEPPING

LATEST = (
    # Rows that are looked at: what a run was like a day ago is no reason for how it is now
    500
)
PHASE = "phase_seconds."  # columns of the seconds that a process spent in each phase


@dataclass(frozen=True)
class Evidence:
    """The newest rows of a run, the samples that each process took meanwhile, a trace, the plan."""

    config: Config
    steps: Columns  # rows of metrics.jsonl
    # Of resources/, by rank
    samples: Mapping[int, Columns] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)  # by rank
    attribution: Attribution | None = None  # of a trace
    plan: Plan | None = None  # of this config on its cluster
    lost: float | None = None  # share of a supervised run's time that faults took

    def step(self, name: str) -> np.ndarray:
        """Returns what the newest rows say, float64 in their order, NaN where they say nothing.

        The first row of a run is left out: its step touches memory and code for the first time.
        """
        return self.steps[name][1:][-LATEST:]

    def total(self, name: str) -> float:
        """Returns the sum over the newest rows; 0 where none says anything."""
        return float(np.nansum(self.step(name)))

    @property
    def rows(self) -> int:
        return len(self.step("step"))

    @property
    def seconds(self) -> float:
        """Seconds of all steps of the newest rows, without compiling and evaluating."""
        return self.total("step_seconds")

    def sampled(self, rank: int, name: str) -> np.ndarray:
        """Returns the finite values of one process's samples that were taken while the newest rows were written."""
        columns = self.samples[rank]
        values = columns[name]
        times = self.step("time")
        known = np.isfinite(values)
        if np.isfinite(times).any():
            known &= columns["time"] >= np.nanmin(times)
        return values[known]

    def mean(self, rank: int, name: str) -> float | None:
        values = self.sampled(rank, name)
        return float(values.mean()) if len(values) else None

    def means(self, name: str) -> list[float]:
        """Returns the mean of each process whose samples say."""
        return [
            mean for rank in self.samples if (mean := self.mean(rank, name)) is not None
        ]

    def machines(self) -> Iterator[tuple[str, list[int]]]:
        """Yields each machine's name, and the ranks on it."""
        by_name: dict[str, list[int]] = {}
        for rank in self.samples:
            by_name.setdefault(self.hosts.get(rank, f"of rank {rank}"), []).append(rank)
        yield from by_name.items()

    @property
    def idle(self) -> float | None:
        """Share of the time that the machines' cores stood idle; None where no sample says."""
        busy = self.means("machine_cpu_ratio")
        return 1 - float(np.mean(busy)) if busy else None

    def phases(self) -> dict[int, dict[str, float]]:
        """Returns, by rank, the shares of a process's time in the phases of a step, together 1, where its samples
        say.
        """
        shares = {}
        for rank in self.samples:
            spent = {
                phase: float(self.sampled(rank, PHASE + phase).sum())
                for phase in STEPPING
            }
            if whole := math.fsum(spent.values()):
                shares[rank] = {
                    phase: seconds / whole for phase, seconds in spent.items()
                }
        return shares


@dataclass(frozen=True)
class Finding:
    """Something that makes a run slow, or endangers it.

    `severity` is the share of a step's time (0 to 1) that curing it would win, and what findings are ordered by.
    """

    name: str  # a word for programs
    signal: str  # what was looked at
    value: float  # what it was
    expected: float  # what it is at most where nothing is wrong
    severity: float
    sentence: str
    advice: str
    settings: tuple[
        str, ...
    ] = ()  # of the advice, as for --set; the planner has shown that they are faster
    sure: bool = True  # not where the figures allow for another reason

    @property
    def excess(self) -> float:
        return self.value - self.expected


@dataclass(frozen=True)
class DiagnosisPart:
    """The seconds of one part of a step, measured and planned. None: not measured, or not planned."""

    name: str
    seconds: float | None
    planned: float | None


@dataclass(frozen=True)
class Diagnosis:
    """Findings, the most severe first.

    None of them and nothing in `cannot_tell`: healthy, as far as a run's files can say.
    """

    findings: tuple[Finding, ...]
    parts: tuple[DiagnosisPart, ...] = ()
    mean_seconds: float | None = None  # of a step, by the rows
    planned_seconds: float | None = None
    cluster: str | None = None  # that it was planned for
    # sentences: what is large, and nothing better is known
    remarks: tuple[str, ...] = ()
    cannot_tell: tuple[str, ...] = ()  # sentences, with what would cure it

    @property
    def first(self) -> str:
        """The name of the most severe finding, or none."""
        return self.findings[0].name if self.findings else "none"

    def as_json(self) -> dict[str, Any]:
        findings = [
            asdict(finding) | {"excess": finding.excess} for finding in self.findings
        ]
        return histories.plain(
            {"first": self.first} | asdict(self) | {"findings": findings}
        )
