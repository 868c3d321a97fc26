"""Which process the others wait for, or has not been heard of: from the newest sample of each.

In SPMD all processes take the same steps in the same time, so a step's seconds tell nothing of who is slow: who is, spends longest on its
own host and waits least for the devices. The score is that of `survive.stragglers`.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.survive.beat import HOST
from meshtrain.survive.history import number
from meshtrain.survive.life import took
from meshtrain.survive.stragglers import SLOW

SILENT = 3.0  # times the time between samples, without one

Sample = Mapping[str, Any]


def lagging(samples: Mapping[int, Sequence[Sample]], names: Mapping[int, str]) -> list[str]:
    """A sentence for each process that lags, from the last two samples (or one) of each rank."""
    newest = {rank: found[-1] for rank, found in samples.items() if found}
    heard = {rank: time for rank, sample in newest.items() if (time := number(sample.get("time"))) is not None}
    if len(heard) < 2:
        return []
    every = _every(samples)
    last = max(heard.values())
    said = [
        f"{_name(rank, names)} has said nothing for {took(last - time)}"
        for rank, time in heard.items()
        if every and last - time > SILENT * every
    ]
    spent = {rank: found for rank, sample in newest.items() if (found := _spent(sample)) is not None}
    least = min((own for own, _ in spent.values()), default=0.0)
    for rank, (own, whole) in spent.items():
        if whole and (whole - (own - least)) / whole < SLOW:
            said.append(
                f"{_name(rank, names)} lags: {took(own)} of {took(whole)} on its own host, another only {took(least)}"
            )
    return said


def _every(samples: Mapping[int, Sequence[Sample]]) -> float | None:
    """Seconds between two samples."""
    gaps = []
    for found in samples.values():
        times = [number(sample.get("time")) for sample in found[-2:]]
        if len(times) == 2 and times[0] is not None and times[1] is not None and times[1] > times[0]:
            gaps.append(times[1] - times[0])
    return statistics.median(gaps) if gaps else None


def _spent(sample: Sample) -> tuple[float, float] | None:
    """Seconds of steps in which it waited for nobody else, and all of them."""
    phases = sample.get("phase_seconds")
    if not isinstance(phases, dict):
        return None
    own = sum(number(phases.get(name)) or 0.0 for name in HOST)
    return own, own + (number(phases.get("wait")) or 0.0)


def _name(rank: int, names: Mapping[int, str]) -> str:
    return f"rank {rank} on {names[rank]}" if rank in names else f"rank {rank}"
