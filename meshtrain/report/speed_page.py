"""Of a report's page: how fast the run is against what is possible, where its time went, what it holds."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from meshtrain.plan import page as plans
from meshtrain.plan import report
from meshtrain.plan.page import bar_row, svg
from meshtrain.report import text
from meshtrain.report.charts import FIRST, stacked
from meshtrain.report.elements import figure
from meshtrain.report.facts import Facts
from meshtrain.report.measured import Part, Spent, parts
from meshtrain.report.summary import Summary
from meshtrain.survive import picture
from meshtrain.survive.life import took, word

LARGEST_LIFE = 30_000  # bytes of the picture of a run's life: a larger one is drawn by survive stats
GREY = "#b9c0ca"
# Of each kind of seconds the colour that it has in the picture of a run's life; phases and what rows say have those of their kind.
KINDS = {kind: colour for kind, (colour, _) in picture.FILL.items()} | {"down": "#e3e7ee"}
COLOURS = {word(kind): colour for kind, colour in KINDS.items()} | {
    "wait": KINDS["step"], "devices": KINDS["step"], "steps": KINDS["step"], "dispatch": "#8fb3de", "log": "#c5d6ee", "compiling": KINDS["compile"],
    "data": KINDS["data"], "saves, blocking": KINDS["checkpoint"], "init": KINDS["init"], "start": KINDS["init"], "end": KINDS["init"],
}  # fmt: skip


def speed(facts: Facts, summary: Summary) -> Iterator[str]:
    speed, bounds = summary.speed, summary.bounds
    if speed is None:
        return
    yield "<h2>How fast, against what is possible</h2>"
    yield f"<p>{escape(text.how_fast(speed))}.</p>"
    if bounds is None or facts.plan is None:
        return
    said = text.against(speed, bounds, facts.plan.cluster.name)
    yield f"<p>{escape(said[:1].upper() + said[1:])}.</p>"
    bars = text.ladder(speed, bounds)
    most = max(seconds for _, seconds in bars)
    body: list[str] = []
    colours = ("#86bd98", *["#cfe3d5"] * (len(bars) - 3), "#8fb3de", FIRST)
    for i, ((name, seconds), colour) in enumerate(zip(bars, colours, strict=True)):
        body += bar_row(
            i * 34, name, f"{report.duration(seconds)}, MFU {bounds.compute / seconds:.1%}", 0.0, seconds / most, colour
        )
    drawn = figure(
        "A step",
        "from the peak of the devices to what was measured",
        svg(34 * len(bars), body, "a step against what is possible"),
    )
    planned = figure("The planned step", f"by part, on {facts.plan.cluster.name}", plans.waterfall(facts.plan))
    yield f'<div class="few">{drawn}{planned}</div>'


def spent(facts: Facts, summary: Summary) -> Iterator[str]:
    if not summary.wall:
        return
    yield "<h2>Where the time went</h2>"
    shown = [figure("The run", f"by {summary.wall_from}", _shares(summary.wall, took, "the run's time by kind"))]
    if summary.parts:
        shown.append(
            figure("A step", "as the host spends it", _shares(summary.parts, report.duration, "a step on the host"))
        )
    if found := parts(facts):
        shown.append(figure("A step, by a trace", "shares of it, the planned ones pale beneath", _against(found)))
    yield f'<div class="few">{"".join(shown)}</div>'
    if facts.survived:
        life = picture.drawn(facts.survived.history, facts.survived.ledger)
        if len(life) <= LARGEST_LIFE:
            yield f'<div class="wide">{life}</div>'
        else:
            yield "<p>The picture of its life is too large for a page: survive stats RUN --svg FILE draws it.</p>"


def _against(found: Sequence[Part]) -> str:
    """A bar of the share that each part has of a step, and a pale one of that which was planned."""
    most = max(max(part.share or 0.0, part.planned_share or 0.0) for part in found) or 1.0
    body: list[str] = []
    for i, part in enumerate(found):
        measured, planned = text.shared(part.seconds, part.share), text.shared(part.planned, part.planned_share)
        figure = " ".join(measured) if part.planned is None else f"{' '.join(measured)}, planned {' '.join(planned)}"
        body += bar_row(i * 42, part.name, figure, 0.0, (part.share or 0.0) / most, FIRST)
        width = (part.planned_share or 0.0) / most * plans.WIDTH
        body.append(f'<rect x="0" y="{i * 42 + 29}" width="{width:.1f}" height="4" rx="2" fill="#8fb3de"/>')
    return svg(42 * len(found), body, "parts of a step, by a trace and as planned")


def _shares(spent: Sequence[Spent], number: Callable[[float], str], label: str) -> str:
    shown = [part for part in spent if part.share >= text.LEAST_SHARE]
    bars = [(part.name, number(part.seconds), part.share, COLOURS.get(part.name, GREY)) for part in shown]
    return stacked(bars, label)


def memory(facts: Facts, summary: Summary) -> Iterator[str]:
    if not summary.held and facts.plan is None:
        return
    yield "<h2>Memory</h2>"
    shown = []
    if summary.held:
        body: list[str] = []
        for i, held in enumerate(summary.held):
            most = held.limit or max(max(one.used for one in summary.held), 1.0)
            of = f" of {report.size(held.limit)}" if held.limit else ""
            body += bar_row(i * 34, held.what, report.size(held.used) + of, 0.0, min(held.used / most, 1.0), FIRST)
        shown.append(figure("Measured", "at most at any time", svg(34 * len(summary.held), body, "memory as measured")))
    if facts.plan is not None:
        usable = report.size(facts.plan.cluster.accelerator.usable_bytes)
        shown.append(
            figure("Planned", f"{report.size(facts.plan.bytes)} of {usable} a device", plans.memory_bars(facts.plan))
        )
    yield f'<div class="few">{"".join(shown)}</div>'
