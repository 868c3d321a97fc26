"""Writes HTML pages that fetch nothing and run nothing: their skeleton, style sheet, tiles, tables and figures."""

from collections.abc import Collection, Iterable, Sequence
from html import escape
from itertools import count

from meshtrain.draw.svg import EMPTY, GRID, TEXT, TRACK

# Text and grid of a chart are attributes, which rules of a style sheet override: in the dark they turn light.
STYLE = f"""
:root {{ color-scheme: light dark; --ground: #fff; --text: {TEXT}; --faint: #5b6675; --line: #d9dee6; --row: #eef0f4; --note: #6a5200; --bad: #b3261e; --good: #1e7b3a; }}
body {{ margin: 0 auto; padding: 16px; max-width: 720px; font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); }}
h1 {{ font-size: 1.4em; line-height: 1.25; margin: 0 0 .4em; }} h2 {{ font-size: 1.1em; margin: 1.8em 0 .4em; }}
p, ul {{ margin: .4em 0; }} .note {{ color: var(--note); }} .bad {{ color: var(--bad); font-weight: 600; }} .good {{ color: var(--good); font-weight: 600; }}
.about {{ color: var(--faint); font-size: .85em; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 10px; margin: 14px 0; }}
.tile {{ border: 1px solid var(--line); border-radius: 10px; padding: 8px 12px; }} .tile b {{ display: block; font-size: 1.3em; }}
.tile span {{ color: var(--faint); font-size: .85em; }}
svg {{ width: 100%; max-width: 560px; height: auto; display: block; }} .wide {{ overflow-x: auto; }} .wide svg {{ width: auto; max-width: none; }}
.table {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; font-size: .85em; }}
td, th {{ padding: 3px 6px 3px 0; text-align: left; vertical-align: top; }} tr + tr td {{ border-top: 1px solid var(--row); }}
td.n, th.n {{ text-align: right; white-space: nowrap; }}
@media screen and (prefers-color-scheme: dark) {{
 :root {{ --ground: #14181f; --text: #e3e7ee; --faint: #9aa5b4; --line: #343c48; --row: #262d37; --note: #e0b94a; --bad: #ff8a80; --good: #6ccf8e; }}
 svg[fill="{TEXT}"] {{ fill: var(--text); }} [fill="#5b6675"] {{ fill: var(--faint); }} [stroke="{GRID}"] {{ stroke: var(--row); }}
 [fill="{TRACK}"], [fill="{EMPTY}"] {{ fill: var(--row); }} [fill="#fff"] {{ fill: var(--ground); }} [stroke="#fff"] {{ stroke: var(--ground); }}
}}
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
    boxes = [f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in values]
    return f'<div class="tiles">{"".join(boxes)}</div>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = (), style: str = "table"
) -> str:
    """Returns rows of HTML cells under plain heads, those of the columns `numbers` to the right; it scrolls where it is too wide."""

    def line(tag: str, cells: Iterable[str]) -> str:
        kinds = (f'{tag} class="n"' if i in numbers else tag for i in count())
        return "<tr>" + "".join(f"<{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=False)) + "</tr>"

    head = line("th", map(escape, heads)) if heads else ""
    return f'<div class="{style}"><table>{head}{"".join(line("td", row) for row in rows)}</table></div>'


def figure(name: str, about: str, drawing: str) -> str:
    return f"<figure><figcaption><b>{escape(name)}</b> {escape(about)}</figcaption>{drawing}</figure>"


def sentence(text: str) -> str:
    """Returns text with a capital at its begin, escaped."""
    return escape(text[:1].upper() + text[1:])
