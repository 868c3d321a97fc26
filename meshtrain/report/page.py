"""Writes the report of one run, or of two, as one self-contained page: no script, nothing fetched, for a phone, a desk
and a sheet of A4.

Its pictures are SVG with a view box, in as many columns as there is room for; tables that are too wide scroll by
themselves.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from meshtrain import units
from meshtrain.config import short
from meshtrain.draw import page as pages
from meshtrain.draw.page import figure, sentence
from meshtrain.draw.svg import FIRST, SECOND
from meshtrain.report import compare, text
from meshtrain.report.charts import figures
from meshtrain.report.compare import Comparison
from meshtrain.report.facts import RunFacts
from meshtrain.report.sections import Section, findings, sections
from meshtrain.report.summary import Summary
from meshtrain.telemetry.catalogue import RECENT_ROWS

MOST_ROWS = 12  # of a table: the newest

STYLE = """
h1 ~ h1 { margin-top: 2.4em; padding-top: 1.2em; border-top: 1px solid var(--line); }
.run { color: var(--faint); margin: 0 0 1em; overflow-wrap: anywhere; } .note { list-style: none; }
.verdict { display: flex; gap: .6em; align-items: baseline; font-size: 1.15em; margin: .2em 0 .6em; }
.dot { flex: none; width: .7em; height: .7em; border-radius: 50%; } .dot.good { background: var(--good); }
.dot.note { background: #d9a400; } .dot.bad { background: var(--bad); }
.reasons { padding-left: 1.2em; } .reasons .bad { color: var(--bad); font-weight: 600; }
.reasons .note { list-style: disc; color: inherit; }
.tile b { font-weight: 600; font-size: 1.2em; white-space: nowrap; } td:not(:last-child) { white-space: nowrap; }
td:last-child { overflow-wrap: anywhere; min-width: 12em; } td.n { min-width: 0; }
.finding { border-left: 3px solid var(--note); padding: 2px 0 2px 12px; margin: .8em 0; }
.finding p { margin: .2em 0; } p.about { margin-top: 1.2em; }
.legend span { margin-right: 1.4em; } .legend i { display: inline-block; width: .75em; height: .75em;
  border-radius: 3px; margin-right: .45em; }
.wraps .n { text-align: left; } .wraps td:not(:last-child) { white-space: normal; }
.wraps td:last-child { min-width: 0; } .texts { max-height: 40em; overflow-y: auto; }
.texts td:last-child { min-width: 0; }
.texts tr > :nth-child(4), .texts tr > :nth-child(5) {
  text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12em;
}
summary { cursor: pointer; } footer { margin-top: 3em; color: var(--faint); font-size: .8em; }
@media print { @page { size: A4; margin: 14mm; } body { max-width: none; padding: 0; font-size: 10pt; }
h2, .verdict { break-after: avoid; }
 .charts { grid-template-columns: 1fr 1fr; gap: 12px 18px; } .tiles { grid-template-columns: repeat(5, 1fr); }
  .wide, .table { overflow: visible; max-height: none; } .wide svg { width: 100%; height: auto; }
 * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } tr, .tile, .finding { break-inside: avoid; } }
