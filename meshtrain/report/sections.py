"""The sections of a run's page: how fast it is against what is possible, where its time went, what it holds, what happened to it."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from meshtrain import units
from meshtrain.config import short
from meshtrain.draw import page as pages
from meshtrain.draw.page import figure, sentence
from meshtrain.draw.svg import FIRST, PALE, WIDTH, bar_row, chart
from meshtrain.plan import page as plans
from meshtrain.report import text
from meshtrain.report.charts import stacked
from meshtrain.report.facts import RunFacts
from meshtrain.report.measured import StepPart, TimeShare, step_parts
from meshtrain.report.summary import Summary
from meshtrain.survive import history as histories
from meshtrain.survive import picture
from meshtrain.survive.ledger import word
from meshtrain.units import duration

MOST_ROWS = 12  # of a table: the newest
LARGEST_LIFE = 30_000  # bytes of the picture of a run's life: a larger one is drawn by survive stats
GREY = "#b9c0ca"
# Seconds have the colour of their kind in the picture of a run's life.
KINDS = picture.FILL | {"down": "#e3e7ee"}
COLOURS = {word(kind): colour for kind, colour in KINDS.items()} | {
    "wait": KINDS["step"], "devices": KINDS["step"], "steps": KINDS["step"], "dispatch": PALE, "log": "#c5d6ee", "compiling": KINDS["compile"],
    "data": KINDS["data"], "saves, blocking": KINDS["checkpoint"], "init": KINDS["init"], "start": KINDS["init"], "end": KINDS["init"],
    "stopped": KINDS["down"], "queued": KINDS["down"],
}  # fmt: skip


def sections(facts: RunFacts, summary: Summary) -> Iterator[str]:
    """All but the charts and the config."""
    for section in (_speed, _time, _memory, _faults, _alerts, _checkpoints):
        yield from section(facts, summary)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "table") -> str:
    """Returns a table of plain text."""
    return pages.table(heads, [[escape(cell) for cell in row] for row in rows], style=style)


def _newest(heads: Sequence[str], rows: Sequence[Sequence[str]], what: str) -> Iterator[str]:
    if rows:
        yield table(heads, rows[-MOST_ROWS:])
    if len(rows) > MOST_ROWS:
        yield f"<p>The newest {MOST_ROWS} of {len(rows):,} {what}.</p>"


def _bars(height: int, rows: Sequence[tuple[str, str, float, str]], label: str) -> str:
    body: list[str] = []
    for i, (name, value, share, colour) in enumerate(rows):
        body += bar_row(i * height, name, value, 0.0, share, colour)
    return chart(height * len(rows), body, label)


def findings(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if facts.findings is None:
        return
    yield "<h2>Why it is slow: findings</h2>"
    entries = [f for f in facts.findings if histories.text(f.get("sentence"))]
    for finding in entries:
        share, settings = histories.number(finding.get("severity")), finding.get("settings")
        worth = f"Curing it would win {share:.0%} of a step." if share else ""
        sure = "" if finding.get("sure", True) else "This is not sure."
        flags = [f"--set {short(s)}" for s in settings if isinstance(s, str)] if isinstance(settings, list) else []
        code = f"<p><code>{escape(' '.join(flags))}</code></p>" if flags else ""
        advice = " ".join(filter(None, (sure, worth, histories.text(finding.get("advice")))))
        yield f'<div class="finding"><p><b>{escape(histories.text(finding.get("sentence")))}</b></p><p>{escape(advice)}</p>{code}</div>'
    if not entries:
        yield "<p>None.</p>"
    unknown = facts.diagnosis.get("cannot_tell")
    lines = [histories.text(line) for line in unknown] if isinstance(unknown, list) else []
    if any(lines):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines if line)
        yield f"<p>It cannot be told:</p><ul>{items}</ul>"


def _speed(facts: RunFacts, summary: Summary) -> Iterator[str]:
    speed, bounds = summary.speed, summary.bounds
    if speed is None:
        return
    yield "<h2>How fast, against what is possible</h2>"
    yield f"<p>{escape(text.how_fast(speed))}.</p>"
    if bounds is None or facts.plan is None:
        return
    yield f"<p>{sentence(text.against(speed, bounds, facts.plan.cluster.name))}.</p>"
    steps = text.ladder(speed, bounds)
    most = max(seconds for _, seconds in steps)
    colours = ("#86bd98", *["#cfe3d5"] * (len(steps) - 3), PALE, FIRST)
    bars = [
        (name, f"{units.duration(seconds)}, MFU {bounds.compute / seconds:.1%}", seconds / most, colour)
        for (name, seconds), colour in zip(steps, colours, strict=True)
    ]
    drawing = _bars(34, bars, "a step against what is possible")
    measured = figure("A step", "from the peak of the devices to what was measured", drawing)
    planned = figure("The planned step", f"by part, on {facts.plan.cluster.name}", plans.waterfall(facts.plan))
    yield f'<div class="few">{measured}{planned}</div>'


def _time(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if not summary.wall:
        return
    yield "<h2>Where the time went</h2>"
    figures = [figure("The run", f"by {summary.wall_from}", _shares(summary.wall, duration, "the run's time by kind"))]
    if summary.parts:
        shares = _shares(summary.parts, units.duration, "a step on the host")
        figures.append(figure("A step", "as the host spends it", shares))
    if parts := step_parts(facts):
        figures.append(figure("A step, by a trace", "shares of it, the planned ones pale beneath", _traced(parts)))
    yield f'<div class="few">{"".join(figures)}</div>'
    if facts.survived:
        life = picture.drawn(facts.survived.history, facts.survived.ledger)
        if len(life) <= LARGEST_LIFE:
            yield f'<div class="wide">{life}</div>'
        else:
            yield "<p>The picture of its life is too large for a page: survive stats RUN --svg FILE draws it.</p>"


def _traced(parts: Sequence[StepPart]) -> str:
    most = max(max(part.share or 0.0, part.planned_share or 0.0) for part in parts) or 1.0
    body: list[str] = []
    for i, part in enumerate(parts):
        measured, planned = (" ".join(words) for words in text.measured_and_planned(part))
        value = measured if part.planned is None else f"{measured}, planned {planned}"
        body += bar_row(i * 42, part.name, value, 0.0, (part.share or 0.0) / most, FIRST)
        width = (part.planned_share or 0.0) / most * WIDTH
        body.append(f'<rect x="0" y="{i * 42 + 29}" width="{width:.1f}" height="4" rx="2" fill="{PALE}"/>')
    return chart(42 * len(parts), body, "parts of a step, by a trace and as planned")


def _shares(spent: Sequence[TimeShare], number: Callable[[float], str], label: str) -> str:
    shown = [part for part in spent if part.share >= text.LEAST_SHARE]
    bars = [(part.name, number(part.seconds), part.share, COLOURS.get(part.name, GREY)) for part in shown]
    return stacked(bars, label)


def _memory(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if not summary.held and facts.plan is None:
        return
    yield "<h2>Memory</h2>"
    figures = []
    if summary.held:
        largest = max(max(use.used for use in summary.held), 1.0)
        bars = [
            (use.what, " of ".join(text.sizes(use)), min(use.used / (use.limit or largest), 1.0), FIRST)
            for use in summary.held
        ]
        figures.append(figure("Measured", "at most at any time", _bars(34, bars, "memory as measured")))
    if facts.plan is not None:
        usable = units.size(facts.plan.cluster.accelerator.usable_bytes)
        about = f"{units.size(facts.plan.bytes)} of {usable} a device"
        figures.append(figure("Planned", about, plans.memory_bars(facts.plan)))
    yield f'<div class="few">{"".join(figures)}</div>'


def _faults(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if facts.survived is None:
        return
    ledger, failures = facts.survived.ledger, facts.survived.reliability.failures
    yield "<h2>Goodput and faults</h2>"
    yield (
        f"<p>Goodput {ledger.goodput:.1%} of {duration(ledger.wall)}, in steps that count; effective {ledger.effective:.1%}, with their data, "
        f"evaluations and saves. {len(ledger.generations)} generation{'' if len(ledger.generations) == 1 else 's'}.</p>"
    )
    rows = [
        (
            duration(f.time - ledger.began),
            f.kind,
            ", ".join(f.blamed) or "nobody",
            "-" if f.restart is None else duration(f.restart),
            f.reason,
        )
        for f in failures
    ]
    yield from _newest(("after", "kind", "blamed", "to the next step", "why"), rows, "faults")


def _alerts(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if not facts.alerts:
        return
    yield "<h2>Alerts</h2>"
    yield f"<p>{escape(text.alert_counts(facts) or 'None has begun')}.</p>"
    rows = []
    for alert in facts.alerts:
        time, step = histories.number(alert.get("time")), histories.integer(alert.get("step"))
        at = f"{histories.date(time):%m-%d %H:%M:%S}" if time else "-"
        words = [histories.text(alert.get(name)) for name in ("rule", "state", "sentence")]
        rows.append((at, "-" if step is None else f"{step:,}", *words))
    yield from _newest(("time, UTC", "step", "rule", "state", ""), rows, "alerts")


def _checkpoints(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if facts.checkpoints:
        yield "<h2>Checkpoints</h2>"
        rows = [
            (c.name, c.problem or c.saved.replace("T", " ").replace("+00:00", " UTC"), *text.checkpoint_figures(c))
            for c in facts.checkpoints
        ]
        yield from _newest(("step", "saved", "loss", "eval loss", "size"), rows, "checkpoints")
