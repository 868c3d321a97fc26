"""Writes HTML pages that fetch nothing and run nothing: their skeleton, style sheet, tiles, tables and figures."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import count

from meshtrain.draw.svg import (
    BAD,
    DARK,
    FAINT,
    FONT,
    GOOD,
    GRID,
    GROUND,
    INK,
    NOTE,
    TEXT,
    TURNS,
)

# with its unit, or none; each letter matches in one way, so that no text takes long
_NUMBER = re.compile(r"-?|[-+<]?\d[\d.,]*+[\w%µ/]*+( [\w%µ/]++)*+")
FOLDED = 160  # letters and lines beyond which a text is folded
FOLDED_LINES = 3
COLUMN = 848  # pixels of what stands on a page, at most
NAMES = {
    "text": TEXT,
    "faint": FAINT,
    "line": GRID,
    "ground": GROUND,
    "note": NOTE,
    "bad": BAD,
    "good": GOOD,
    "ink": INK,
}
_LIGHT = " ".join(f"--{name}: {colour};" for name, colour in NAMES.items())
_DARK = " ".join(
    f"--{name}: {DARK[colour]};" for name, colour in NAMES.items() if colour in DARK
)
# What scrolls sideways has a shadow at the edge beyond which there is more.
_SHADOW = """overflow-x: auto; background: linear-gradient(90deg, var(--ground) 40%, transparent) local,
 linear-gradient(270deg, var(--ground) 40%, transparent) 100% 0 local,
 linear-gradient(90deg, #8888, transparent) scroll, linear-gradient(270deg, #8888, transparent) 100% 0 scroll;
  background-repeat: no-repeat; background-size: 32px 100%, 32px 100%, 12px 100%, 12px 100%;"""
STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
body {{ margin: 0 auto; padding: 16px 16px 48px; max-width: {COLUMN}px; font: 16px/1.5 {FONT}; color: var(--text);
  background: var(--ground); overflow-wrap: break-word; }}
h1 {{ font-size: 1.4em; line-height: 1.25; margin: 0 0 .4em; }} h2 {{ font-size: 1.1em; margin: 1.8em 0 .4em; }}
p, ul {{ margin: .4em 0; }} .note {{ color: var(--note); }} .bad {{ color: var(--bad); font-weight: 600; }}
.good {{ color: var(--good); font-weight: 600; }}
.about {{ color: var(--faint); font-size: .85em; }} .chip {{ color: var(--ink); padding: 0 5px; border-radius: 3px; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 10px; margin: 14px 0; }}
.tile {{ border: 1px solid var(--line); border-radius: 10px; padding: 8px 12px; }}
.tile b {{ display: block; font-size: 1.3em; }}
.tile span {{ color: var(--faint); font-size: .85em; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 22px 40px;
  align-items: start; }}
figure {{ margin: 0; break-inside: avoid; }} figcaption {{ font-size: .85em; color: var(--faint);
  margin-bottom: 4px; }} figcaption b {{ color: var(--text); font-weight: 600; }}
svg {{ width: 100%; height: auto; display: block; }} .wide, .table {{ {_SHADOW} }}
.wide svg {{ width: auto; max-width: none; }}
table {{ border-collapse: collapse; width: 100%; font-size: .85em; font-variant-numeric: tabular-nums; }}
td, th {{ padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }} tr > :last-child {{ padding-right: 0; }}
tr + tr td {{ border-top: 1px solid var(--line); }}
th {{ color: var(--faint); font-weight: normal; vertical-align: bottom; }} td.n, th.n {{ text-align: right; }}
td.n {{ white-space: nowrap; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} {TURNS} }}
"""


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """Returns a page; `style` comes after the common style sheet."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}{style}</style>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n{"".join(body)}\n</body></html>\n'


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Returns boxes of a value and what it is, as many side by side as there is room for."""
    boxes = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in values
    ]
    return f'<div class="tiles">{"".join(boxes)}</div>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], style: str = "table"
) -> str:
    """Returns rows of HTML cells under plain heads; it scrolls where it is too wide.

    Columns that hold numbers alone are flush right.
    """
    body = [tuple(row) for row in rows]
    numbers = {
        i
        for i, column in enumerate(zip(*body, strict=True))
        if all(map(_NUMBER.fullmatch, column))
    }

    def line(tag: str, cells: Iterable[str]) -> str:
        kinds = (f'{tag} class="n"' if i in numbers else tag for i in count())
        return (
            "<tr>"
            + "".join(
                f"<{kind}>{cell}</{tag}>"
                for kind, cell in zip(kinds, cells, strict=False)
            )
            + "</tr>"
        )

    head = line("th", map(escape, heads)) if heads else ""
    return f'<div class="{style}" tabindex="0"><table>{head}{"".join(line("td", row) for row in body)}</table></div>'


def folded(text: str) -> str:
    """Returns a text, escaped; a long one as its beginning, which opens."""
    if len(text) <= FOLDED and text.count("\n") < FOLDED_LINES:
        return escape(text)
    begin = " ".join(text.split())[: FOLDED // 2]
    return f"<details><summary>{escape(begin)} …</summary>{escape(text)}</details>"


def figure(name: str, about: str, drawing: str) -> str:
    """Returns a drawing under its name, and what is to be said of it."""
    return f"<figure><figcaption><b>{escape(name)}</b> {escape(about)}</figcaption>{drawing}</figure>"


def figures(drawn: Iterable[str]) -> str:
    """Returns figures side by side, as many as there is room for."""
    return f'<div class="charts">{"".join(drawn)}</div>'


def wide(drawing: str) -> str:
    """Returns a drawing of fixed size, which scrolls where it is too wide."""
    return f'<div class="wide" tabindex="0">{drawing}</div>'


def sentence(text: str) -> str:
    """Returns text with a capital at its begin, escaped."""
    return escape(text[:1].upper() + text[1:])
