"""How fast each pair of devices talks: a cell a pair, from row to column, green where it is as fast as its like.

            0   1   2   3
        0       █   █   ░       from 0 to 3: half as fast
        1   █       █   █

A link of half the speed stands out, and so do the row and the column of a device whose links are all bad.
"""

from collections.abc import Iterator
from html import escape

import numpy as np

from meshtrain.pictures.picture import Picture, block, drawn, image
from meshtrain.plan.report import duration
from meshtrain.probe import judge, report
from meshtrain.probe.figures import Probe
from meshtrain.schedule.draw import INK

_SIDE, _LEFT, _TOP = 34, 52, 34
_SMALL = 8  # side of a cell without its number, from so many devices on
_NUMBERED = 32


def picture(probe: Probe) -> Picture:
    text = report.to_text(probe)
    return Picture(block(image(drawing(probe), "pairs of devices")) if probe.pairs else block(), text)


def drawing(probe: Probe) -> str:
    """An SVG of its own. Pointing at a cell shows its figures."""
    side = _SIDE if probe.size <= _NUMBERED else _SMALL
    extent = probe.size * side
    return drawn(_LEFT + extent + 8, _TOP + extent + 26, _cells(probe, side))


def _cells(probe: Probe, side: int) -> Iterator[str]:
    assert probe.pairs is not None
    scores, bandwidth, latency = judge.pair_scores(probe), probe.pairs.bandwidth, probe.pairs.latency
    every = 1 if side == _SIDE else 8
    for number in range(0, probe.size, every):
        middle = number * side + side / 2
        yield f'<text x="{_LEFT - 8}" y="{_TOP + middle + 4:.0f}" text-anchor="end">{number}</text>'
        yield f'<text x="{_LEFT + middle:.0f}" y="{_TOP - 8}" text-anchor="middle">{number}</text>'
    yield '<text x="0" y="12">from row to column, GB/s</text>'
    for (a, b), gigabytes in np.ndenumerate(bandwidth / 1e9):
        if np.isnan(gigabytes):
            continue
        score = float(scores[a, b])
        said = f"{probe.place(a)} to {probe.place(b)}: {gigabytes:.3g} GB/s, {duration(float(latency[a, b]))}"
        said += "" if np.isnan(score) else f", {score:.2f} of its like"
        x, y = _LEFT + b * side, _TOP + a * side
        yield f"<g><title>{escape(said)}</title>"
        yield f'<rect x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}" rx="{side // 8}" fill="{_colour(score)}"/>'
        if side == _SIDE:
            yield f'<text x="{x + side / 2:.0f}" y="{y + 21}" text-anchor="middle" font-size="9" fill="{INK}">{gigabytes:.3g}</text>'
        yield "</g>"
    yield f'<text x="{_LEFT}" y="{_TOP + probe.size * side + 18}">green: as fast as its like; red: half of it or less</text>'


def _colour(score: float) -> str:
    """Green at 1 and above, red at half and below; grey where nothing is to be held against."""
    if np.isnan(score):
        return "#b4bcc6"
    share = min(max((score - 0.5) / 0.5, 0.0), 1.0)
    return f"hsl({10 + 140 * share:.0f},60%,68%)"
