"""What the files of a run tell of its speed: the newest rows, the samples that each process took meanwhile, a trace, the plan.

A row or sample that lacks a value says nothing of it: means are over those that do, and None where none does.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshtrain.config import Config
from meshtrain.plan.estimate import Plan
from meshtrain.report.rows import Columns
from meshtrain.report.trace.attribution import Attribution

LATEST = 500  # rows that are looked at: what a run was like a day ago is no reason for how it is now
PHASE = "phase_seconds."  # columns of the seconds that a process spent in each phase
# Of one step, as `survive.beat` names them: in all but the last a process waits for no other.
HOST, WAIT = ("data", "dispatch", "log"), "wait"


@dataclass(frozen=True)
class Evidence:
    """Of one run; made by `reading.read`, or in a test by hand."""

    config: Config
    steps: Columns  # rows of metrics.jsonl
    samples: Mapping[int, Columns] = field(default_factory=dict)  # of resources/, by rank
    hosts: Mapping[int, str] = field(default_factory=dict)  # by rank
    attribution: Attribution | None = None  # of a trace
    plan: Plan | None = None  # of this config on its cluster
    lost: float | None = None  # share of a supervised run's time that faults took

    # --- rows

    def step(self, name: str) -> np.ndarray:
        """float64: what the newest rows say, in their order, NaN where they say nothing. The first row of a run is left out: its
        step touches memory and code for the first time."""
        return self.steps[name][1:][-LATEST:]

    def total(self, name: str) -> float:
        """Sum over the newest rows; 0 where none says anything."""
        return float(np.nansum(self.step(name)))

    @property
    def rows(self) -> int:
        return len(self.step("step"))

    @property
    def seconds(self) -> float:
        """Of all steps of the newest rows; compiling and evaluating are no part of it."""
        return self.total("step_seconds")

    # --- samples

    def sampled(self, rank: int, name: str) -> np.ndarray:
        """float64: what one process's samples say that were taken while the newest rows were written; finite values alone."""
        of = self.samples[rank]
        values, times = of[name], self.step("time")
        known = np.isfinite(values)
        if np.isfinite(times).any():
            known &= of["time"] >= np.nanmin(times)
        return values[known]

    def mean(self, rank: int, name: str) -> float | None:
        values = self.sampled(rank, name)
        return float(values.mean()) if len(values) else None

    def most(self, rank: int, name: str) -> float | None:
        values = self.sampled(rank, name)
        return float(values.max()) if len(values) else None

    def machines(self) -> Iterator[tuple[str, list[int]]]:
        """Each machine's name, and the ranks on it."""
        by_name: dict[str, list[int]] = {}
        for rank in self.samples:
            by_name.setdefault(self.hosts.get(rank, f"of rank {rank}"), []).append(rank)
        yield from by_name.items()

    @property
    def idle(self) -> float | None:
        """Share of the time that the machines' cores stood idle; None where no sample says."""
        busy = [b for rank in self.samples if (b := self.mean(rank, "machine_cpu_ratio")) is not None]
        return 1 - float(np.mean(busy)) if busy else None

    def phases(self, rank: int) -> dict[str, float] | None:
        """Shares of a process's time in the phases of a step, together 1; None where its samples do not say."""
        spent = {phase: float(self.sampled(rank, PHASE + phase).sum()) for phase in (*HOST, WAIT)}
        whole = math.fsum(spent.values())
        return {phase: seconds / whole for phase, seconds in spent.items()} if whole else None
