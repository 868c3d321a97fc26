"""What became of a run's time, how often it failed and why, and how that compares with what was predicted: tables, and the same as JSON."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshtrain.cluster.cluster import named
from meshtrain.config import ConfigError, load
from meshtrain.draw.picture import columns
from meshtrain.plan.estimate import plan
from meshtrain.plan.failures import FailureCosts, faults
from meshtrain.survive import history as histories
from meshtrain.survive.history import History
from meshtrain.survive.ledger import Ledger, dominant, ledger, word
from meshtrain.survive.reliability import SURE, Reliability, by_kind, by_node, failures, reliability
from meshtrain.survive.store import config_of
from meshtrain.units import duration

BAR = 30  # letters of the longest bar
LETTER = {
    "init": "i", "restore": "r", "compile": "c", "data": "d", "step": "S", "eval": "e", "checkpoint": "k", "lost": "x", "down": ".", "other": "?",
}  # fmt: skip


def show(run: Path, cluster: str | None = None) -> str:
    """Returns the tables of `run`; with a known cluster's name or file, beside what `plan` predicts for it. ConfigError if it is no such run."""
    history = histories.read(run)
    times = ledger(history)
    figures = reliability(history, times)
    parts = [_headline(history, times), _times(times), "\n".join(timeline(history, times))]
    parts += [_failures(figures)] if figures.failures else []
    parts.append(_reliability(figures, times, predicted(run, history, cluster) if cluster else None, cluster))
    parts += [torn(history.torn)] if history.torn else []
    return "\n\n".join(parts) + "\n"


def to_json(run: Path, cluster: str | None = None) -> dict[str, Any]:
    """Returns the same figures under their names. Seconds; times in seconds since 1970; null is what is not known."""
    history = histories.read(run)
    times = ledger(history)
    figures = reliability(history, times)
    return histories.plain({
        "over": history.over, "began": times.began, "ended": times.ended, "wall": times.wall, "seconds": times.seconds,
        "goodput": times.goodput, "effective": times.effective, "torn": history.torn,
        "generations": [
            {name: getattr(g, name) for name in ("number", "node", "began", "ended", "start", "step", "exit", "seconds")}
            for g in times.generations
        ],
        "failures_by_kind": dict(by_kind(figures.failures)), "failures_by_node": dict(by_node(figures.failures)),
        "reliability": asdict(figures),
        "predicted": asdict(predicted(run, history, cluster)) if cluster else None,
    })  # fmt: skip


def predicted(run: Path, history: History, cluster: str) -> FailureCosts:
    """Returns what `plan` predicts of failures on a cluster, for the config of the newest generation of `run`."""
    root, plans = histories.folder(run), history.plans
    configs = [path for p in plans if p.state == "running" and (path := config_of(root, p)).exists()]
    if not configs:
        raise ConfigError(
            f"no generation of {run} has a config yet, for which --cluster could be planned; leave it out."
        )
    config = load(configs[-1])
    return faults(plan(config, named(cluster, config.mesh.devices)))


def torn(number: int) -> str:
    """Returns a sentence on what could not be read."""
    lines = "line was" if number == 1 else "lines were"
    return f"{number} torn {lines} left out: cut off, or not what a supervisor writes."


def timeline(history: History, times: Ledger, width: int = 100) -> list[str]:
    """Returns lines for a terminal: what rank 0 mostly did in each stretch of time, faults beneath, and what the letters mean."""
    spans, width = [span for generation in times.generations for span in generation.spans], max(width, 20)
    columns, seconds = dominant(spans, times.began, times.ended, width), times.wall / width or 1.0
    marks = [" "] * width
    for failure in failures(history):
        i = min(max(int((failure.time - times.began) / seconds), 0), width - 1)
        marks[i] = "!" if marks[i] == " " else "‼"
    letters, marked = "".join(LETTER[kind or "down"] for kind in columns), "".join(marks).rstrip()
    legend = ", ".join(f"{letter} {word(kind)}" for kind, letter in LETTER.items() if letter in letters)
    legend += f"; a letter is {duration(seconds)}"
    return [letters, marked, f"{legend}; ! a fault"] if marked else [letters, legend]


