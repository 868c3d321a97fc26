"""Figures of a run from its rows and samples: how fast it is and could be, where its time went, what it held."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshtrain.plan.estimate import Plan
from meshtrain.report.facts import Facts
from meshtrain.report.rows import Columns
from meshtrain.survive import history as histories
from meshtrain.survive.life import word

SHORTEST = 1e-9  # seconds of a step; what is said to be shorter was no step


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, warmed up. `mfu` is of the accelerator that was planned for, where the rows do not say it themselves."""

    steps: int  # of which this is
    median: float
    p10: float
    p90: float
    worst: float
    tokens_per_second: float
    mfu: float | None
    waiting: float | None  # share of the steps' seconds in which they waited for the loader


@dataclass(frozen=True)
class Bounds:
    """What a step could take at least, by the plan: each at the device's full rate and beside all others (a roofline of seconds)."""

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
class Spent:
    """A part of a time."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Held:
    """Bytes of one device, or of the host's processes, at most at any time."""

    what: str
    used: float
    limit: float | None


@dataclass(frozen=True)
class Part:
    """A part of a step as a trace has it, and as it was planned. None: not measured, or not planned."""

    name: str
    seconds: float | None
    share: float | None
    planned: float | None
    planned_share: float | None


def warmed_up(columns: Columns) -> np.ndarray:
    """bool [rows]: steps whose seconds tell of the run's speed, not the first of all nor one before which something was compiled."""
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
    steps, tokens = columns["step"], np.maximum(np.nan_to_num(columns["tokens"]), 0.0)
    since = np.diff(steps, prepend=0.0)
    since[~(since >= 0)] = 1.0
    return np.cumsum(tokens * since)


def speed_of(columns: Columns, planned: Plan | None) -> Speed | None:
    mask = warmed_up(columns)
    if not mask.any():
        return None
    seconds, tokens = columns["step_seconds"][mask], columns["tokens"][mask]
    p10, median, p90 = (float(q) for q in np.quantile(seconds, (0.1, 0.5, 0.9)))
    said = columns["mfu"][mask]
    said = said[np.isfinite(said)]
    if said.size:
        mfu: float | None = float(np.median(said))
    else:
        mfu = planned.mfu * planned.seconds / median if planned else None
    waits = columns["data_wait_seconds"][mask]
    good = np.isfinite(waits)
    rate = tokens / seconds
    return Speed(
        steps=int(mask.sum()),
        median=median,
        p10=p10,
        p90=p90,
        worst=float(seconds.max()),
        tokens_per_second=float(np.median(rate[np.isfinite(rate)])) if np.isfinite(rate).any() else math.nan,
        mfu=mfu,
        waiting=float(waits[good].sum() / seconds[good].sum()) if good.any() else None,
    )


def bounds_of(planned: Plan) -> Bounds:
    device, parts = planned.cluster.accelerator, dict(planned.time.parts())
    return Bounds(
        compute=planned.mfu * planned.seconds,
        memory=(parts["memory"] + parts["optimizer"]) * device.efficiency.memory,
        links=parts["tensor"] + parts["pipeline"] + parts["data"],
        planned=planned.seconds,
    )


def wall_time(facts: Facts) -> tuple[tuple[Spent, ...], str]:
    """Where the time of the run went, and who says so: the supervisors' ledger, the processes' phases, or the rows."""
    if facts.survived:
        told = facts.survived.ledger
        return _spent({word(k): s for k, s in told.seconds.items()}), "the supervisors' ledger"
    if facts.samples and 0 in facts.samples:
        phases = facts.samples[0].names("phase_seconds.")
        found = {name.split(".", 1)[1]: float(facts.samples[0].known(name).sum()) for name in phases}
        if any(found.values()):
            return _spent(found), "the phases of rank 0"
    columns = facts.steps
    seconds = {name: float(columns.known(name).sum()) for name in columns.names()}
    steps, data = seconds.get("step_seconds", 0.0), seconds.get("data_wait_seconds", 0.0)
    blocked = min(seconds.get("checkpoint_blocked_seconds", 0.0), max(steps - data, 0.0))
    found = {
        "steps": max(steps - data - blocked, 0.0),
        "waiting for data": data,
        "saves, blocking": blocked,
        "compiling": seconds.get("compile_seconds", 0.0),
    }
    return _spent(found), "the logged steps' rows"


def on_host(columns: Columns) -> tuple[Spent, ...]:
    """A step on the host: waiting for data, dispatching, waiting for the devices, and all else."""
    names = {"data_wait_seconds": "waiting for data", "dispatch_seconds": "dispatch", "wait_seconds": "devices"}
    mask = warmed_up(columns)
    if "wait_seconds" not in columns or not mask.any():
        return ()
    whole = float(columns["step_seconds"][mask].mean())
    found = {}
    for name, called in names.items():
        said = columns[name][mask]
        said = said[np.isfinite(said)]
        if said.size:
            found[called] = max(float(said.mean()), 0.0)
    found["all else on the host"] = max(whole - sum(found.values()), 0.0)
    return _spent(found)


def _spent(seconds: dict[str, float]) -> tuple[Spent, ...]:
    there = {name: s for name, s in seconds.items() if s > 0}
    whole = sum(there.values())
    return tuple(Spent(name, s, s / whole) for name, s in there.items())


def most_held(facts: Facts) -> Iterator[Held]:
    said = np.concatenate([facts.steps.known(name) for name in ("memory_in_use_bytes", "memory_peak_bytes")])
    limit = facts.plan.cluster.accelerator.usable_bytes if facts.plan else None
    if said.size:
        yield Held("a device, as its rows say", float(said.max()), limit)
    devices = [_at_most(columns, "device_memory_used_bytes") for columns in facts.samples.values()]
    limits = [_at_most(columns, "device_memory_limit_bytes") for columns in facts.samples.values()]
    if used := max((d for d in devices if d is not None), default=None):
        yield Held("the fullest device, as its driver says", used, max((n for n in limits if n), default=None))
    hosts = [columns.known("process_rss_bytes") for columns in facts.samples.values()]
    if used := max((float(h.max()) for h in hosts if h.size), default=None):
        bounds = [columns.known("memory_limit_bytes") for columns in facts.samples.values()]
        yield Held(
            "the largest process on its host", used, max((float(b.max()) for b in bounds if b.size), default=None)
        )


def _at_most(columns: Columns, metric: str) -> float | None:
    """Of all devices of one process."""
    found = [columns.known(name) for name in columns.names(metric)]
    return max((float(values.max()) for values in found if values.size), default=None)


def parts(facts: Facts) -> list[Part]:
    """The parts of a step that a diagnosis has told apart, and what was planned for each."""
    told = facts.diagnosis.get("parts")
    found = [part for part in told if isinstance(part, dict)] if isinstance(told, list) else []
    rows = [
        (histories.text(p.get("name")), histories.number(p.get("seconds")), histories.number(p.get("planned")))
        for p in found
    ]
    whole, planned = (sum(filter(None, column)) for column in list(zip(*rows, strict=True))[1:] or ((), ()))
    return [
        Part(
            name,
            a,
            a / whole if a is not None and whole else None,
            b,
            b / planned if b is not None and planned else None,
        )
        for name, a, b in rows
        if a or b
    ]
