"""Pictures for notebooks and terminals, and what they are made of. Inline styles alone, which every notebook keeps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from meshtrain.draw.svg import AXES, FAINT, GREY

_PALER = "opacity:.75"  # than text, whatever a notebook's theme has for that
_CELL = "text-align:left;padding:2px 10px 2px 0;vertical-align:middle;background:none;white-space:nowrap"


@dataclass(frozen=True)
class Picture:
    """Draws itself where HTML is shown, and prints as text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def block(*parts: str) -> str:
    """Returns parts of a picture, one under the other."""
    inside = "".join(
        f'<div style="margin:4px 0">{part}</div>' for part in parts if part
    )
    return f'<div style="font:13px/1.45 system-ui,sans-serif">{inside}</div>'


def title(text: str) -> str:
    return f"<b>{escape(text)}</b>"


def faint(text: str) -> str:
    return f'<span style="{_PALER}">{escape(text)}</span>'


def code(text: str) -> str:
    return f'<code style="background:none">{escape(text)}</code>'


def scrolled(drawing: str) -> str:
    """Returns what may be wider than its place: it scrolls by itself."""
    return f'<div style="overflow-x:auto">{drawing}</div>'


def chip(axis: str, text: str = "") -> str:
    """Returns a mesh axis in its colour; of several, as in data+tensor, each."""
    return " ".join(
        f'<span style="background:{AXES.get(name, FAINT)};color:#fff;border-radius:3px;padding:0 '
        f'5px">{escape(text or name)}</span>'
        for name in axis.split("+")
    )


def bar(share: float, colour: str = GREY, width: int = 120) -> str:
    """Returns a bar as long as `share` of `width` pixels."""
    style = f"display:inline-block;height:9px;border-radius:2px;background:{colour};width:{max(share * width, 1):.0f}px"
    return f'<span style="{style}"></span>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns rows of HTML cells under plain heads."""
    head = "".join(
        f'<th style="{_CELL};{_PALER};font-weight:normal">{escape(h)}</th>'
        for h in heads
    )
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return scrolled(
        f'<table style="border-collapse:collapse;margin:0;font:inherit"><tr>{head}</tr>{body}</table>'
    )


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Returns a table as text: cells padded to their column's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (
            indent
            + "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            )
        ).rstrip()
        for row in rows
    )
