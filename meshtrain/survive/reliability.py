"""Estimates how often a run fails, how certain that is, and what it costs: counts from its history, and what formulas
predict from them.

A failure is a restart that counts: a new generation that was formed for another reason than a start, a node that came
back, or a preemption; and the fault after which the run was given up.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from meshtrain.plan.failures import daly, goodput
from meshtrain.survive.detectors import FREE
from meshtrain.survive.history import History, integer, text
from meshtrain.survive.ledger import GOOD_EXITS, Ledger

SURE = 0.95  # of intervals


@dataclass(frozen=True)
class Failure:
    """One failure, at the moment of the verdict."""

    time: float
    kind: str
    blamed: tuple[str, ...]
    generation: int  # that failed
    step: int | None
    reason: str
    noticed: float | None  # seconds after the last sign of progress; none: not known
    restart: float | None  # seconds to the first step after it; none: none was taken


@dataclass(frozen=True)
class Reliability:
    """Holds a history's figures on failures. Times in seconds; None: not known."""

    failures: tuple[Failure, ...]
    # Seconds in which the run was to go on: without those between its end and its being started again
    exposed: float
    between: float | None  # mean time between failures
    between_least: float  # with which it is consistent, at SURE
    between_most: float
    noticed: float | None  # mean, from the last sign of progress to the verdict
    restart: float | None  # mean, from the verdict to the first step after it
    write: float | None  # mean for which a save stops training
    interval: float | None  # mean seconds of steps between saves
    interval_steps: float | None
    step: float | None  # seconds a step that counts
    expected: float | None  # goodput by Daly's formula for the above
    advised: int | None  # steps between saves that lose least, by Daly's formula


def reliability(history: History, times: Ledger) -> Reliability:
    """Returns the failures of a history, and what its own figures, put into Daly's formulas, predict."""
    events = failures(history)
    away = 0.0
    for end in (plan.wall for plan in history.plans if plan.state == "over"):
        back = min(
            (e.time for e in history.of("join", "formed") if e.time > end),
            default=times.ended,
        )
        away += max(min(back, times.ended) - end, 0.0)
    exposed = max(times.wall - away, 0.0)
    between = exposed / len(events) if events else None
    noticed = _mean(f.noticed for f in events)
    restart = _mean(f.restart for f in events)

    # A save's own time is in what had been spent by the next.
    pairs = [
        pair for generation in times.generations for pair in pairwise(generation.saves)
    ]
    write = _mean(
        after.seconds["checkpoint"] - before.seconds["checkpoint"]
        for before, after in pairs
    )
    interval = _mean(
        after.seconds["step"] - before.seconds["step"] for before, after in pairs
    )
    interval_steps = _mean(after.step - before.step for before, after in pairs)
    taken = _steps_that_count(times)
    step = times.seconds["step"] / taken if taken else None
    expected = advised = None
    if step and interval and interval_steps and write is not None:
        # What else goes with a save's interval, such as an eval, stops the steps as a save does.
        beside = (
            sum(times.seconds[k] for k in ("data", "eval", "checkpoint"))
            * interval_steps
            / taken
        )
        stands = (noticed or 0.0) + (restart or 0.0)
        expected = goodput(interval, beside, stands, between or math.inf) * (
            1 - _apart(history, times) / times.wall
        )
        if between and write:
            advised = max(1, round(daly(write, between) / (interval / interval_steps)))
    return Reliability(
        events,
        exposed,
        between,
        *mean_bounds(exposed, len(events)),
        noticed,
        restart,
        write,
        interval,
        interval_steps,
        step,
        expected,
        advised,
    )


def failures(history: History) -> tuple[Failure, ...]:
    """Returns every failure, in order of time; of one generation once, however often it was planned."""
    first = {
        e.integer("generation"): e.time
        for e in reversed(list(history.of("going")))
        if e.integer("rank") == 0
    }
    judged = {e.integer("generation"): e.time for e in history.of("verdict")}
    ends = [
        (e, e.number("phase_seconds"))
        for e in history.of("ended")
        if e.integer("rank") == 0
    ]
    stood = {
        e.integer("generation"): e.time - seconds
        for e, seconds in ends
        if seconds is not None
    }
    by_generation: dict[int, Failure] = {}
    for plan in history.plans:
        given_up = plan.state == "over" and plan.code not in GOOD_EXITS
        if not (given_up or plan.state == "forming") or plan.kind in FREE:
            continue
        failed = plan.generation if given_up else plan.generation - 1
        time = min(judged.get(failed, plan.wall), plan.wall)
        again = None if given_up else first.get(plan.generation)
        by_generation.setdefault(
            failed,
            Failure(
                time,
                text(plan.kind) or "unknown",
                tuple(map(text, plan.blamed)),
                failed,
                integer(plan.step),
                text(plan.reason),
                max(time - stood[failed], 0.0) if failed in stood else None,
                None if again is None else max(again - time, 0.0),
            ),
        )
    return tuple(sorted(by_generation.values(), key=lambda f: f.time))


def by_kind(events: Sequence[Failure]) -> list[tuple[str, int]]:
    """Returns how many failures of each kind there are, the most frequent first."""
    return Counter(f.kind for f in events).most_common()


def by_node(events: Sequence[Failure]) -> list[tuple[str, int]]:
    """Returns how many failures each node is blamed for; '' for those that nobody is."""
    return Counter(name for f in events for name in f.blamed or ("",)).most_common()


def mean_bounds(seconds: float, number: int) -> tuple[float, float]:
    """Returns bounds of the mean time between failures, of which `number` came in `seconds`, if they are memoryless.

    2T / chi-square with 2n + 2 and with 2n degrees of freedom: exact for n failures that a Poisson process had in a
    given time (Garwood 1936, "Fiducial limits for the Poisson distribution"). Without a failure only the lower one, on
    one side, is known.
    """
    # The quantile of chi-square with 2k degrees is twice that of a gamma distribution of shape k.
    from scipy.special import gammaincinv

    if not number:
        return (seconds / -math.log(1 - SURE), math.inf)
    tail = (1 - SURE) / 2
    return seconds / float(gammaincinv(number + 1, 1 - tail)), seconds / float(
        gammaincinv(number, tail)
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _steps_that_count(times: Ledger) -> int:
    """Returns the steps of generations of which all is known, without those that were taken again."""
    steps = 0
    starts = [g.start for g in times.generations]
    for i, generation in enumerate(times.generations):
        if generation.start is not None and generation.step is not None:
            limit = min(
                (s for s in starts[i + 1 :] if s is not None), default=generation.step
            )
            steps += max(min(limit, generation.step) - generation.start, 0)
    return steps


def _apart(history: History, times: Ledger) -> float:
    """Returns the seconds that the formula does not know of: until the run's first step; and from each stop in good
    order to the next step.
    """
    going = {
        e.integer("generation"): e.time for e in reversed(list(history.of("going")))
    }
    apart = 0.0
    stopped = times.began
    for generation in times.generations:
        first = going.get(generation.number)
        if first is not None and math.isfinite(stopped):
            apart += max(first - stopped, 0.0)
            stopped = math.inf
        if generation.exit in GOOD_EXITS:
            stopped = min(stopped, generation.ended)
    return apart
