"""What the parts of a report's page are made of: its style, a picture with its title, a table."""

from collections.abc import Iterable, Sequence
from html import escape

MOST_ROWS = 12  # of a table: the newest

MORE_STYLE = """
body { max-width: 1080px; padding: 20px 16px 48px; } p, ul { max-width: 76ch; } h2 { margin-top: 2.2em; } h1 { margin-top: .2em; } h1 ~ h1 { margin-top: 2.4em; padding-top: 1.2em; border-top: 1px solid #d9dee6; }
.run { color: #5b6675; margin: 0 0 1em; overflow-wrap: anywhere; } .note { list-style: none; }
.verdict { display: flex; gap: .6em; align-items: baseline; font-size: 1.15em; margin: .2em 0 .6em; }
.dot { flex: none; width: .7em; height: .7em; border-radius: 50%; } .dot.good { background: #1e7b3a; } .dot.note { background: #d9a400; } .dot.bad { background: #b3261e; }
.reasons { padding-left: 1.2em; } .reasons .bad { color: #b3261e; font-weight: 600; } .reasons .note { list-style: disc; color: inherit; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); } .tile b { font-weight: 600; font-size: 1.2em; white-space: nowrap; } .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 22px 28px; align-items: start; }
.few { columns: 2 300px; column-gap: 56px; max-width: 900px; } .few figure { margin-bottom: 20px; } figure { margin: 0; break-inside: avoid; } figcaption { font-size: .85em; color: #5b6675; margin-bottom: 4px; } figcaption b { color: #1d2430; font-weight: 600; }
.table { overflow-x: auto; } td:not(:last-child) { white-space: nowrap; } td { padding-right: 14px; } td:last-child { overflow-wrap: anywhere; min-width: 12em; } td.n { min-width: 0; } th { color: #5b6675; font-weight: normal; } .finding { border-left: 3px solid #c2843a; padding: 2px 0 2px 12px; margin: .8em 0; }
.finding p { margin: .2em 0; } summary { cursor: pointer; color: #5b6675; } p.about { color: #5b6675; font-size: .85em; margin-top: 1.2em; } .legend span { margin-right: 1.4em; } .legend i { display: inline-block; width: .75em; height: .75em; border-radius: 3px; margin-right: .45em; }
.wraps td:not(:last-child) { white-space: normal; } .wraps td:last-child { min-width: 0; } footer { margin-top: 3em; color: #5b6675; font-size: .8em; }
@media print { @page { size: A4; margin: 14mm; } body { max-width: none; padding: 0; font-size: 10pt; } h2, .verdict { break-after: avoid; }
 .charts { grid-template-columns: 1fr 1fr; gap: 12px 18px; } .few { columns: 2; column-gap: 24px; max-width: none; } .tiles { grid-template-columns: repeat(5, 1fr); } .wide, .table { overflow: visible; } .wide svg { width: 100%; height: auto; }
 * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } tr, .tile, .finding { break-inside: avoid; } }
"""


def figure(name: str, about: str, drawing: str) -> str:
    return f"<figure><figcaption><b>{escape(name)}</b> {escape(about)}</figcaption>{drawing}</figure>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "table") -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="{kind}"><table>{f"<tr>{head}</tr>" if heads else ""}{body}</table></div>'


def rest(number: int, what: str) -> str:
    return f"<p>The newest {MOST_ROWS} of {number:,} {what}.</p>" if number > MOST_ROWS else ""
