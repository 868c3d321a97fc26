"""Writes SVG: drawings of a fixed size in pixels, charts that shrink to their place in a page, and the colours of both."""

from collections.abc import Iterable
from html import escape
from urllib.parse import quote

INK = "#132231"  # text on coloured cells
GREY = "#7d8590"  # all other text of a drawing: readable on white and on black
# Okabe and Ito's colours, which the colour-blind tell apart; text on them is white.
AXES = {"island": "#9b3f76", "data": "#0072b2", "context": "#5b4bb5", "tensor": "#b85c00", "pipeline": "#00805f"}

WIDTH = 400  # of a chart, about a phone's: its text keeps its size there
TEXT, FAINT, GRID = "#1d2430", "#5b6675", "#e8ebf0"  # of charts, on the ground of a page
TRACK, EMPTY = "#f3f5f8", "#eef0f4"  # behind a bar; what is free
FIRST, SECOND, THIRD = "#3b6fb6", "#c2843a", "#4f9d69"  # series
PALE = "#8fb3de"  # a series behind the first
FONT = "system-ui, sans-serif"


def svg(width: float, height: float, body: Iterable[str], size: int = 11) -> str:
    """Returns a drawing of fixed size in pixels. Its text is grey where it has no other colour."""
    return _element(width, height, f'width="{width:.0f}" height="{height:.0f}"', body, size, GREY)


def chart(height: float, body: Iterable[str], label: str, size: int = 13) -> str:
    """Returns a drawing `WIDTH` units wide that takes the width of its place; `label` describes it to screen readers."""
    return _element(WIDTH, height, f'role="img" aria-label="{escape(label)}"', body, size, TEXT)


def _element(width: float, height: float, attributes: str, body: Iterable[str], size: int, fill: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {attributes} '
        f'font-family="{FONT}" font-size="{size}" fill="{fill}">{"".join(body)}</svg>'
    )


def image(drawing: str, label: str, style: str = "max-width:none") -> str:
    """Returns an SVG as an img element: notebooks show SVG elements only after whoever opens them has run them."""
    source = "data:image/svg+xml," + quote(drawing, safe=" =:/,;()'[]+-.·×")
    return f'<img alt="{escape(label)}" style="{style}" src="{source}"/>'


def bar_row(y: float, name: str, value: str, start: float, share: float, colour: str) -> list[str]:
    """Returns a line of text, and under it a bar from `start` as long as `share` of the width of a chart."""
    x, width = start * WIDTH, max(share * WIDTH, 1.5)
    return [
        f'<text x="0" y="{y + 13}">{escape(name)}</text><text x="{WIDTH}" y="{y + 13}" text-anchor="end">{escape(value)}</text>',
        f'<rect x="0" y="{y + 18}" width="{WIDTH}" height="9" rx="2" fill="{TRACK}"/>',
        f'<rect x="{min(x, WIDTH - 1.5):.1f}" y="{y + 18}" width="{width:.1f}" height="9" rx="2" fill="{colour}"/>',
    ]


def key(x: float, y: float, colour: str, name: str, size: int = 12) -> str:
    """Returns an entry of a legend: a square of a colour, and what it stands for."""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="{x + 17:.0f}" y="{y + 10:.0f}" font-size="{size}">{escape(name)}</text>'
    )


def stage_hue(stage: int, stages: int) -> float:
    """Returns a hue for each stage, from blue (the first) to red (the last)."""
    return 215 + 145 * stage / max(stages - 1, 1)