"""


def page(
    facts: Sequence[RunFacts],
    summaries: Sequence[Summary],
    compared: Comparison | None = None,
) -> str:
    """Returns the page of a run, or of two with what differs between them."""
    title = " and ".join(short(one.name) for one in facts)
    body: list[str] = []
    if compared is not None:
        body += _compared(compared)
        body += _charts(facts)
    for one, summary in zip(facts, summaries, strict=True):
        body += _run(one, summary, alone=compared is None)
    date = f"{datetime.fromtimestamp(facts[0].now, UTC):%Y-%m-%d %H:%M} UTC"
    body.append(
        f"<footer>Made by meshtrain.report on {date} from the files of the run, and of nothing else.</footer>"
    )
    return pages.page(title, body, STYLE)


def _run(facts: RunFacts, summary: Summary, alone: bool) -> Iterator[str]:
    name, _, about = text.title(facts).partition(": ")
    yield f"<h1>{escape(name)}</h1>"
    yield f'<p class="run">{escape(about.replace(" x ", " × ") or str(facts.directory))}</p>'
    yield _verdict(summary.level, summary.verdict)
    # Findings have a section of their own.
    if reasons := [r for r in summary.reasons if not r.finding]:
        lines = "".join(
            f'<li class="{r.level}">{escape(r.sentence)}</li>' for r in reasons
        )
        yield f'<ul class="reasons">{lines}</ul>'
    yield _tiles(summary)
    if (diagnosis := findings(facts.diagnosis)) is not None:
        yield from _section(diagnosis)
    if alone:
        yield from _charts([facts])
    for section in sections(facts, summary):
        yield from _section(section)
    yield from (f'<p class="note">{escape(note)}</p>' for note in facts.notes)


def _verdict(level: str, verdict: str) -> str:
    return f'<p class="verdict"><span class="dot {level}"></span><b>{sentence(verdict)}.</b></p>'


def _section(section: Section, style: str = "table") -> Iterator[str]:
    if section.title:
        yield f"<h2>{escape(section.title)}</h2>"
    yield from (f"<p>{sentence(words)}</p>" for words in section.sentences)
    for item in section.items:
        flags = f"<p><code>{escape(item.flags)}</code></p>" if item.flags else ""
        words = f"<p><b>{escape(item.sentence)}</b></p><p>{escape(item.advice)}</p>"
        yield f'<div class="finding">{words}{flags}</div>'
    if section.unknown:
        lines = "".join(f"<li>{escape(line)}</li>" for line in section.unknown)
        yield f"<p>It cannot be told:</p><ul>{lines}</ul>"
    if section.figures:
        drawn = (figure(one.title, one.about, one.draw()) for one in section.figures)
        yield pages.figures(drawn)
    if section.wide is not None:
        yield section.wide()
    if section.table is not None:
        heads, rows, what, newest, texts = section.table
        cut = heads and newest and len(rows) > MOST_ROWS
        shown = rows[-MOST_ROWS:] if cut else rows
        cell = pages.folded if texts else escape
        style = "table texts" if texts else style
        yield pages.table(heads, [list(map(cell, row)) for row in shown], style=style)
        if cut:
            yield f"<p>The newest {MOST_ROWS} of {len(rows):,} {what}.</p>"


def _tiles(summary: Summary) -> str:
    labels = {
        "reward": "reward at the end",
        "gap": "largest gap of a log-probability",
        "loss": "loss at the end",
        "eval loss": "eval loss",
        "eval accuracy": "eval accuracy",
        "lowest eval loss": f"lowest, step {summary.eval_least_step:,}"
        if summary.eval_least_step is not None
        else "",
        "a step": "a step, median",
        "tokens/s": "tokens a second",
        "MFU": f"MFU, last {RECENT_ROWS} rows",
        "data wait": "waiting for data",
        "tokens": "tokens read",
        "goodput": "goodput",
    }
    figures = summary.figures | {"tokens": units.count(summary.tokens)}
    if figures.get("lowest eval loss") == figures.get("eval loss"):
        figures.pop("lowest eval loss", None)
    return pages.tiles(
        (figures[name], label) for name, label in labels.items() if name in figures
    )


def _charts(facts: Sequence[RunFacts]) -> Iterator[str]:
    charts = figures(facts)
    if not charts:
        return
    yield "<h2>Step by step</h2>"
    if len(facts) > 1:
        named = zip(facts, (FIRST, SECOND), strict=False)
        keys = (
            f'<span><i style="background:{colour}"></i>{escape(short(run.name))}</span>'
            for run, colour in named
        )
        yield f'<p class="legend">{"".join(keys)}<span>dots: validation text</span></p>'
    yield pages.figures(figure(*chart) for chart in charts)
    yield (
        '<p class="about">Lines are means of neighbouring steps, the bands about them reach from the least to the '
        "greatest.</p>"
    )


def _compared(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.names
    yield f"<h1>{escape(a)} and {escape(b)}</h1>"
    yield _verdict(
        "good" if comparison.same and not comparison.cannot_tell else "note",
        comparison.verdict,
    )
    yield f"<ul>{''.join(f'<li>{sentence(line)}</li>' for line in compare.sentences(comparison))}</ul>"
    for section in compare.tables(comparison):
        yield from _section(section, "table wraps")
    yield (
        "<p>An interval knows how steps vary within a run, and that neighbouring ones depend on each other; not how "
        "another hour, machine or "
        "seed would have been.</p>"
    )
