"""Times a step against the reference in the same minutes, since machines are shared and noisy."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax


class Ratios(NamedTuple):
    """Of each round: wall-clock and processor seconds of the step over those of the reference, and the step's own seconds."""

    wall: list[float]
    cpu: list[float]
    seconds: list[float]

    def __str__(self) -> str:
        return f"{median(self.wall):6.2f} ({min(self.wall):.2f}-{max(self.wall):.2f}) {median(self.cpu):5.2f} {median(self.seconds):7.2f}"


HEADER = f"{'ratio':>6} {'(min-max)':>11} {'CPU':>5} {'step s':>7}"


class Stepping:
    """A compiled step with its state, run again and again."""

    def __init__(self, step: Callable[..., tuple[Any, Any]], state: Any, *batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> None:
        self.state, found = self.step(self.state, *self.batch)
        jax.block_until_ready((self.state, found))


def compare(reference: Stepping, step: Stepping, rounds: int) -> Ratios:
    """Each round runs one, then the other, twice, and times the second time: a run's steps follow each other, and find memory
    and caches as the step before left them."""
    found = Ratios([], [], [])
    for _ in range(rounds):
        (before, before_cpu), (after, after_cpu) = _second(reference), _second(step)
        found.wall.append(after / before)
        found.cpu.append(after_cpu / before_cpu)
        found.seconds.append(after)
    return found


def _second(run: Stepping) -> tuple[float, float]:
    run()
    began, began_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - began_cpu
