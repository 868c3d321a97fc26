"""The sections of a report, each once: sentences, figures and tables, which `text` writes for a terminal and `page` as
HTML.

How fast a run is against what is possible, where its time went, what it held, what happened to it, and what was set.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from meshtrain import units
from meshtrain.config import short
from meshtrain.draw import page as pages
from meshtrain.draw.svg import FIRST, GREEN, GREY, PALE, mixed
from meshtrain.plan import page as plans
from meshtrain.report.answers import HEADS, AnswerSamples
from meshtrain.report.charts import Row, bars, stacked
from meshtrain.report.experts import ExpertLoads
from meshtrain.report.experts import picture as picture_of_loads
from meshtrain.report.facts import RunFacts
from meshtrain.report.measured import Bounds, MemoryUse, Speed, TimeShare
from meshtrain.report.samples import HEADS as SAMPLED
from meshtrain.report.summary import (
    Summary,
    alerts_by_rule,
    firing,
    loss_text,
    setting_text,
    settings,
)
from meshtrain.survive import history as histories
from meshtrain.survive import picture
from meshtrain.survive.ledger import word
from meshtrain.survive.stats import timeline
from meshtrain.telemetry.catalogue import RECENT_ROWS
from meshtrain.units import duration

LEAST_SHARE = 0.0005  # of a time that is shown
PADDING_TOLD = 0.01  # the share of positions from which on padding is named
LARGEST_LIFE = (
    # Bytes of the picture of a run's life: a larger one is drawn by survive stats
    30_000
)
MOST_LAYERS = 8  # whose experts' loads have bars
LETTERS = 78  # of the same in a terminal
DESCRIBED = (
    "The plan is for a described machine with 2 cores, not for this one: compare shares, not seconds (plan "
    "--measure describes this one)."
)
# Seconds have the colour of their kind in the picture of a run's life.
KINDS = picture.FILL | {"down": picture.FILL["other"]}
COLOURS = {word(kind): colour for kind, colour in KINDS.items()} | {
    "wait": KINDS["step"],
    "devices": KINDS["step"],
    "steps": KINDS["step"],
    "dispatch": PALE,
    "log": GREY,
    "compiling": KINDS["compile"],
    "data": KINDS["data"],
    "saves, blocking": KINDS["checkpoint"],
    "init": KINDS["init"],
    "start": KINDS["init"],
    "end": KINDS["init"],
    "stopped": KINDS["down"],
    "queued": KINDS["down"],
}


class Figure(NamedTuple):
    """Rows for a terminal, and what a page draws of them. `about` ends the sentence that `title` begins."""

    title: str
    about: str
    rows: Sequence[Row]
    draw: Callable[[], str]


class Grid(NamedTuple):
    """Plain text, of which all rows are shown, or with `newest` the newest. `what`: many such rows, in a word.

    `texts`: cells may be long and have several lines; a terminal shows the newest rows, and of each cell the beginning.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    what: str = "rows"
    newest: bool = True
    texts: bool = False


class Item(NamedTuple):
    """A finding: what it is, what would cure it, and the flags that do."""

    sentence: str
    advice: str
    flags: str


class Section(NamedTuple):
    """A part of a report under a title.

    `wide`: a drawing of a page that is as wide as it is; `lines` say the same in a terminal.
    """

    title: str
    sentences: Sequence[str] = ()
    items: Sequence[Item] = ()
    unknown: Sequence[str] = ()  # what cannot be told
    figures: Sequence[Figure] = ()
    table: Grid | None = None
    wide: Callable[[], str] | None = None
    lines: Sequence[str] = ()


