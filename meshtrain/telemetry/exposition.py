"""Metrics as text for Prometheus: OpenMetrics 1.0 (prometheus.io, docs/specs/om/open_metrics_spec) or its own older
format.

    # TYPE meshtrain_phase_seconds counter        OpenMetrics names a family without _total, the older format with it,
    # UNIT meshtrain_phase_seconds seconds        knows no unit and no info, and has no end
    # HELP meshtrain_phase_seconds of this ...
    meshtrain_phase_seconds_total{phase="wait"} 12.5
    # EOF

Written by hand: `prometheus_client` takes ten times as long, and wants each value to be its object. A test reads it
with that one's parser.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]  # (name, value) each


@dataclass
class Distribution:
    """The content of a histogram's series: how many values are at most each of the rising `bounds`, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(
        default_factory=list
    )  # between two bounds, and last above all of them
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class MetricFamily:
    """All series of one metric.

    `kind`: gauge, counter, info, or histogram, which has distributions instead of samples.
    """

    name: str
    kind: str
    meaning: str
    unit: str = ""
    samples: list[tuple[Labels, float]] = field(default_factory=list)
    distributions: list[tuple[Labels, Distribution]] = field(default_factory=list)


def render(families: Iterable[MetricFamily], *, openmetrics: bool) -> str:
    lines: list[str] = []
    for family in families:
        if not family.samples and not family.distributions:
            continue
        ending = {"counter": "_total", "info": "_info"}.get(family.kind, "")
        name = family.name + ending
        titled = family.name if openmetrics else name
        kind = family.kind if openmetrics or family.kind != "info" else "gauge"
        lines.append(f"# TYPE {titled} {kind}")
        if openmetrics and family.unit:
            lines.append(f"# UNIT {titled} {family.unit}")
        lines.append(f"# HELP {titled} {_escaped(family.meaning)}")
        lines += [
            f"{name}{_braces(labels)} {_number(value)}"
            for labels, value in family.samples
        ]
        for labels, distribution in family.distributions:
            lines += _buckets(name, labels, distribution)
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _buckets(name: str, labels: Labels, distribution: Distribution) -> Iterator[str]:
    so_far = 0
    for bound, count in zip(
        (*distribution.bounds, math.inf), distribution.counts, strict=True
    ):
        so_far += count
        yield f"{name}_bucket{_braces((*labels, ('le', _number(float(bound)))))} {so_far}"
    yield f"{name}_sum{_braces(labels)} {_number(distribution.sum)}"
    yield f"{name}_count{_braces(labels)} {so_far}"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    inner = ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])
    return f"{{{inner}}}"


def _escaped(text: str) -> str:
    if "\\" in text or "\n" in text or '"' in text:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def flat(
    value: Any, names: tuple[str, ...], labels: Labels = ()
) -> Iterator[tuple[Labels, float]]:
    """A row's value, if it has one, as (labels, number) each: a mapping by label value for each of the metric's labels
    `names`.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if names:
                yield from flat(inner, names[1:], (*labels, (names[0], str(key))))
    elif value is not None and not names:
        yield labels, value


def wants_openmetrics(accept: str | None) -> bool:
    """Returns whether a request names OpenMetrics: a client that accepts anything may know the older format alone."""
    return "application/openmetrics-text" in (accept or "")
