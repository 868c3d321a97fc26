"""The load of experts in a report: what the newest row with `expert_tokens` tells, and a heat map of it.

            expert 0   1   2   3   4   5   6   7
    layer 0    ░   ·   ·   ▒   ·   ·   ░   ·
          1    ·   █   ░   ·   ░   ·   ·   ·

One hue is for what is above a layer's mean, another one for what is below it; a dot is about the mean.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.draw import svg
from meshtrain.draw.svg import FIRST, GROUND, ORANGE, TRACK, WIDTH
from meshtrain.run.rows import RowReader

# What is drawn of a load over the mean: up to where, in which hue, how strong, and what the legend says.
CLASSES = (
    (0.0, ORANGE, 1.0, "0"),
    (0.5, ORANGE, 0.65, "to 0.5"),
    (0.8, ORANGE, 0.35, "to 0.8"),
    (1.25, TRACK, 1.0, "to 1.25"),
    (2.0, FIRST, 0.4, "to 2"),
    (4.0, FIRST, 0.7, "to 4"),
    (math.inf, FIRST, 1.0, "over 4"),
)
# of the map: its margin, its height at most, and that of a layer at most
LEFT = 52
TALLEST = 260
LOWEST = 22
MOST = 1 << 20  # experts of all layers


@dataclass(frozen=True)
class ExpertLoads:
    """Tokens of each expert in one step, [layers, experts]."""

    step: int
    tokens: np.ndarray

    @cached_property
    def relative_loads(self) -> np.ndarray:
        """Tokens over the mean of their layer; zeros where a layer had none."""
        return self.tokens / np.maximum(self.tokens.mean(1, keepdims=True), 1e-9)

    @property
    def sentence(self) -> str:
        over = self.relative_loads
        (full, most), (empty, least) = (
            np.unravel_index(k, over.shape) for k in (over.argmax(), over.argmin())
        )
        even = float(np.mean((over > 0.8) & (over <= 1.25)))
        return (
            f"Tokens of an expert in step {self.step:,}, over the mean of its layer: at most {over.max():.2f} (layer "
            f"{full}, expert {most}), "
            f"at least {over.min():.2f} (layer {empty}, expert {least}); {even:.0%} of the experts have 0.8 to 1.25."
        )


def newest(metrics: Path) -> ExpertLoads | None:
    """The loads of the newest row that has them, if one has."""
    loads = None
    for row in RowReader(metrics, containing=b'"expert_tokens"').new():
        loads = _row_loads(row) or loads
    return loads


def _row_loads(row: dict[str, Any]) -> ExpertLoads | None:
    step = row.get("step")
    value = row.get("expert_tokens")
    if type(step) is not int or not isinstance(value, list):
        return None
    try:
        tokens = np.array(value, np.float64)
    # ragged, texts, a number of hundreds of digits
    except (ValueError, TypeError, OverflowError):
        return None
    sane = (
        tokens.ndim == 2
        and 0 < tokens.size <= MOST
        and np.isfinite(tokens).all()
        and (tokens >= 0).all()
    )
    return ExpertLoads(step, tokens) if sane and tokens.max() < 2**53 else None


def picture(loads: ExpertLoads) -> str:
    """Draws the heat map: layers downwards, experts across, a legend beneath."""
    over = loads.relative_loads
    layers, experts = over.shape
    wide = (WIDTH - LEFT) / experts
    tall = min(LOWEST, TALLEST / layers)
    body = _cells(over, wide, tall)
    bottom = LOWEST + layers * tall
    body += [
        svg.small(LEFT - 6, LOWEST + (i + 0.5) * tall + 4, i, "end")
        for i in _numbered(layers, tall, 14)
    ]
    body += [
        svg.small(LEFT + (e + 0.5) * wide, bottom + 13, e, "middle")
        for e in _numbered(experts, wide, 30)
    ]
    body += [
        svg.small(LEFT - 6, 12, "layer", "end"),
        svg.small(WIDTH, bottom + 29, "expert", "end"),
    ]
    top = bottom + 40
    body += _legend(top)
    label = f"load of {experts} experts in {layers} layers, over each layer's mean. {loads.sentence}"
    return svg.chart(top + 34, body, label)


def _cells(over: np.ndarray, wide: float, tall: float) -> list[str]:
    """Draws the cells, each class of loads as one path."""
    kinds = np.searchsorted([limit for limit, *_ in CLASSES], over)
    gap = 1.0 if min(wide, tall) >= 6 else 0.0
    paths = [""] * len(CLASSES)
    for layer, row in enumerate(kinds):
        # neighbours of a kind in one piece, unless there is room for a gap
        starts = (
            np.arange(row.size) if gap else np.flatnonzero(np.diff(row, prepend=-1))
        )
        for first, behind in zip(starts, [*starts[1:], row.size], strict=True):
            width = (behind - first) * wide - gap
            height = tall - gap
            corner = f"M{LEFT + first * wide:.1f} {LOWEST + layer * tall:.1f}"
            paths[row[first]] += f"{corner}h{width:.1f}v{height:.1f}h-{width:.1f}z"
    return [
        f'<path d="{path}" fill="{hue}" fill-opacity="{strength}"/>'
        for path, (_, hue, strength, _) in zip(paths, CLASSES, strict=True)
        if path
    ]


def _legend(top: float) -> Iterator[str]:
    """Draws a box for each class of loads, with its words beneath."""
    box = WIDTH / len(CLASSES)
    for i, (_, hue, strength, words) in enumerate(CLASSES):
        place = f'x="{i * box + 1:.1f}" y="{top:.1f}" width="{box - 2:.1f}" height="12" rx="2"'
        yield f'<rect {place} fill="{hue}" fill-opacity="{strength}" stroke="{GROUND}"/>'
        yield svg.small((i + 0.5) * box, top + 26, words, "middle")


def _numbered(count: int, size: float, room: float) -> range:
    """Returns which of `count` things side by side get a number: all if there is room, else one of several."""
    every = next(
        step
        for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, count)
        if step * size >= room or step >= count
    )
    return range(0, count, every)