def sections(facts: RunFacts, summary: Summary) -> Iterator[Section]:
    """Yields the sections of which the files of a run say something, but for `findings`."""
    if summary.speed is not None:
        yield _speed(facts, summary.speed, summary.bounds)
    if summary.wall:
        yield _time(facts, summary)
    if summary.held or facts.plan is not None:
        yield Section("Memory", figures=list(_memory(facts, summary.held)))
    if facts.loads is not None:
        yield _experts(facts.loads)
    if facts.answers is not None and facts.answers.rows:
        yield _answers(facts.answers)
    if facts.texts:
        about = "The model goes on with the begins of validation texts, with the same noise each time."
        table = Grid(SAMPLED, facts.texts, "samples", newest=False, texts=True)
        yield Section("Samples", (about,), table=table)
    if facts.survived is not None:
        yield _faults(facts)
    if facts.alerts:
        yield _alerts(facts)
    if facts.checkpoints:
        yield _checkpoints(facts)
    if changed := settings(facts):
        by_section: dict[str, list[str]] = {}
        for path, value in changed:
            section, _, key = path.partition(".")
            by_section.setdefault(section, []).append(f"{key} {setting_text(value)}")
        rows = [(section, ", ".join(keys)) for section, keys in by_section.items()]
        about = "What is neither at its default nor follows from other keys; config.yaml has all of it."
        yield Section("Config", (about,), table=Grid((), rows, "sections"))


def findings(diagnosis: Mapping[str, Any]) -> Section | None:
    """Returns what the rules of a diagnosis found, as findings.json has it; None if no run was diagnosed."""
    if not isinstance(entries := diagnosis.get("findings"), list):
        return None
    items = []
    for finding in entries:
        if not isinstance(finding, dict) or not (
            sentence := histories.text(finding.get("sentence"))
        ):
            continue
        share = histories.number(finding.get("severity"))
        chosen = finding.get("settings")
        worth = f"Curing it would win {share:.0%} of a step." if share else ""
        sure = "" if finding.get("sure", True) else "This is not sure."
        flags = (
            [f"--set {short(s)}" for s in chosen if isinstance(s, str)]
            if isinstance(chosen, list)
            else []
        )
        advice = " ".join(
            filter(None, (sure, worth, histories.text(finding.get("advice"))))
        )
        items.append(Item(sentence, advice, " ".join(flags)))
    remarks = _texts(diagnosis.get("remarks"))
    if diagnosis.get("cluster") == "cpu":
        remarks.append(DESCRIBED)
    if not items:
        remarks.append("None.")
    return Section(
        "Why it is slow: findings", remarks, items, _texts(diagnosis.get("cannot_tell"))
    )


def _texts(entries: Any) -> list[str]:
    if isinstance(entries, list):
        return [text for entry in entries if (text := histories.text(entry))]
    return []


def _speed(facts: RunFacts, speed: Speed, bounds: Bounds | None) -> Section:
    title = "How fast, against what is possible"
    how_fast = (
        f"{units.duration(speed.median)} a step ({units.duration(speed.p10)} to {units.duration(speed.p90)} for 8 of "
        "10), "
        f"{speed.tokens_per_second:,.0f} "
        f"tokens/s{'' if speed.mfu is None else f', MFU {speed.mfu:.1%} over the last {RECENT_ROWS} rows'}."
    )
    if speed.padding >= PADDING_TOLD:
        how_fast += f" Padding fills {speed.padding:.0%} of the positions."
    plan = facts.plan
    if bounds is None or plan is None:
        return Section(title, (how_fast,))
    times = speed.median / bounds.planned
    compared = (
        f"{times:.2f} times the planned step"
        if times >= 1
        else f"{1 / times:.2f} times as fast as planned"
    )
    cluster = plan.cluster.name
    against = (
        f"{compared} on {cluster}; the roofline there, bound by {bounds.bound}, is "
        f"{units.duration(bounds.roof)}."
    )
    steps = ladder(speed, bounds)
    most = max(seconds for _, seconds in steps)
    colours = (GREEN, *[mixed(GREEN, "#ffffff", 0.5)] * (len(steps) - 3), PALE, FIRST)
    rows = [
        Row(
            name,
            (units.duration(seconds), f"MFU {bounds.compute / seconds:.1%}"),
            seconds / most,
            colour,
        )
        for (name, seconds), colour in zip(steps, colours, strict=True)
    ]
    draw = partial(bars, rows, "a step against what is possible")
    figures = (
        Figure(
            "A step", "from the peak of the devices to what was measured", rows, draw
        ),
        Figure(
            "The planned step",
            f"by part, on {cluster}",
            (),
            partial(plans.waterfall, plan),
        ),
    )
    return Section(title, (how_fast, against), figures=figures)


