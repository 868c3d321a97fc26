"""What pictures are made of: axes and stages in colour, tables, bars. Inline styles alone, which every notebook keeps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from meshtrain.schedule.draw import GREY

# Okabe and Ito's colours, which the colour-blind tell apart; text on them is white.
AXES = {"island": "#9b3f76", "data": "#0072b2", "tensor": "#b85c00", "pipeline": "#00805f"}
_CELL = "text-align:left;padding:2px 10px 2px 0;vertical-align:middle;background:none;white-space:nowrap"


@dataclass(frozen=True)
class Picture:
    """Something to look at: drawn where HTML is, written elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def block(*parts: str) -> str:
    """Parts of a picture, one under the other."""
    inside = "".join(f'<div style="margin:4px 0">{part}</div>' for part in parts if part)
    return f'<div style="font:13px/1.45 system-ui,sans-serif">{inside}</div>'


def title(text: str) -> str:
    return f"<b>{escape(text)}</b>"


def faint(text: str) -> str:
    return f'<span style="color:{GREY}">{escape(text)}</span>'


def code(text: str) -> str:
    return f'<code style="background:none">{escape(text)}</code>'


def chip(axis: str, text: str = "") -> str:
    """A mesh axis in its colour; of several, as in data+tensor, each."""
    return " ".join(
        f'<span style="background:{AXES.get(name, GREY)};color:#fff;border-radius:3px;padding:0 5px">{escape(text or name)}</span>'
        for name in axis.split("+")
    )


def bar(share: float, colour: str = GREY, width: int = 120) -> str:
    """A bar as long as `share` of `width` pixels."""
    style = f"display:inline-block;height:9px;border-radius:2px;background:{colour};width:{max(share * width, 1):.0f}px"
    return f'<span style="{style}"></span>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of HTML cells under plain heads; too wide a table scrolls by itself."""
    head = "".join(f'<th style="{_CELL};color:{GREY};font-weight:normal">{escape(h)}</th>' for h in heads)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:0;font:inherit"><tr>{head}</tr>{body}</table></div>'


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """The same as text: cells padded to their column's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    )


def svg(width: float, height: float, body: Iterable[str], label: str) -> str:
    """A drawing within HTML."""
    return image(drawn(width, height, body), label)


def drawn(width: float, height: float, body: Iterable[str]) -> str:
    """A drawing in pixels; its text is grey where it is given no other colour, which stands on white and on black."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="system-ui,sans-serif" font-size="11" fill="{GREY}">{"".join(body)}</svg>'
    )


def image(drawing: str, label: str, style: str = "max-width:none") -> str:
    """An SVG as an image within HTML. In the page itself notebooks would not show it until whoever opens them has run them."""
    source = "data:image/svg+xml," + quote(drawing, safe=" =:/,;()'[]+-.·×")
    return f'<img alt="{escape(label)}" style="{style}" src="{source}"/>'
