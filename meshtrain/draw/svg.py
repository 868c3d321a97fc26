"""Writes SVG: drawings of a fixed size in pixels, charts that shrink to their place in a page, and the colours of both,
light and dark.

A drawing is written in its light colours. The colours of `DARK` turn in the dark, by the style sheet of its page, or by
its own if it is a file.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from urllib.parse import quote

# Okabe and Ito's colours, which the colour-blind tell apart (https://jfly.uni-koeln.de/color/); text on them is INK.
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
YELLOW = "#f0e442"
SKY = "#56b4e9"
VERMILION = "#d55e00"
PURPLE = "#cc79a7"
GREY = "#b4bcc6"
INK = "#132231"
# The same, dark enough for white text.
AXES = {
    "island": "#9b3f76",
    "data": BLUE,
    "context": "#5b4bb5",
    "expert": "#7a6a00",
    "tensor": "#b85c00",
    "pipeline": "#00805f",
}
# series; one behind the first
FIRST = BLUE
SECOND = VERMILION
PALE = SKY

WIDTH = 400  # of a chart, about a phone's: its text keeps its size there
TEXT = "#1d2430"
FAINT = "#5b6675"
GRID = "#e8ebf0"
GROUND = "#ffffff"
# behind a bar; what is free; lines that are looked at
TRACK = "#f3f5f8"
EMPTY = "#eef0f4"
RULE = "#8a929c"
NOTE = "#6a5200"
BAD = "#b3261e"
GOOD = "#1e7b3a"
DARK = {
    TEXT: "#e3e7ee",
    FAINT: "#9aa5b4",
    GRID: "#262d37",
    GROUND: "#14181f",
    TRACK: "#262d37",
    EMPTY: "#2f3844",
    RULE: "#7d8590",
    NOTE: "#e0b94a",
    BAD: "#ff8a80",
    GOOD: "#6ccf8e",
}
TURNS = "".join(
    f'[fill="{c}"]{{fill:{dark}}}[stroke="{c}"]{{stroke:{dark}}}'
    for c, dark in DARK.items()
)
FONT = "system-ui, sans-serif"


def svg(
    width: float,
    height: float,
    body: Iterable[str],
    label: str,
    size: int = 11,
) -> str:
    """Returns a drawing of fixed size in pixels; `label` describes it to screen readers."""
    return _element(
        width, height, f'width="{width:.0f}" height="{height:.0f}"', body, label, size
    )


def chart(height: float, body: Iterable[str], label: str, size: int = 13) -> str:
    """Returns a drawing `WIDTH` units wide that takes the width of its place."""
    return _element(WIDTH, height, "", body, label, size)


def _element(
    width: float,
    height: float,
    extent: str,
    body: Iterable[str],
    label: str,
    size: int,
) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {extent} role="img" '
        f'aria-label="{escape(label)}" '
        f'font-family="{FONT}" font-size="{size}" fill="{TEXT}" '
        f'style="font-variant-numeric:tabular-nums">{"".join(body)}</svg>'
    )


def file(drawing: str) -> str:
    """Returns a drawing of `svg` or `chart` as a file that stands alone: with a title, on a ground of its own, dark
    where its reader's screen is.

    It shrinks to a window as far as one can read it: to 3/5 of its width.
    """
    head, end, body = drawing.partition(">")
    extent, label = re.findall(r'(?:viewBox="0 0 (?=\d)|label=")([^"]*)', head)
    light = (
        "color-scheme:light "
        f"dark;background:{GROUND};max-width:100%;min-width:{0.6 * float(extent.split()[0]):.0f}px;height:auto"
    )
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{background:{DARK[GROUND]}}}{TURNS}}}"
    return f"{head}{end}<title>{label}</title><style>:root{{{light}}}{dark}</style>{body}\n"


def image(drawing: str, label: str, style: str = "max-width:none") -> str:
    """Returns an SVG as an img element, on white: notebooks show SVG elements only after a reader has run them, and
    their themes do not follow the screen's.
    """
    source = "data:image/svg+xml," + quote(drawing, safe=" =:/,;()'[]+-.·×")
    return f'<img alt="{escape(label)}" style="background:{GROUND};padding:4px;{style}" src="{source}"/>'


def mixed(colour: str, other: str, share: float) -> str:
    """Returns a colour with a share of another."""
    pairs = ((int(c[i : i + 2], 16) for c in (colour, other)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def figures(y: float, values: Sequence[str], widths: Sequence[float]) -> str:
    """Returns values in columns at the right of a chart, each to the right of a column so wide."""
    out = ""
    x = float(WIDTH)
    for value, width in zip(reversed(values), reversed(widths), strict=True):
        out += f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="end">{escape(value)}</text>'
        x -= width
    return out


def widths(rows: Iterable[Sequence[str]]) -> list[float]:
    """Returns how wide the columns of `figures` are."""
    return [7.4 * max(map(len, column)) + 12 for column in zip(*rows, strict=True)]


def bar_row(
    y: float,
    name: str,
    values: Sequence[str],
    columns: Sequence[float],
    start: float,
    share: float,
    colour: str,
) -> list[str]:
    """Returns a line of text with its values in `columns`, and under it a bar from `start` as long as `share` of the
    width of a chart.
    """
    x = start * WIDTH
    width = max(share * WIDTH, 1.5)
    return [
        f'<text x="0" y="{y + 13}">{escape(name)}</text>{figures(y + 13, values, columns)}',
        f'<rect x="0" y="{y + 18}" width="{WIDTH}" height="9" rx="2" fill="{TRACK}"/>',
        f'<rect x="{min(x, WIDTH - 1.5):.1f}" y="{y + 18}" width="{width:.1f}" height="9" rx="2" fill="{colour}"/>',
    ]


def small(x: float, y: float, words: object, anchor: str = "start") -> str:
    """Returns small faint words: the name of an axis, with the unit of numbers that do not show theirs, or a number at
    it.
    """
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="{FAINT}">'
        f"{escape(str(words))}</text>"
    )


def scale(y: float, name: str, end: str) -> str:
    """Returns the axis of bars over the width of a chart: 0, its name, and what a bar of the whole width is."""
    return (
        small(0, y, 0)
        + small(WIDTH / 2, y, name, "middle")
        + small(WIDTH, y, end, "end")
    )


def keys(
    entries: Iterable[tuple[str, str]], x: float = 0, y: float = 0, room: float = WIDTH
) -> tuple[list[str], float]:
    """Returns a legend, a square of a colour and what it stands for by each entry, in lines `room` wide; and where it
    ends.
    """
    out = []
    right = x
    for colour, name in entries:
        wide = 30 + 6.6 * len(name)
        if right > x and right + wide > x + room:
            right = x
            y = y + 18
        square = f'width="12" height="12" rx="2" fill="{colour}" stroke="{RULE}" stroke-width="0.5"'
        text = f'<text x="{right + 17:.0f}" y="{y + 10:.0f}" font-size="12">{escape(name)}</text>'
        out.append(f'<rect x="{right:.0f}" y="{y:.0f}" {square}/>{text}')
        right += wide
    return out, y + 18


def ticks(low: float, high: float, base: int = 10, parts: float = 4) -> Iterator[float]:
    """Yields round numbers that hold the range between them, in at most about so many `parts`; `base`: 2 for bytes,
    whose are powers of 2; 1 for exponents, whose are whole.
    """
    raw = (high - low) / parts
    if base == 1:
        step = float(math.ceil(raw))
    elif base == 2:
        step = 2.0 ** math.ceil(math.log2(raw))
    else:
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(
            factor * unit
            for factor in (1, 2, 2.5, 5, 10)
            if factor * unit >= raw * 0.999
        )
    first = math.floor(low / step + 1e-6)
    last = math.ceil(high / step - 1e-6)
    yield from (k * step for k in range(first, last + 1))


def stage_hue(stage: int, stages: int) -> float:
    """Returns a hue for each stage, from blue (the first) to orange (the last): two ends that the colour-blind tell
    apart.
    """
    return 215 + 180 * stage / max(stages - 1, 1)
