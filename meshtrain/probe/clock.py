"""Programs are timed in turns, so that what disturbs the machine for a moment disturbs none of them alone.

The median time of a collective counts, since training gets it. The shortest time of one device or one pair counts,
since it shows what they can do: broken hardware is slow every time, and chance makes nothing fast.

In several processes a program has ended when the last of them has; each run begins behind a barrier, or waiting for the
others would count.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from meshtrain.compat import wait_for_processes
from meshtrain.probe.figures import STEADY
from meshtrain.run.processes import gathered

REPEATS = 7
ATTEMPTS = 2
PATIENCE = 600.0  # seconds that processes wait for each other's compilers
_meetings = itertools.count()


@dataclass(frozen=True)
class Job:
    """A timed program: `run` begins it and returns what to wait for; it does the same thing `rounds` times."""

    run: Callable[[], jax.Array]
    rounds: int = 1


@dataclass(frozen=True, eq=False)
class Times:
    """The times of each job, in seconds a round."""

    median: np.ndarray
    least: np.ndarray
    spread: np.ndarray  # the middle half of the repeats over their median

    @property
    def unsteady(self) -> float:
        return float(np.median(self.spread))


def times(
    jobs: Sequence[Job],
    barrier: Callable[[], object] | None = None,
    repeats: int = REPEATS,
    attempts: int = ATTEMPTS,
) -> Times:
    """Runs each job once, then all of them in turn, `repeats` times. All processes must give the same jobs.

    Times that vary are taken again; of the attempts the steadiest counts.
    """
    _warm(jobs, barrier)
    # All processes hear the same times, and so decide alike.
    return _steadiest(
        lambda: np.max(np.array(gathered(_take_turns(jobs, repeats, barrier))), axis=0),
        attempts,
    )


def own_times(jobs: Sequence[Job]) -> Times:
    """Does the same with jobs that are this process's alone; how many it has is its own affair."""
    _warm(jobs, None)
    return _steadiest(lambda: np.array(_take_turns(jobs, REPEATS, None)), ATTEMPTS)


def _steadiest(take: Callable[[], np.ndarray], attempts: int) -> Times:
    results: list[Times] = []
    for _ in range(attempts):
        taken = take()
        low, median, high = np.quantile(taken, (0.25, 0.5, 0.75), axis=0)
        results.append(Times(median, np.min(taken, axis=0), (high - low) / median))
        if results[-1].unsteady <= STEADY:
            break
    return min(results, key=lambda one: one.unsteady)


def _warm(jobs: Sequence[Job], barrier: Callable[[], object] | None) -> None:
    for job in jobs:
        if barrier:
            # Compiled at different moments they would wait for each other inside a collective, which on CPUs is refused
            # after 30 s.
            wait_for_processes(f"probe {next(_meetings)}", PATIENCE)
        jax.block_until_ready(job.run())


def _take_turns(
    jobs: Sequence[Job], repeats: int, barrier: Callable[[], object] | None
) -> list[list[float]]:
    def seconds(job: Job) -> float:
        if barrier:
            jax.block_until_ready(barrier())
        start = time.perf_counter()
        jax.block_until_ready(job.run())
        return (time.perf_counter() - start) / job.rounds

    return [[seconds(job) for job in jobs] for _ in range(repeats)]
