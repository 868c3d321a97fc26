"""Scores of what was measured: against a described cluster (1: as described, 0.5: half as fast), and against its like.

A device is held against the others, a pair against pairs as far apart, so that a slow one is found without any
description.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.cluster.cluster import Cluster
from meshtrain.plan import programs
from meshtrain.plan.compute import product
from meshtrain.probe.figures import STEADY, XLA, MeasuredCollective, Probe
from meshtrain.survive.stragglers import SLOW

SLOW_PAIR = 0.67  # of its like, by the seconds of its largest message
SLOW_AXIS = 0.5  # of what is described
MACHINE = "in a machine"
BEYOND = "between machines"
APART = ("in a tensor group", "in a stage", "in an island", MACHINE, BEYOND)
FEWEST = 3  # of its like that something is held against


@dataclass(frozen=True)
class SlowFinding:
    """Something slow. `score`: of what its like, or the description, lets expect."""

    what: str  # device, memory, links, pair, axis or machine
    devices: tuple[int, ...]
    score: float
    sentence: str


def described(
    cluster: Cluster, probe: Probe, collective: MeasuredCollective, nbytes: int
) -> float:
    """Returns the seconds of a collective of one size by the planner."""
    program = "psum" if collective.algorithm == XLA else collective.algorithm
    return programs.seconds(
        program,
        collective.kind,
        collective.axis.split("+"),
        probe.mesh,
        cluster,
        nbytes,
    )


def score(cluster: Cluster, probe: Probe, collective: MeasuredCollective) -> float:
    """Returns described over measured seconds, of the largest size."""
    return (
        described(cluster, probe, collective, collective.sizes[-1])
        / collective.seconds[-1]
    )


def device_scores(cluster: Cluster, probe: Probe) -> dict[str, float]:
    """Returns measured over described rates, of one device while all are busy: of products by dtype, and of memory."""
    if probe.devices is None:
        return {}
    device = cluster.accelerator
    side = probe.devices.side
    rates = {
        dtype: rate * product(device, dtype, side, side, side) / (2 * side**3)
        for dtype, rate in probe.devices.matmul.items()
    }
    return rates | {"memory": probe.devices.memory_rate / device.memory_rate}


def findings(probe: Probe, cluster: Cluster | None = None) -> list[SlowFinding]:
    """Returns what is slow, the worst first.

    Where times vary much the verdict is that the machine is shared, and there is no other.
    """
    judges = {
        "products": lambda: _devices(probe),
        "pairs": lambda: _pairs(probe),
        "collectives": lambda: _axes(probe, cluster) if cluster else [],
    }
    slow: list[SlowFinding] = []
    for part, spread in probe.spread.items():
        if spread > STEADY:
            sentence = (
                f"the times of {part} vary by {spread:.0%} from one repeat to the next: the machine is shared or "
                "busy, so that they tell of no "
                "device and no link."
            )
            slow.append(SlowFinding("machine", (), 1 / (1 + spread), sentence))
        else:
            slow += judges[part]()
    return sorted(slow, key=lambda one: (one.what != "machine", one.score))


def _devices(probe: Probe) -> list[SlowFinding]:
    if probe.devices is None or probe.size < FEWEST:
        return []
    slow = []
    for what, rates, does in (
        ("device", probe.devices.flops, "computes"),
        ("memory", probe.devices.memory_bandwidth, "passes over memory"),
    ):
        shares = rates / np.median(rates)
        for device in np.flatnonzero(shares < SLOW).tolist():
            sentence = f"{probe.place(device)} {does} at {shares[device]:.2f} of the speed of the others."
            slow.append(SlowFinding(what, (device,), float(shares[device]), sentence))
    return slow


def pair_scores(probe: Probe) -> np.ndarray:
    """Returns scores [devices, devices], from row to column: the seconds that the largest message takes between devices
    as far apart, over those of this pair; NaN where there are too few of its like, or nothing was measured.
    """
    assert probe.pairs is not None
    seconds = probe.pairs.seconds[-1]
    far = apart(probe)
    scores = np.full_like(seconds, np.nan)
    for level in np.unique(far).tolist():
        like = (far == level) & ~np.isnan(seconds)
        if like.sum() > FEWEST:
            scores[like] = np.median(seconds[like]) / seconds[like]
    return scores


def apart(probe: Probe) -> np.ndarray:
    """Returns how far devices are apart [from, to], as a place in APART."""
    number = np.arange(probe.size)
    machines = np.array(probe.machines)
    mesh = probe.mesh
    far = np.full((probe.size, probe.size), APART.index(MACHINE))
    stage = mesh.tensor * mesh.shards
    blocks = [
        mesh.tensor,
        stage,
        *([stage * mesh.pipeline] if mesh.islands > 1 else []),
    ]
    for level, block in reversed(list(enumerate(blocks))):
        far[number[:, None] // block == number // block] = level
    far[machines[:, None] != machines] = APART.index(BEYOND)
    return far


def _pairs(probe: Probe) -> list[SlowFinding]:
    if probe.pairs is None:
        return []
    scores = pair_scores(probe)
    slow = [(int(a), int(b)) for a, b in np.argwhere(scores < SLOW_PAIR)]
    findings = _slow_ends(probe, scores, slow)
    explained = {finding.devices[0] for finding in findings}
    for a, b in slow:
        both = (b, a) in slow
        if explained & {a, b} or (both and a > b):
            continue
        worse = float(min(scores[a, b], scores[b, a]) if both else scores[a, b])
        ends = (
            f"between {probe.place(a)} and {probe.place(b)}"
            if both
            else f"from {probe.place(a)} to {probe.place(b)}"
        )
        sentence = f"the link {ends} reaches {worse:.2f} of the speed of its like."
        findings.append(SlowFinding("pair", (a, b), worse, sentence))
    return findings


def _slow_ends(
    probe: Probe, scores: np.ndarray, slow: Sequence[tuple[int, int]]
) -> list[SlowFinding]:
    """Returns the devices most of whose links are slow; `slow`: the pairs that are."""
    measured = (~np.isnan(scores)).sum(axis=1) + (~np.isnan(scores)).sum(axis=0)
    findings = []
    for device, count in Counter(end for pair in slow for end in pair).items():
        # What has many slow links is slow itself; its partners are not.
        if count > FEWEST and count > measured[device] / 2:
            own = float(np.median([scores[pair] for pair in slow if device in pair]))
            sentence = (
                f"{count} of {measured[device]} links of {probe.place(device)} reach {own:.2f} of the speed of "
                "their like."
            )
            findings.append(SlowFinding("links", (device,), own, sentence))
    return findings


def _axes(probe: Probe, cluster: Cluster) -> list[SlowFinding]:
    slow = []
    for axis in probe.axes:
        share = float(
            np.median(
                [
                    score(cluster, probe, c)
                    for c in probe.collectives_over(axis)
                    if c.algorithm == XLA
                ]
            )
        )
        if share < SLOW_AXIS:
            sentence = f"collectives over {axis} reach {share:.2f} of the speed that {cluster.name} describes."
            slow.append(SlowFinding("axis", (), share, sentence))
    return slow
