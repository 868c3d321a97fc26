"""How often a run fails, how sure that is, and what it costs: counted from its history, and what the formulas make of it.

A failure is a restart that counts: a new generation that was formed for another reason than a start, a node that came back, or a
preemption; and the fault after which the run was given up.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from meshtrain.plan.failures import daly, goodput
from meshtrain.survive.causes import FREE
from meshtrain.survive.history import History, text, whole
from meshtrain.survive.ledger import GOOD_EXITS, Ledger

SURE = 0.95  # of intervals
FEWEST = 5  # failures to fit a shape to


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
    """What a history says of failures. Times in seconds; none: not known."""

    failures: tuple[Failure, ...]
    # Seconds in which the run was to go on: all but those between its being over and its being started again.
    exposed: float
    between: float | None  # mean time between failures
    between_least: float  # with which it is consistent, at SURE
    between_most: float
    shape: float | None  # Weibull's: below 1 failures come in bursts, at 1 they are memoryless, above they come of age
    shape_error: float | None  # its standard error
    noticed: float | None  # mean, from the last sign of progress to the verdict
    restart: float | None  # mean, from the verdict to the first step after it
    write: float | None  # mean for which a save stops training
    interval: float | None  # mean seconds of steps between saves
    interval_steps: float | None
    step: float | None  # seconds a step that counts
    expected: float | None  # goodput by Daly's formula for the above
    advised: int | None  # steps between saves that lose least, by Daly's formula


def reliability(history: History, told: Ledger) -> Reliability:
    """The failures of a history, and what its own figures, put into Daly's formulas, predict."""
    found = failures(history)
    exposed, times = _exposure(history, told, [f.time for f in found])
    between = exposed / len(found) if found else None
    least, most = mean_bounds(exposed, len(found))
    shape = weibull_shape(_gaps(times), exposed - max(times, default=0.0)) if len(found) >= FEWEST else None
    noticed, restart = _mean(f.noticed for f in found), _mean(f.restart for f in found)
    write, interval, interval_steps = saving(told)
    taken, stepping = _steps(told)
    step = stepping / taken if taken else None
    expected = advised = None
    if step and interval and interval_steps and write is not None:
        # What else goes with a save's interval, such as an eval, stops the steps as a save does.
        beside = sum(told.seconds[k] for k in ("data", "eval", "checkpoint")) * interval_steps / taken
        stands = (noticed or 0.0) + (restart or 0.0)
        expected = goodput(interval, beside, stands, between or math.inf) * (1 - _apart(history, told) / told.wall)
        if between and write:
            advised = max(1, round(daly(write, between) / (interval / interval_steps)))
    error = shape * math.sqrt(6) / math.pi / math.sqrt(len(found)) if shape else None
    return Reliability(
        found, exposed, between, least, most, shape, error, noticed, restart, write, interval, interval_steps, step, expected, advised
    )  # fmt: skip


def failures(history: History) -> tuple[Failure, ...]:
    """Every failure, in order of time; of one generation once, however often it was planned."""
    first = {e.whole("generation"): e.time for e in reversed(list(history.of("going"))) if e.whole("rank") == 0}
    judged = {e.whole("generation"): e.time for e in history.of("verdict")}
    ends = [
        (e.whole("generation"), e.time, e.number("phase_seconds")) for e in history.of("ended") if e.whole("rank") == 0
    ]
    stood = {generation: time - seconds for generation, time, seconds in ends if seconds is not None}
    found: dict[int, Failure] = {}
    for plan in history.plans:
        given_up = plan.state == "over" and plan.code not in GOOD_EXITS
        if not (given_up or plan.state == "forming") or plan.kind in FREE:
            continue
        failed = plan.generation if given_up else plan.generation - 1
        time = min(judged.get(failed, plan.wall), plan.wall)
        again = None if given_up else first.get(plan.generation)
        since = time - stood.get(failed, -math.inf)
        found.setdefault(failed, Failure(
            time, text(plan.kind) or "unknown", tuple(map(text, plan.blamed)), failed, whole(plan.step), text(plan.reason),
            max(since, 0.0) if math.isfinite(since) else None, None if again is None else max(again - time, 0.0),
        ))  # fmt: skip
    return tuple(sorted(found.values(), key=lambda f: f.time))


def by_kind(found: Sequence[Failure]) -> list[tuple[str, int]]:
    """How many failures of each kind, the most frequent first."""
    return Counter(f.kind for f in found).most_common()


def by_node(found: Sequence[Failure]) -> list[tuple[str, int]]:
    """How many failures each node is blamed for; '' for those that nobody is."""
    return Counter(name for f in found for name in f.blamed or ("",)).most_common()


