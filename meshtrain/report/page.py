"""The report of one run, or of two, as one self-contained page: no script, nothing fetched, for a phone, a desk and a sheet of A4.

Its pictures are SVG with a view box, in as many columns as there is room for; tables that are too wide scroll by themselves.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from meshtrain.config import short
from meshtrain.plan import report
from meshtrain.plan.page import STYLE
from meshtrain.report import compare, events_page, speed_page, text
from meshtrain.report.charts import FIRST, SECOND
from meshtrain.report.compare import Comparison
from meshtrain.report.curves import figures
from meshtrain.report.elements import MORE_STYLE, figure, table
from meshtrain.report.facts import Facts
from meshtrain.report.summary import Summary, settings


def page(facts: Sequence[Facts], summaries: Sequence[Summary], compared: Comparison | None = None) -> str:
    """The page of a run, or of two with what differs between them."""
    title = " and ".join(short(one.name) for one in facts)
    body: list[str] = []
    if compared is not None:
        body += _compared(compared)
        body += _charts(facts)
    for one, summary in zip(facts, summaries, strict=True):
        body += _run(one, summary, alone=compared is None)
    made = f"{datetime.fromtimestamp(facts[0].now, UTC):%Y-%m-%d %H:%M} UTC"
    body.append(f"<footer>Made by meshtrain.report on {made} from the files of the run, and of nothing else.</footer>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    style = f"<style>{STYLE}{MORE_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title>{style}</head><body>\n{"".join(body)}\n</body></html>\n'


def _run(facts: Facts, summary: Summary, alone: bool) -> Iterator[str]:
    name, _, about = text.title(facts).partition(": ")
    yield f"<h1>{escape(name)}</h1>"
    yield f'<p class="run">{escape(about.replace(" x ", " × ") or str(facts.directory))}</p>'
    yield f'<p class="verdict"><span class="dot {summary.level}"></span><b>{escape(summary.verdict[:1].upper() + summary.verdict[1:])}.</b></p>'
    # Findings have a section of their own.
    if reasons := [r for r in summary.reasons if not r.finding]:
        lines = "".join(f'<li class="{r.level}">{escape(r.sentence)}</li>' for r in reasons)
        yield f'<ul class="reasons">{lines}</ul>'
    yield _tiles(summary)
    yield from events_page.findings(facts)
    if alone:
        yield from _charts([facts])
    yield from speed_page.speed(facts, summary)
    yield from speed_page.spent(facts, summary)
    yield from speed_page.memory(facts, summary)
    yield from events_page.faults(facts)
    yield from events_page.alerts(facts)
    yield from events_page.checkpoints(facts)
    yield from _config(facts)
    yield from (f'<p class="note">{escape(note)}</p>' for note in facts.notes)


def _tiles(summary: Summary) -> str:
    tiles: list[tuple[str, str]] = []
    if summary.loss is not None:
        tiles.append((f"{summary.loss:.4f}", "loss at the end"))
    if summary.eval_loss is not None:
        tiles.append((f"{summary.eval_loss:.4f}", "eval loss"))
    if summary.accuracy is not None:
        tiles.append((f"{summary.accuracy:.1%}", "eval accuracy"))
    if summary.eval_least is not None and summary.eval_least != summary.eval_loss:
        tiles.append((f"{summary.eval_least:.4f}", f"lowest, step {summary.eval_least_step:,}"))
    if speed := summary.speed:
        tiles.append((report.duration(speed.median), "a step, median"))
        tiles.append((report.count(speed.tokens_per_second), "tokens a second"))
        if speed.mfu is not None:
            tiles.append((f"{speed.mfu:.1%}", "model FLOPs utilisation"))
        if speed.waiting is not None:
            tiles.append((f"{speed.waiting:.1%}", "waiting for data"))
    tiles.append((report.count(summary.tokens), "tokens read"))
    if summary.goodput is not None:
        tiles.append((f"{summary.goodput:.1%}", "goodput"))
    boxes = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(what)}</span></div>' for v, what in tiles)
    return f'<div class="tiles">{boxes}</div>'


def _charts(facts: Sequence[Facts]) -> Iterator[str]:
    drawn = figures(facts)
    if not drawn:
        return
    yield "<h2>Step by step</h2>"
    if len(facts) > 1:
        named = zip(facts, (FIRST, SECOND), strict=False)
        chips = "".join(
            f'<span><i style="background:{colour}"></i>{escape(short(one.name))}</span>' for one, colour in named
        )
        yield f'<p class="legend">{chips}<span>dots: held-out text</span></p>'
    shown = "".join(figure(name, about, chart) for name, about, chart in drawn)
    yield f'<div class="charts">{shown}</div>'
    yield '<p class="about">Lines are means of neighbouring steps, the bands about them reach from the least to the greatest.</p>'


def _config(facts: Facts) -> Iterator[str]:
    found = settings(facts)
    if not found:
        return
    yield "<h2>Config</h2>"
    yield "<p>What is neither at its default nor follows from other keys; config.yaml has all of it.</p>"
    sections: dict[str, list[str]] = {}
    for path, value in found:
        section, _, key = path.partition(".")
        sections.setdefault(section, []).append(f"{key} {_value(value)}")
    yield table((), [(section, ", ".join(keys)) for section, keys in sections.items()])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return short(", ".join(map(str, value)) if isinstance(value, list | tuple) else value)


def _compared(found: Comparison) -> Iterator[str]:
    a, b = found.names
    yield f"<h1>{escape(a)} and {escape(b)}</h1>"
    level = "good" if found.same and not found.cannot_tell else "note"
    yield f'<p class="verdict"><span class="dot {level}"></span><b>{escape(found.verdict[:1].upper() + found.verdict[1:])}.</b></p>'
    said = (one[:1].upper() + one[1:] for one in compare.sentences(found))
    yield f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in said)}</ul>"
    yield table(("", a, b), found.figures, "table wraps")
    if found.config:
        yield "<h2>What differs in the config</h2>"
        yield table(("key", a, b), [(path, _value(x), _value(y)) for path, x, y in found.config], "table wraps")
    else:
        yield "<p>Their configs are the same.</p>"
    yield (
        "<p>An interval knows how steps vary within a run, and that neighbouring ones depend on each other; not how another hour, machine or "
        "seed would have been.</p>"
    )
