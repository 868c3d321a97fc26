"""Times a step against the reference in the same minutes, since machines are shared and noisy.

Wall-clock tells how long one waits; where other work has the cores too, the processor's seconds bear it better: those that the program
computes (user), and those that the kernel does for it (system: mostly zeroing memory that is touched for the first time, so page faults
are counted beside). A step's own figures come with those of the reference, so that what grows on another machine is seen.
"""

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax


class Spent(NamedTuple):
    """What a step took: seconds on the wall, of the processor in the program and in the kernel, and page faults."""

    wall: float
    user: float
    system: float
    faults: float

    @property
    def processor(self) -> float:
        return self.user + self.system

    def __str__(self) -> str:
        return f"{self.wall:6.2f} {self.user:6.2f} {self.system:5.2f} {self.faults / 1e3:6.0f}"


class Compared(NamedTuple):
    """What the step and the reference took, round by round."""

    step: list[Spent]
    reference: list[Spent]

    @property
    def walls(self) -> list[float]:
        """The step's wall-clock over the reference's."""
        return [step.wall / reference.wall for step, reference in zip(*self, strict=True)]

    @property
    def processor(self) -> float:
        """The median of the same of processor seconds."""
        return median(step.processor / reference.processor for step, reference in zip(*self, strict=True))

    def __str__(self) -> str:
        wall = self.walls
        return f"{median(wall):6.2f} ({min(wall):.2f}-{max(wall):.2f}) {self.processor:5.2f} {_typical(self.step)} | {_typical(self.reference)}"


_SPENT = f"{'wall':>6} {'user':>6} {'sys':>5} {'faults':>6}"
HEADER = f"{'ratio':>6} {'(min-max)':>11} {'CPU':>5} {_SPENT} | {_SPENT} of the reference; s, thousands"


class Stepping:
    """A compiled step with its state, run again and again."""

    def __init__(self, step: Callable[..., tuple[Any, Any]], state: Any, *batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        """Takes a step, and returns its loss or metrics."""
        self.state, measured = self.step(self.state, *self.batch)
        return jax.block_until_ready((self.state, measured))[1]


def compare(reference: Stepping, step: Stepping, rounds: int) -> Compared:
    """Each round runs one, then the other, twice, and times the second time: a run's steps follow each other, and find memory
    and caches as the step before left them."""
    found = Compared([], [])
    for _ in range(rounds):
        found.reference.append(_second(reference))
        found.step.append(_second(step))
    return found


def _typical(spent: list[Spent]) -> Spent:
    return Spent(*(median(column) for column in zip(*spent, strict=True)))


def _second(run: Stepping) -> Spent:
    run()
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    run()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return Spent(
        wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt
    )