def ladder(speed: Speed, bounds: Bounds) -> list[tuple[str, float]]:
    """Returns the seconds of a step that are possible, from the peak of the devices down to those that were
    measured.
    """
    steps = [("compute at the peak", bounds.compute)]
    if bounds.bound != "compute":
        steps.append((f"roofline, bound by {bounds.bound}", bounds.roof))
    return [*steps, ("planned", bounds.planned), ("measured", speed.median)]


def _time(facts: RunFacts, summary: Summary) -> Section:
    figures = [
        _shares(
            "The run",
            f"by {summary.wall_from}",
            summary.wall,
            duration,
            "the run's time by kind",
        )
    ]
    if summary.parts:
        figures.append(
            _shares(
                "A step",
                "as the host spends it",
                summary.parts,
                units.duration,
                "a step on the host",
            )
        )
    if rows := list(_traced(facts.diagnosis)):
        draw = partial(bars, rows, "parts of a step, by a trace and as planned")
        figures.append(
            Figure(
                "A step, by a trace",
                "shares of it, the planned ones pale beneath",
                rows,
                draw,
            )
        )
    title = "Where the time went"
    survived = facts.survived
    if survived is None:
        return Section(title, figures=figures)

    def life() -> str:
        drawing = picture.drawn(survived.history, survived.ledger, pages.COLUMN)
        if len(drawing) <= LARGEST_LIFE:
            return pages.wide(drawing)
        return "<p>The picture of its life is too large for a page: survive stats RUN --svg FILE draws it.</p>"

    return Section(
        title,
        figures=figures,
        wide=life,
        lines=list(timeline(survived.history, survived.ledger, LETTERS)),
    )


def _shares(
    title: str,
    about: str,
    spent: Sequence[TimeShare],
    number: Callable[[float], str],
    label: str,
) -> Figure:
    rows = [
        Row(
            part.name,
            (number(part.seconds), f"{part.share:.1%}"),
            part.share,
            COLOURS.get(part.name, GREY),
        )
        for part in spent
        if part.share >= LEAST_SHARE
    ]
    return Figure(title, about, rows, partial(stacked, rows, label))


