"""Writes the measured figures as lines for people, and the tables of these lines and of the page."""

import math

import numpy as np

from meshtrain.cluster.cluster import Cluster
from meshtrain.draw.picture import columns
from meshtrain.probe import describe, judge
from meshtrain.probe.figures import XLA, Probe
from meshtrain.units import counted, duration, size

MOST_DEVICES = 16  # whose matrix is written: beyond it a line is longer than a terminal

Rows = list[list[str]]  # of a table, the heads first


def to_text(probe: Probe, cluster: Cluster | None = None) -> str:
    """Returns all of it; with a described cluster also how much of it was reached.

    Slow devices and links stand at the end.
    """
    parts = [about(probe, cluster)]
    if probe.barriers:
        parts.append(
            f"barrier   {', '.join(f'{axis} {duration(s)}' for axis, s in probe.barriers.items())}"
        )
    for axis in probe.axes:
        table = axis_table(probe, axis, cluster)
        parts.append(
            f"over {axis} {probe.collectives_over(axis)[0].devices}\n{columns(table, '  ')}"
        )
    parts += [left_out(probe), *_pairs(probe), *_devices(probe, cluster)]
    if probe.devices and probe.platform != "cpu" and not describe.knows(probe):
        parts.append(
            f"the planner has no data sheet of {probe.kind}: a cluster file has what was measured alone"
        )
    findings = judge.findings(probe, cluster)
    parts += [
        f"slow: {one.sentence}" if one.what != "machine" else one.sentence
        for one in findings
    ]
    if not findings and (probe.pairs or probe.devices) and probe.size >= judge.FEWEST:
        parts.append("no device and no link is slower than its like")
    return "\n".join(part for part in parts if part)


def about(probe: Probe, cluster: Cluster | None = None) -> str:
    """Returns what was measured, in a line."""
    machines = counted(len(set(probe.machines)), "machine")
    processes = counted(probe.processes, "process", "processes")
    scores = f"; scores are of {cluster.name}" if cluster else ""
    return f"{probe.size} x {probe.kind}, {probe.mesh}, {machines}, {processes}{scores}"


def axis_table(probe: Probe, axis: str, cluster: Cluster | None) -> Rows:
    """Returns a row for each collective over an axis, by each algorithm; those of algorithms besides XLA's are
    indented.
    """
    collectives = probe.collectives_over(axis)
    fitted = bool(collectives[0].left_out)
    sizes = map(size, collectives[0].sizes)
    table = [
        [
            "",
            "latency",
            "busbw",
            *sizes,
            "algbw",
            *["left out"] * fitted,
            *["score"] * bool(cluster),
        ]
    ]
    for c in collectives:
        row = [
            c.kind if c.algorithm == XLA else f"  {c.algorithm}",
            duration(c.line.latency),
            per_second(c.busbw),
        ]
        row += [*map(duration, c.seconds), per_second(c.algbw[-1])]
        row += [f"{max(map(abs, c.left_out)):.0%}"] if fitted else []
        table.append(
            row + ([f"{judge.score(cluster, probe, c):.2f}"] if cluster else [])
        )
    return table


def left_out(probe: Probe) -> str:
    """Returns how well latency and bandwidth predict a size that they were not fitted to; nothing where there are too
    few sizes.
    """
    errors = [abs(e) for c in probe.collectives for e in c.left_out]
    if not errors:
        return ""
    within = sum(e <= 0.3 for e in errors) / len(errors)
    return (
        f"latency + bytes / bandwidth, fitted without a size, predicts it within {np.median(errors):.0%} in half of "
        "the cases, within 30% in "
        f"{within:.0%}, at worst {max(errors):.0%} off"
    )


def per_second(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _pairs(probe: Probe) -> list[str]:
    if probe.pairs is None:
        return []
    lines = []
    latency = probe.pairs.latency
    bandwidth = probe.pairs.bandwidth
    far = judge.apart(probe)
    for level in np.unique(far).tolist():
        of_level = (far == level) & ~np.isnan(latency)
        if of_level.any():
            figures = f"{duration(np.median(latency[of_level]))}, {per_second(np.median(bandwidth[of_level]))}"
            lines.append(f"pairs {judge.APART[level]}: {figures}")
    if probe.size <= MOST_DEVICES:
        lines += [
            "latency in µs, from row to column",
            columns(matrix(latency * 1e6), "  "),
        ]
        lines += [
            "bandwidth in GB/s, from row to column",
            columns(matrix(bandwidth / 1e9), "  "),
        ]
    return lines


def matrix(numbers: np.ndarray) -> Rows:
    """Returns numbers [from, to], NaN as -."""
    rows = [
        ["-" if math.isnan(number) else f"{number:.3g}" for number in row]
        for row in numbers.tolist()
    ]
    return [
        ["", *map(str, range(len(rows)))],
        *([str(i), *row] for i, row in enumerate(rows)),
    ]


def _devices(probe: Probe, cluster: Cluster | None) -> list[str]:
    devices = probe.devices
    if devices is None:
        return []
    scores = (
        {
            name: f" (score {score:.2f})"
            for name, score in judge.device_scores(cluster, probe).items()
        }
        if cluster
        else {}
    )
    rates = ", ".join(
        f"{dtype} {_flops(rate)}{scores.get(dtype, '')}"
        for dtype, rate in devices.matmul.items()
    )
    memory = f"{per_second(devices.memory_rate)}{scores.get('memory', '')}"
    lines = [
        f"each of {counted(probe.size, 'device')}, all at once: {rates}; memory {memory}"
    ]
    if probe.size > 1:
        rows = [
            ["  device alone", devices.dtype, "of the best", "memory", "of the best"]
        ]
        each = zip(
            devices.flops.tolist(), devices.memory_bandwidth.tolist(), strict=True
        )
        for number, (flops, memory_rate) in enumerate(each):
            of_best = [
                f"{flops / devices.flops.max():.2f}",
                f"{memory_rate / devices.memory_bandwidth.max():.2f}",
            ]
            rows.append(
                [
                    f"  {number}",
                    _flops(flops),
                    of_best[0],
                    per_second(memory_rate),
                    of_best[1],
                ]
            )
        lines.append(columns(rows))
    return lines


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:.4g} GFLOP/s"
