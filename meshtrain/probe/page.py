"""Writes a probe as one page: what is slow, each axis with its algorithms side by side, who talks how fast to whom.

    Pairs of devices are cells, from row to column, blue where one is as fast as its like, orange at half of that:

            0   1   2   3
        0       █   █   ░       from 0 to 3: half as fast
        1   █       █   █

A link of half the speed stands out, and so do the row and the column of a device whose links are all bad.
"""

from collections.abc import Iterator
from html import escape

import numpy as np

from meshtrain.cluster.cluster import Cluster
from meshtrain.draw import page as pages
from meshtrain.draw.page import sentence
from meshtrain.draw.picture import Picture, block
from meshtrain.draw.svg import (
    FIRST,
    GREY,
    INK,
    ORANGE,
    SECOND,
    SKY,
    image,
    keys,
    mixed,
    small,
    svg,
)
from meshtrain.probe import judge, report
from meshtrain.probe.figures import XLA, Probe
from meshtrain.units import duration

STYLE = """
td { white-space: nowrap; vertical-align: middle; }
.bar { display: block; height: .6em; border-radius: 2px; } pre { font-size: .75em; overflow-x: auto; }
"""
WIDEST = 90  # pixels of a bar


def page(probe: Probe, cluster: Cluster | None = None) -> str:
    """Returns the page; with a described cluster also how much of it was reached."""
    return pages.page(f"{probe.size} × {probe.kind}", _body(probe, cluster), STYLE)


def _body(probe: Probe, cluster: Cluster | None) -> Iterator[str]:
    yield f"<h1>{probe.size} × {escape(probe.kind)}</h1>"
    yield f"<p>{escape(report.about(probe, cluster)).replace(' x ', ' × ')}</p>"
    findings = judge.findings(probe, cluster)
    yield from (
        f'<p class="bad">{sentence(finding.sentence)}</p>' for finding in findings
    )
    if not findings:
        yield '<p class="good">No device and no link is slower than its like.</p>'
    for axis in probe.axes:
        yield f"<h2>Over {escape(axis)}, {probe.collectives_over(axis)[0].devices} devices</h2>"
        yield _axis(probe, axis, cluster)
    if error := report.left_out(probe):
        yield f'<p class="about">{escape(error)}.</p>'
    if probe.pairs:
        yield f"<h2>From device to device</h2>{pages.wide(drawing(probe))}"
        if probe.size <= report.MOST_DEVICES:
            yield '<p class="about">Latency in µs, from row to column:</p>'
            heads, *rows = report.matrix(probe.pairs.latency * 1e6)
            yield pages.table(heads, rows)


def _axis(probe: Probe, axis: str, cluster: Cluster | None) -> str:
    heads, *rows = report.axis_table(probe, axis, cluster)
    collectives = probe.collectives_over(axis)
    fastest = max(c.busbw for c in collectives)
    for row, c in zip(rows, collectives, strict=True):
        own = c.algorithm == XLA
        row[0] = f"<b>{escape(c.kind)}</b>" if own else escape(c.algorithm)
        style = f"width:{max(WIDEST * c.busbw / fastest, 1):.0f}px;background:{FIRST if own else SECOND}"
        row.insert(3, f'<span class="bar" style="{style}"></span>')
    heads.insert(3, "")
    words = "Bars of busbw: blue, what XLA does; red, programs of messages."
    about = (
        f'<p class="about">{words}</p>'
        if any(c.algorithm != XLA for c in collectives)
        else ""
    )
    return pages.table(heads, rows) + about


_SIDE = 34
_LEFT = 52
_TOP = 34
_SMALL = 8  # side of a cell without its number, from so many devices on
_NUMBERED = 32


def picture(probe: Probe) -> Picture:
    text = report.to_text(probe)
    return Picture(
        block(image(drawing(probe), "pairs of devices")) if probe.pairs else block(),
        text,
    )


def drawing(probe: Probe) -> str:
    """An SVG of its own. Pointing at a cell shows its figures."""
    side = _SIDE if probe.size <= _NUMBERED else _SMALL
    extent = probe.size * side
    width = max(_LEFT + extent + 8, _LEFT + 260)
    return svg(
        width,
        _TOP + extent + 64,
        _cells(probe, side),
        "how fast each pair of devices talks",
    )


def _cells(probe: Probe, side: int) -> Iterator[str]:
    assert probe.pairs is not None
    scores = judge.pair_scores(probe)
    every = 1 if side == _SIDE else 8
    for number in range(0, probe.size, every):
        middle = number * side + side / 2
        yield f'<text x="{_LEFT - 8}" y="{_TOP + middle + 4:.0f}" text-anchor="end">{number}</text>'
        yield f'<text x="{_LEFT + middle:.0f}" y="{_TOP - 8}" text-anchor="middle">{number}</text>'
    yield small(0, 12, "from device (row) to device (column), GB/s")
    for a, b in np.argwhere(~np.isnan(probe.pairs.bandwidth)).tolist():
        yield _cell(probe, a, b, float(scores[a, b]), side)
    legend = (
        (_colour(1), "as fast as its like"),
        (_colour(0.75), "3/4"),
        (_colour(0), "half or less"),
        (GREY, "no like"),
    )
    yield from keys(legend, _LEFT, _TOP + probe.size * side + 10, 250)[0]


def _cell(probe: Probe, a: int, b: int, score: float, side: int) -> str:
    """Draws how fast device `a` sends to device `b`."""
    assert probe.pairs is not None
    gigabytes = probe.pairs.bandwidth[a, b] / 1e9
    latency = duration(float(probe.pairs.latency[a, b]))
    title = f"{probe.place(a)} to {probe.place(b)}: {gigabytes:.3g} GB/s, {latency}"
    title += "" if np.isnan(score) else f", {score:.2f} of its like"
    x = _LEFT + b * side
    y = _TOP + a * side
    rectangle = (
        f'<rect x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}" rx="{side // 8}" '
        f'fill="{_colour(score)}"/>'
    )
    label = (
        f'<text x="{x + side / 2:.0f}" y="{y + 21}" text-anchor="middle" font-size="9" '
        f'fill="{INK}">{gigabytes:.3g}</text>'
    )
    body = rectangle + label if side == _SIDE else rectangle
    return f"<g><title>{escape(title)}</title>{body}</g>"


def _colour(score: float) -> str:
    """Blue at 1 and above, orange at half and below; grey where nothing is to be held against."""
    if np.isnan(score):
        return GREY
    return mixed(ORANGE, SKY, min(max((score - 0.5) / 0.5, 0.0), 1.0))