def _traced(diagnosis: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the parts of a step that a diagnosis has told apart, beside what was planned for each."""
    entries = diagnosis.get("parts")
    parts = (
        [part for part in entries if isinstance(part, dict)]
        if isinstance(entries, list)
        else []
    )
    names = [histories.text(part.get("name")) for part in parts]
    measured, planned = (
        [histories.number(part.get(key)) for part in parts]
        for key in ("seconds", "planned")
    )
    # Of steps of which nothing is known, shares are of nothing.
    totals = [sum(filter(None, seconds)) or 1.0 for seconds in (measured, planned)]
    shares = [
        [(s or 0.0) / total for s in seconds]
        for seconds, total in zip((measured, planned), totals, strict=True)
    ]
    most = max([*shares[0], *shares[1]], default=0.0) or 1.0
    for name, seconds, share, expected, expected_share in zip(
        names, measured, shares[0], planned, shares[1], strict=True
    ):
        if seconds or expected:
            words = (
                "" if expected is None else f"planned {_part(expected, expected_share)}"
            )
            yield Row(
                name,
                (_part(seconds, share), words),
                share / most,
                planned=expected_share / most,
            )


def _part(seconds: float | None, share: float) -> str:
    if seconds is None:
        return "-"
    return f"{units.duration(seconds) if seconds else '0'} {share:.0%}"


def _memory(facts: RunFacts, held: Sequence[MemoryUse]) -> Iterator[Figure]:
    if held:
        largest = max(max(use.used for use in held), 1.0)
        rows = [
            Row(
                use.what,
                (_share_of(use.used, use.limit),),
                min(use.used / (use.limit or largest), 1.0),
            )
            for use in held
        ]
        yield Figure(
            "Measured",
            "at most at any time",
            rows,
            partial(bars, rows, "memory as measured"),
        )
    if facts.plan is not None:
        usable = facts.plan.cluster.accelerator.usable_bytes
        about = f"{_share_of(facts.plan.bytes, usable)} a device"
        row = Row(
            "a device",
            (_share_of(facts.plan.bytes, usable),),
            min(facts.plan.bytes / usable, 1.0),
        )
        yield Figure("Planned", about, (row,), partial(plans.memory_bars, facts.plan))


def _share_of(used: float, limit: float | None) -> str:
    return f"{units.size(used)} of {units.size(limit)}" if limit else units.size(used)


def _experts(loads: ExpertLoads) -> Section:
    fullest = sorted(enumerate(loads.relative_loads.max(1)), key=lambda load: -load[1])[
        :MOST_LAYERS
    ]
    rows = [
        Row(f"layer {layer}", (f"{load:.2f}",), load / max(fullest[0][1], 1.0))
        for layer, load in fullest
    ]
    figures = (
        Figure(
            "Load by layer and expert",
            "over the layer's mean",
            (),
            partial(picture_of_loads, loads),
        ),
        Figure(
            "The fullest expert",
            "of the most uneven layers",
            rows,
            partial(bars, rows, "the fullest expert of the most uneven layers"),
        ),
    )
    return Section("Experts", (loads.sentence,), figures=figures)


def _answers(samples: AnswerSamples) -> Section:
    about = (
        "The best, a median and the worst answer of steps that are spread over the run."
    )
    table = Grid(HEADS, samples.rows, "answers", newest=False, texts=True)
    return Section("Answers", (about,), table=table)


def _faults(facts: RunFacts) -> Section:
    assert facts.survived is not None
    ledger = facts.survived.ledger
    failures = facts.survived.reliability.failures
    goodput = (
        f"Goodput {ledger.goodput:.1%} of {duration(ledger.wall)}, in steps that count; effective "
        f"{ledger.effective:.1%}, with their data, "
        f"evaluations and saves. {len(ledger.generations)} generation{'' if len(ledger.generations) == 1 else 's'}."
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
    table = Grid(("after", "kind", "blamed", "to the next step", "why"), rows, "faults")
    return Section("Goodput and faults", (goodput,), table=table if rows else None)


def _alerts(facts: RunFacts) -> Section:
    counts = ", ".join(f"{n} × {rule}" for rule, n in alerts_by_rule(facts))
    rows = []
    for alert in facts.alerts:
        time = histories.number(alert.get("time"))
        step = histories.integer(alert.get("step"))
        at = f"{histories.date(time):%m-%d %H:%M:%S}" if time else "-"
        words = [
            histories.text(alert.get(name)) for name in ("rule", "state", "sentence")
        ]
        rows.append((at, "-" if step is None else f"{step:,}", *words))
    sentence = (
        f"{counts or 'None has begun'}; {len(firing(facts)) or 'none'} still firing."
    )
    return Section(
        "Alerts",
        (sentence,),
        table=Grid(("time, UTC", "step", "rule", "state", ""), rows, "alerts"),
    )


def _checkpoints(facts: RunFacts) -> Section:
    rows = []
    for c in facts.checkpoints:
        size = "-" if c.nbytes is None else units.size(c.nbytes)
        saved = c.problem or c.saved.replace("T", " ").replace("+00:00", " UTC")
        rows.append(
            (
                c.name,
                saved,
                loss_text(c.loss),
                loss_text(c.eval_loss) + (" best" if c.best else ""),
                size,
            )
        )
    return Section(
        "Checkpoints",
        table=Grid(("step", "saved", "loss", "eval loss", "size"), rows, "checkpoints"),
    )