def _headline(history: History, times: Ledger) -> str:
    nodes = len({e.node for e in history.events})
    state = f"over, {histories.text(history.plans[-1].reason)}" if history.over else "not over"
    counts = f"{_counted(len(times.generations), 'generation')} on {_counted(nodes, 'node')}"
    return f"{counts}; {duration(times.wall)} since {histories.date(times.began):%Y-%m-%d %H:%M:%S} UTC; {state}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _times(times: Ledger) -> str:
    def share(seconds: float) -> str:
        return f"{seconds / times.wall:.1%}" if times.wall else "-"

    rows = [["kind", "seconds", "share", ""]]
    top = max(times.seconds.values(), default=0.0) or 1.0
    for kind, seconds in times.seconds.items():
        if seconds:
            rows.append([word(kind), f"{seconds:,.1f}", share(seconds), "█" * max(round(BAR * seconds / top), 1)])
    rows.append(["together", f"{times.wall:,.1f}", share(times.wall), ""])
    good = f"goodput {times.goodput:.1%}, in steps that count; effective {times.effective:.1%}, with their data, evaluations and saves"
    return f"{_right(rows, 1, 2)}\n{good}"


def _failures(figures: Reliability) -> str:
    hours, events = figures.exposed / 3600, figures.failures

    def table(head: str, counts: Iterable[tuple[str, int]]) -> str:
        rows = [[head, "failures", "an hour"]]
        rows += [[histories.text(name), str(n), f"{n / hours:.3g}" if hours else "-"] for name, n in counts]
        return _right(rows, 1, 2)

    return "\n\n".join((
        _counted(len(events), "failure") + (f", {len(events) / hours:.3g} an hour" if hours else ""),
        table("kind", by_kind(events)),
        table("node", [(name or "nobody", n) for name, n in by_node(events)]),
    ))  # fmt: skip


def _reliability(figures: Reliability, times: Ledger, plan: FailureCosts | None, cluster: str | None) -> str:
    """Returns a table of what was measured, what Daly's formulas make of that, and what the planner predicts."""
    rows = [["", "measured", "by formula", *([f"planned for {histories.text(cluster)}"] if plan else [])]]

    def row(name: str, measured: str, formula: str = "", planned: str = "") -> None:
        rows.append([name, measured, formula, *([planned] if plan else [])])

    least, most = _maybe(figures.between_least), _maybe(figures.between_most)
    row("mean time between failures", _maybe(figures.between), "", duration(plan.between) if plan else "")
    row(f"  {SURE:.0%} sure", f"{least} to {most}" if figures.failures else f"over {least}")
    row("last progress to verdict", _maybe(figures.noticed))
    row("verdict to first step again", _maybe(figures.restart))
    row("a save stops training for", _maybe(figures.write), "", duration(plan.copy) if plan else "")
    every = "-" if figures.interval_steps is None else f"{figures.interval_steps:.3g} steps"
    advised = "-" if figures.advised is None else f"{figures.advised:,} steps"
    row("checkpoint.every", every, advised, f"{plan.interval_steps:,} steps" if plan and plan.interval_steps else "")
    expected = "-" if figures.expected is None else f"{figures.expected:.1%}"
    configured = plan.configured_goodput if plan else None
    row("goodput", f"{times.goodput:.1%}", expected, "-" if configured is None else f"{configured:.1%}")
    return f"{columns(rows)}\nthe formulas take failures to be memoryless"


def _maybe(seconds: float | None) -> str:
    return "-" if seconds is None else "any" if math.isinf(seconds) else duration(seconds)


def _right(rows: list[list[str]], *numbers: int) -> str:
    """Returns columns as text, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([[cell.rjust(widths[i]) if i in numbers else cell for i, cell in enumerate(row)] for row in rows])
