"""Figures of a run from its rows and samples: how fast it is and could be, where its time went, what it held."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.plan.estimate import Plan
from meshtrain.report.facts import RunFacts
from meshtrain.report.rows import Columns
from meshtrain.survive.ledger import word
from meshtrain.telemetry.catalogue import recent_mfu

SHORTEST = 1e-9  # seconds of a step; what is said to be shorter was no step


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, warmed up.

    `mfu`: as of the last rows, see `recent_mfu`; none where no peak of the devices is known.
    """

    steps: int  # of which this is
    median: float
    p10: float
    p90: float
    worst: float
    tokens_per_second: float
    mfu: float | None
    padding: float  # share of the steps' positions that hold no token
    # Share of the steps' seconds in which they waited for the loader
    waiting: float | None


@dataclass(frozen=True)
class Bounds:
    """The shortest planned seconds of a step: a roofline, each bound at the device's full rate beside all others."""

    compute: float  # the model's FLOPs at the peak
    memory: float  # passes over memory at its bandwidth
    links: float  # collectives, as planned
    planned: float

    @property
    def roof(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class TimeShare:
    """A part of a time."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device, or of the host's processes, at most at any time."""

    what: str
    used: float
    limit: float | None
    rule: str = "device_memory"  # of the thresholds, which says what is near the limit


def warmed_up(columns: Columns) -> np.ndarray:
    """bool [rows]: steps whose seconds tell of the run's speed, not the first of all nor one before which something was
    compiled.
    """
    seconds = columns["step_seconds"]
    mask = seconds > SHORTEST
    for name in ("compiles", "compile_seconds"):
        if name in columns:
            mask &= ~(columns[name] > 0)
    if mask.sum() > 1:
        mask[int(np.argmax(mask))] &= bool(columns["step"][0] > 1)
    return mask


def tokens_by_row(columns: Columns) -> np.ndarray:
    """float64 [rows]: tokens read up to each row. Steps that no row tells of have had as many as the row after them."""
    steps = columns["step"]
    tokens = np.maximum(np.nan_to_num(columns["tokens"]), 0.0)
    since = np.diff(steps, prepend=0.0)
    since[~(since >= 0)] = 1.0
    return np.cumsum(tokens * since)


def speed_of(columns: Columns) -> Speed | None:
    mask = warmed_up(columns)
    if not mask.any():
        return None
    seconds = columns["step_seconds"][mask]
    waits = columns["data_wait_seconds"][mask]
    p10, median, p90 = (float(q) for q in np.quantile(seconds, (0.1, 0.5, 0.9)))
    rate = _finite(columns["tokens"][mask] / seconds)
    known = np.isfinite(waits)
    tokens = np.nansum(columns["tokens"][mask])
    padding = np.nansum(columns["padding_tokens"][mask])
    return Speed(
        steps=int(mask.sum()),
        median=median,
        p10=p10,
        p90=p90,
        worst=float(seconds.max()),
        tokens_per_second=float(np.median(rate)) if rate.size else math.nan,
        mfu=recent_mfu(columns["mfu"]),
        padding=float(padding / max(1.0, padding + tokens)),
        waiting=float(waits[known].sum() / seconds[known].sum())
        if known.any()
        else None,
    )


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def bounds_of(planned: Plan) -> Bounds:
    device = planned.cluster.accelerator
    parts = dict(planned.time.parts())
    return Bounds(
        compute=planned.mfu * planned.seconds,
        memory=(parts["memory"] + parts["optimizer"]) * device.efficiency.memory,
        links=parts["tensor"]
        + parts["context"]
        + parts["expert"]
        + parts["pipeline"]
        + parts["data"],
        planned=planned.seconds,
    )


def wall_time(facts: RunFacts) -> tuple[tuple[TimeShare, ...], str]:
    """Returns where the time of the run went, and who says so: the supervisors' ledger, the processes' phases, or the
    rows.
    """
    if facts.survived:
        seconds = facts.survived.ledger.seconds
        return _shares(
            {word(kind): s for kind, s in seconds.items()}
        ), "the supervisors' ledger"
    if rank_0 := facts.samples.get(0):
        names = rank_0.names("phase_seconds.")
        phases = {
            name.split(".", 1)[1]: float(rank_0.known(name).sum()) for name in names
        }
        if any(phases.values()):
            return _shares(phases), "the phases of rank 0"
    names = [
        "step_seconds",
        "data_wait_seconds",
        "checkpoint_blocked_seconds",
        "compile_seconds",
    ]
    steps, data, blocked, compiling = (
        float(facts.steps.known(name).sum()) for name in names
    )
    blocked = min(blocked, max(steps - data, 0.0))
    parts = {
        "steps": max(steps - data - blocked, 0.0),
        "waiting for data": data,
        "saves, blocking": blocked,
    }
    return _shares(parts | {"compiling": compiling}), "the logged steps' rows"


def host_parts(columns: Columns) -> tuple[TimeShare, ...]:
    """Returns the parts of a step on the host: waiting for data, dispatching, waiting for the devices, and all else."""
    names = {
        "data_wait_seconds": "waiting for data",
        "dispatch_seconds": "dispatch",
        "wait_seconds": "devices",
    }
    mask = warmed_up(columns)
    if "wait_seconds" not in columns or not mask.any():
        return ()
    known = {name: _finite(columns[column][mask]) for column, name in names.items()}
    parts = {
        name: max(float(seconds.mean()), 0.0)
        for name, seconds in known.items()
        if seconds.size
    }
    rest = float(columns["step_seconds"][mask].mean()) - sum(parts.values())
    return _shares(parts | {"all else on the host": max(rest, 0.0)})


def _shares(seconds: dict[str, float]) -> tuple[TimeShare, ...]:
    """Returns the times above 0, with their shares of the sum."""
    positive = {name: s for name, s in seconds.items() if s > 0}
    return tuple(
        TimeShare(name, s, s / sum(positive.values())) for name, s in positive.items()
    )


def most_held(facts: RunFacts) -> Iterator[MemoryUse]:
    """Yields the memory of a device by rows and by its driver, and of the largest process, as far as they are known."""
    limit = facts.plan.cluster.accelerator.usable_bytes if facts.plan else None
    if (
        used := _most([facts.steps], "memory_in_use_bytes", "memory_peak_bytes")
    ) is not None:
        yield MemoryUse("a device, as its rows say", used, limit)
    samples = list(facts.samples.values())
    driver = "the fullest device, as its driver says"
    for rule, what, metric, limits in (
        (
            "device_memory",
            driver,
            "device_memory_used_bytes",
            "device_memory_limit_bytes",
        ),
        (
            "memory_limit",
            "the largest process on its host",
            "process_rss_bytes",
            "memory_limit_bytes",
        ),
    ):
        if used := _most(samples, metric):
            yield MemoryUse(what, used, _most(samples, limits) or None, rule)


def _most(samples: Sequence[Columns], *metrics: str) -> float | None:
    values = [
        columns.known(name)
        for columns in samples
        for metric in metrics
        for name in columns.names(metric)
    ]
    return max((float(known.max()) for known in values if known.size), default=None)
