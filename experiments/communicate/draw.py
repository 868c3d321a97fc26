"""Charts with logarithmic axes and coloured tables as SVG: what the pictures of this directory are made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from meshtrain.draw.svg import GRID, TEXT, file, svg

WIDE, TALL = 460, 320  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 42  # of what is plotted in it
# Okabe and Ito's, dark enough for text on white
COLOURS = ("#0072b2", "#b85c00", "#00805f", "#a2559c", "#6b6b6b", "#b3261e", "#7a6a00", "#3b9fd6")


@dataclass(frozen=True)
class Axis:
    """From its first tick to its last, logarithmic or even; a tick is a value and what is written at it."""

    name: str
    ticks: Sequence[tuple[float, str]]
    log: bool = True

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1 within them."""
        low, high, at = self.ticks[0][0], self.ticks[-1][0], value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return (at - low) / (high - low)


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0  # of COLOURS
    dash: str = ""


def chart(title: str, across: Axis, up: Axis, lines: Sequence[Line]) -> list[str]:
    """Lines; what leaves the axes is cut off."""
    wide, tall = WIDE - LEFT - RIGHT, TALL - TOP - BOTTOM
    body = [_title(title)]
    for value, text in up.ticks:
        y = TOP + tall * (1 - up.share(value))
        body.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="{GRID}"/>{_text(LEFT - 6, y + 4, text, "end")}')
    for value, text in across.ticks:
        x = LEFT + wide * across.share(value)
        body.append(f'<path d="M{x:.1f} {TOP}v{tall}" stroke="{GRID}"/>{_text(x, TOP + tall + 16, text, "middle")}')
    body += [_text(LEFT + wide / 2, TALL - 8, across.name, "middle"), _text(LEFT, TOP - 4, up.name)]
    for line in lines:
        inside = [(across.share(x), up.share(y)) for x, y in line.points if y > 0 or not up.log]
        inside = [(x, y) for x, y in inside if 0 <= x <= 1 and -1e-9 <= y <= 1 + 1e-9]
        path = " ".join(f"{LEFT + wide * x:.1f},{TOP + tall * (1 - y):.1f}" for x, y in inside)
        style = f'fill="none" stroke="{COLOURS[line.colour]}" stroke-width="2" stroke-dasharray="{line.dash}"'
        body.append(f'<polyline points="{path}" {style}/>')
    return body


def legend(lines: Sequence[Line], columns: int = 1) -> list[str]:
    """A chart's lines by name, row after row."""
    body = []
    for i, line in enumerate(lines):
        x, y = LEFT + i % columns * (WIDE - LEFT) / columns, 14 + i // columns * 17
        stroke = f'stroke="{COLOURS[line.colour]}" stroke-width="2" stroke-dasharray="{line.dash}"'
        body.append(f'<path d="M{x:.0f} {y - 4}h22" {stroke}/>{_text(x + 28, y, line.name)}')
    return body


def tiles(
    title: str, across: str, columns: Sequence[str], up: str, rows: Sequence[tuple[str, Sequence[float]]]
) -> list[str]:
    """A number in each cell: blue, the more the further above 1, brown below."""
    wide, tall = (WIDE - LEFT - RIGHT) / len(columns), (TALL - TOP - BOTTOM) / len(rows)
    body = [_title(title), _text(LEFT, TOP - 4, up), _text((WIDE + LEFT) / 2, TALL - 8, across, "middle")]
    for j, name in enumerate(columns):
        body.append(_text(LEFT + (j + 0.5) * wide, TALL - BOTTOM + 16, name, "middle"))
    for i, (name, values) in enumerate(rows):
        y = TOP + (len(rows) - 1 - i) * tall
        body.append(_text(LEFT - 6, y + tall / 2 + 4, name, "end"))
        for j, value in enumerate(values):
            strength = min(1.0, 0.12 + abs(math.log2(value)) / 3)
            colour = COLOURS[0] if value >= 1 else COLOURS[1]
            box = f'x="{LEFT + j * wide:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{tall - 1:.1f}"'
            body.append(f'<rect {box} fill="{colour}" fill-opacity="{strength:.2f}"/>')
            ink = "#fff" if strength > 0.6 else TEXT
            body.append(_text(LEFT + (j + 0.5) * wide, y + tall / 2 + 4, f"{value:.2g}", "middle", ink))
    return body


def write(
    path: Path, panels: Sequence[Sequence[str]], columns: int, under: Sequence[str] = (), below: float = 0
) -> None:
    """Panels row by row, and `under` them a legend `below` pixels tall."""
    rows = math.ceil(len(panels) / columns)
    body = []
    for i, panel in enumerate(panels):
        body.append(f'<g transform="translate({i % columns * WIDE},{i // columns * TALL})">{"".join(panel)}</g>')
    body.append(f'<g transform="translate(0,{rows * TALL})">{"".join(under)}</g>')
    path.write_text(file(svg(columns * WIDE, rows * TALL + below, body, path.stem.replace("_", " "))))


def _title(text: str) -> str:
    return f'<text x="{WIDE / 2}" y="13" text-anchor="middle" font-size="13" font-weight="600" fill="{TEXT}">{escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start", ink: str = TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}">{escape(text)}</text>'
