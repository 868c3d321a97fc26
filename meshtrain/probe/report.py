"""What was measured, as lines for people."""

import math
from collections.abc import Sequence

import numpy as np

from meshtrain.cluster.cluster import Cluster
from meshtrain.draw.picture import columns
from meshtrain.probe import describe, judge
from meshtrain.probe.figures import XLA, Probe
from meshtrain.units import duration, size

MOST_DEVICES = 16  # whose matrix is written: beyond it a line is longer than a terminal


def to_text(probe: Probe, cluster: Cluster | None = None) -> str:
    """All of it; with a described cluster also how much of it was reached. What is slow stands at the end."""
    parts = [
        about(probe, cluster),
        *(_barriers(probe)),
        *(_axis(probe, axis, cluster) for axis in dict.fromkeys(c.axis for c in probe.collectives)),
        left_out(probe),
        *(_pairs(probe)),
        *(_devices(probe, cluster)),
    ]
    if probe.devices and probe.platform != "cpu" and not describe.knows(probe):
        parts.append(f"the planner has no data sheet of {probe.kind}: a cluster file has what was measured alone")
    findings = judge.findings(probe, cluster)
    parts.append("\n".join(f"slow: {one.sentence}" if one.what != "machine" else one.sentence for one in findings))
    if not findings and (probe.pairs or probe.devices) and probe.size >= judge.FEWEST:
        parts.append("no device and no link is slower than its like")
    return "\n".join(part for part in parts if part)


def about(probe: Probe, cluster: Cluster | None = None) -> str:
    """What was measured, in a line."""
    machines = len(set(probe.machines))
    return (
        f"{probe.size} x {probe.kind}, {probe.mesh}, {_count(machines, 'machine')}, {_count(probe.processes, 'process', 'es')}"
        + (f"; scores are of {cluster.name}" if cluster else "")
    )


def _count(number: int, word: str, many: str = "s") -> str:
    return f"{number} {word}{many if number > 1 else ''}"


def _barriers(probe: Probe) -> list[str]:
    return [f"barrier   {', '.join(f'{axis} {duration(s)}' for axis, s in probe.barriers.items())}"] * bool(
        probe.barriers
    )


def _axis(probe: Probe, axis: str, cluster: Cluster | None) -> str:
    collectives = probe.over(axis)
    sizes = [size(t.nbytes) for t in collectives[0].timings]
    rows = [
        [
            "",
            "latency",
            "busbw",
            *sizes,
            *["algbw"],
            *(["left out"] * bool(collectives[0].left_out)),
            *(["score"] * bool(cluster)),
        ]
    ]
    for c in collectives:
        rows.append([
            c.kind if c.algorithm == XLA else f"  {c.algorithm}",
            duration(c.line.latency),
            per_second(c.busbw),
            *(duration(t.seconds) for t in c.timings),
            per_second(c.timings[-1].algbw),
            *([f"{max(map(abs, c.left_out)):.0%}"] * bool(c.left_out)),
            *([f"{judge.score(cluster, probe, c):.2f}"] if cluster else []),
        ])  # fmt: skip
    return f"over {axis} {collectives[0].devices}\n{columns(rows, '  ')}"


def left_out(probe: Probe) -> str:
    """How well latency and bandwidth predict a size that they were not fitted to; nothing where there are too few sizes."""
    errors = [abs(e) for c in probe.collectives for e in c.left_out]
    if not errors:
        return ""
    within = sum(e <= 0.3 for e in errors) / len(errors)
    return (
        f"latency + bytes / bandwidth, fitted without a size, predicts it within {np.median(errors):.0%} in half of the cases, within 30% in "
        f"{within:.0%}, at worst {max(errors):.0%} off"
    )


def per_second(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _pairs(probe: Probe) -> list[str]:
    if probe.pairs is None:
        return []
    lines = []
    far = judge.apart(probe)
    for level in np.unique(far).tolist():
        of_level = (far == level) & ~np.isnan(probe.pairs.latency)
        if of_level.any():
            latency, bandwidth = np.median(probe.pairs.latency[of_level]), np.median(probe.pairs.bandwidth[of_level])
            lines.append(f"pairs {judge.APART[level]}: {duration(latency)}, {per_second(bandwidth)}")
    if probe.size <= MOST_DEVICES:
        for title, matrix, unit in (
            ("latency in µs", probe.pairs.latency, 1e6),
            ("bandwidth in GB/s", probe.pairs.bandwidth, 1e-9),
        ):
            lines += [f"{title}, from row to column", _matrix(matrix * unit)]
    return lines


def _matrix(numbers: np.ndarray) -> str:
    head = ["", *(str(i) for i in range(len(numbers)))]
    return columns([head, *([str(i), *map(figure, row)] for i, row in enumerate(numbers.tolist()))], "  ")


def figure(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.3g}"


def _devices(probe: Probe, cluster: Cluster | None) -> list[str]:
    devices = probe.devices
    if devices is None:
        return []
    scores = judge.device_scores(cluster, probe) if cluster else {}

    def scored(name: str) -> str:
        return f" (score {scores[name]:.2f})" if name in scores else ""

    rates = ", ".join(f"{dtype} {_flops(rate)}{scored(dtype)}" for dtype, rate in devices.matmul.items())
    lines = [
        f"each of {_count(probe.size, 'device')}, all at once: {rates}; memory {per_second(devices.memory_rate)}{scored('memory')}"
    ]
    if probe.size > 1:
        rows: list[Sequence[str]] = [["  device alone", devices.dtype, "of the best", "memory", "of the best"]]
        for number, (flops, memory) in enumerate(
            zip(devices.flops.tolist(), devices.memory_bandwidth.tolist(), strict=True)
        ):
            rows.append([
                f"  {number}", _flops(flops), f"{flops / devices.flops.max():.2f}",
                per_second(memory), f"{memory / devices.memory_bandwidth.max():.2f}",
            ])  # fmt: skip
        lines.append(columns(rows))
    return lines


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:.4g} GFLOP/s"