def by_interval(found: Sequence[Failure], told: Ledger, most: int = 12) -> list[tuple[float, float, int]]:
    """How many failures between which seconds of the run, in at most `most` intervals of a round length."""
    round_ones = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)
    length = next((n for n in round_ones if told.wall <= n * most), told.wall / most or 1)
    counts = Counter(int((f.time - told.began) // length) for f in found)
    return [
        (i * length, min((i + 1) * length, told.wall), counts[i]) for i in range(max(1, math.ceil(told.wall / length)))
    ]


def mean_bounds(seconds: float, number: int, sure: float = SURE) -> tuple[float, float]:
    """Bounds of the mean time between failures, of which `number` came in `seconds`, if they are memoryless.

    2T / chi-square with 2n + 2 and with 2n degrees of freedom: exact for n failures that a Poisson process had in a given time (Garwood 1936,
    "Fiducial limits for the Poisson distribution"). Without a failure only the lower one, on one side, is known.
    """
    if not number:
        return (seconds / -math.log(1 - sure), math.inf)
    tail = (1 - sure) / 2
    return seconds / _poisson_mean(number, 1 - tail), seconds / _poisson_mean(number - 1, tail)


def _poisson_mean(number: int, chance: float) -> float:
    """The mean for which a Poisson variable exceeds `number` with this chance: half the quantile of chi-square with 2 (number + 1) degrees.

    By bisection of their common distribution function, which is a finite sum where the degrees of freedom are even.
    """
    low, high = 0.0, number + 10 * math.sqrt(number + 1) + 10
    for _ in range(80):
        middle = (low + high) / 2
        terms = (math.exp(k * math.log(middle) - middle - math.lgamma(k + 1)) for k in range(number + 1))
        low, high = (middle, high) if 1 - math.fsum(terms) < chance else (low, middle)
    return (low + high) / 2


def weibull_shape(gaps: Sequence[float], still: float = 0.0) -> float | None:
    """The likeliest shape of a Weibull distribution of the times between failures, the last of which has lasted `still` seconds so far.

    The likelihood's derivative has one root (Cohen 1965, "Maximum likelihood estimation in the Weibull distribution", equation 2.9), found by
    bisection. None if all times are equal.
    """
    scale = max([*gaps, still], default=0.0)
    # Two at the same moment are of one cause; a millisecond keeps the logarithm finite.
    ended = [max(gap, 1e-3) / scale for gap in gaps] if scale else []
    if not ended or max(ended) == min(ended):
        return None
    every = [*ended, still / scale] if still > 0 else ended
    mean_log = fmean(math.log(t) for t in ended)

    def slope(shape: float) -> float:
        powers = [t**shape for t in every]
        return (
            math.fsum(p * math.log(t) for p, t in zip(powers, every, strict=True)) / math.fsum(powers)
            - 1 / shape
            - mean_log
        )

    low, high = 1e-3, 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.sqrt(low * high)


def saving(told: Ledger) -> tuple[float | None, float | None, float | None]:
    """Means of a save: seconds for which it stops training; seconds of steps, and steps, since the one before."""
    writes, works, steps = [], [], []
    for generation in told.generations:
        saves = generation.saves
        for before, after in pairwise(saves):
            # A save's own time is in what had been spent by the next.
            writes.append(after.seconds["checkpoint"] - before.seconds["checkpoint"])
            works.append(after.seconds["step"] - before.seconds["step"])
            steps.append(after.step - before.step)
    return _mean(writes), _mean(works), _mean(steps)


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def usual_restart(found: Sequence[Failure]) -> float | None:
    """The median, which one long restart does not move."""
    took = [f.restart for f in found if f.restart is not None]
    return median(took) if took else None


def _steps(told: Ledger) -> tuple[int, float]:
    """Steps that count, and the seconds they took: those of generations of which all is known."""
    kept, later = 0, [g.start for g in told.generations]
    for i, generation in enumerate(told.generations):
        if generation.start is not None and generation.step is not None:
            limit = min((s for s in later[i + 1 :] if s is not None), default=generation.step)
            kept += max(min(limit, generation.step) - generation.start, 0)
    return kept, told.seconds["step"]


def _exposure(history: History, told: Ledger, times: Sequence[float]) -> tuple[float, list[float]]:
    """Seconds in which the run was to go on, and `times` as such seconds: without those between its end and its being started again."""
    away, over = [], [plan.wall for plan in history.plans if plan.state == "over"]
    for end in over:
        back = min((e.time for e in history.of("join", "formed") if e.time > end), default=told.ended)
        away.append((end, max(back, end)))

    def until(time: float) -> float:
        return time - told.began - sum(max(min(back, time) - end, 0.0) for end, back in away)

    return max(until(told.ended), 0.0), [max(until(time), 0.0) for time in times]


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def _apart(history: History, told: Ledger) -> float:
    """Seconds that the formula does not know of: until the run's first step; and from each stop in good order to the next step."""
    going = {e.whole("generation"): e.time for e in reversed(list(history.of("going")))}
    apart, stopped = 0.0, told.began
    for generation in told.generations:
        first = going.get(generation.number)
        if first is not None and math.isfinite(stopped):
            apart += max(first - stopped, 0.0)
            stopped = math.inf
        if generation.exit in GOOD_EXITS:
            stopped = min(stopped, generation.ended)
    return apart
