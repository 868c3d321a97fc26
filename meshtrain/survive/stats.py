"""What became of a run's time, how often it failed and why, and how that compares with what was predicted: tables, and the same as JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshtrain.config import ConfigError, load
from meshtrain.pictures.picture import columns
from meshtrain.plan.cluster.cluster import named
from meshtrain.plan.estimate import plan
from meshtrain.plan.failures import Faults, faults
from meshtrain.survive import history as histories
from meshtrain.survive.history import History
from meshtrain.survive.ledger import Ledger, ledger
from meshtrain.survive.life import line, took, word
from meshtrain.survive.reliability import (
    FEWEST,
    SURE,
    Failure,
    Reliability,
    by_interval,
    by_kind,
    by_node,
    reliability,
    usual_restart,
)
from meshtrain.survive.store import config_of

BAR = 30  # letters of the longest bar


def show(run: Path, cluster: str | None = None) -> str:
    """The tables of `run`; with a known cluster's name or file, beside what `plan` predicts for it. ConfigError if it is no such run."""
    history = histories.read(run)
    told = ledger(history)
    found = reliability(history, told)
    parts = [_headline(history, told), _time(told), "\n".join(line(history, told))]
    parts += [_failures(found, told)] if found.failures else []
    parts.append(_reliability(found, told, predicted(run, history, cluster) if cluster else None, cluster))
    parts += [torn(history.torn)] if history.torn else []
    return "\n\n".join(parts) + "\n"


def to_json(run: Path, cluster: str | None = None) -> dict[str, Any]:
    """The same figures under their names. Seconds; times in seconds since 1970; null is what is not known."""
    history = histories.read(run)
    told = ledger(history)
    found = reliability(history, told)
    return _plain({
        "over": history.over, "began": told.began, "ended": told.ended, "wall": told.wall, "seconds": told.seconds,
        "goodput": told.goodput, "effective": told.effective, "torn": history.torn,
        "generations": [
            {name: getattr(g, name) for name in ("number", "node", "began", "ended", "start", "step", "exit", "seconds")}
            for g in told.generations
        ],
        "failures_by_kind": dict(by_kind(found.failures)), "failures_by_node": dict(by_node(found.failures)),
        "failures_by_interval": [
            {"from": a, "to": b, "failures": n} for a, b, n in by_interval(found.failures, told)
        ],
        "reliability": asdict(found),
        "predicted": asdict(predicted(run, history, cluster)) if cluster else None,
    })  # fmt: skip


def predicted(run: Path, history: History, cluster: str) -> Faults:
    """What `plan` makes of the failures of a cluster, for the config that the newest generation of `run` was given."""
    root, plans = histories.folder(run), history.plans
    configs = [path for p in plans if p.state == "running" and (path := config_of(root, p)).exists()]
    if not configs:
        raise ConfigError(
            f"no generation of {run} has a config yet, for which --cluster could be planned; leave it out."
        )
    config = load(configs[-1])
    return faults(plan(config, named(cluster, config.mesh.data * config.mesh.tensor * config.mesh.pipeline)))


def torn(number: int) -> str:
    """What could not be read, in a sentence."""
    return (
        f"{number} torn line{' was' if number == 1 else 's were'} left out: cut off, or not what a supervisor writes."
    )


def _plain(value: Any) -> Any:
    """What JSON has a word for: an infinite or undefined number is none."""
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _headline(history: History, told: Ledger) -> str:
    nodes = len({e.node for e in history.events})
    began = histories.date(told.began)
    state = f"over, {histories.text(history.plans[-1].reason)}" if history.over else "not over"
    generations = f"{len(told.generations)} generation{'' if len(told.generations) == 1 else 's'}"
    return f"{generations} on {nodes} node{'' if nodes == 1 else 's'}; {took(told.wall)} since {began:%Y-%m-%d %H:%M:%S} UTC; {state}"


def _time(told: Ledger) -> str:
    rows = [["kind", "seconds", "share", ""]]
    top = max(told.seconds.values(), default=0.0) or 1.0
    for kind, seconds in told.seconds.items():
        if seconds:
            rows.append(
                [word(kind), f"{seconds:,.1f}", _share(seconds, told), "█" * max(round(BAR * seconds / top), 1)]
            )
    rows.append(["together", f"{told.wall:,.1f}", _share(told.wall, told), ""])
    good = f"goodput {told.goodput:.1%}, in steps that count; effective {told.effective:.1%}, with their data, evaluations and saves"
    return f"{_right(rows, 1, 2)}\n{good}"


def _share(seconds: float, told: Ledger) -> str:
    return f"{seconds / told.wall:.1%}" if told.wall else "-"


def _failures(found: Reliability, told: Ledger) -> str:
    number, hours = len(found.failures), found.exposed / 3600
    rate = f", {number / hours:.3g} an hour" if hours else ""
    parts = [f"{number} failure{'' if number == 1 else 's'}{rate}"]
    parts.append(_counts("kind", by_kind(found.failures), hours))
    parts.append(_counts("node", [(name or "nobody", n) for name, n in by_node(found.failures)], hours))
    parts.append(_intervals(found.failures, told))
    return "\n\n".join(parts)


def _counts(head: str, counts: Iterable[tuple[str, int]], hours: float) -> str:
    rows = [[head, "failures", "an hour"]]
    rows += [[histories.text(name), str(n), f"{n / hours:.3g}" if hours else "-"] for name, n in counts]
    return _right(rows, 1, 2)


def _intervals(found: Sequence[Failure], told: Ledger) -> str:
    counts = by_interval(found, told)
    rows = [["from", "to", "failures", "an hour", ""]]
    most = max(n for _, _, n in counts) or 1
    for first, last, n in counts:
        rate = f"{n * 3600 / (last - first):.3g}" if last > first else "-"
        rows.append([took(first), took(last), str(n), rate, "█" * round(BAR * n / most)])
    return _right(rows, 0, 1, 2, 3)


def _reliability(found: Reliability, told: Ledger, plan: Faults | None, cluster: str | None) -> str:
    """What was measured, what Daly's formulas make of that, and what the planner predicts."""
    rows = [["", "measured", "by formula", *([f"planned for {histories.text(cluster)}"] if plan else [])]]

    def row(name: str, measured: str, formula: str = "", planned: str = "") -> None:
        rows.append([name, measured, formula, *([planned] if plan else [])])

    row("mean time between failures", _maybe(found.between), "", took(plan.between) if plan else "")
    row(
        f"  {SURE:.0%} sure",
        f"{_maybe(found.between_least)} to {_maybe(found.between_most)}"
        if found.failures
        else f"over {took(found.between_least)}",
    )
    if found.shape is not None and found.shape_error is not None:
        row("  Weibull shape", f"{found.shape:.2f} ± {found.shape_error:.2f}", "1: memoryless")
    row("last progress to verdict", _maybe(found.noticed))
    row("verdict to first step again", _maybe(found.restart))
    usual = usual_restart(found.failures)
    if usual is not None:
        row("  median", took(usual))
    row("a save stops training for", _maybe(found.write), "", took(plan.copy) if plan else "")
    every = "-" if found.interval_steps is None else f"{found.interval_steps:.3g} steps"
    advised = "-" if found.advised is None else f"{found.advised:,} steps"
    row("checkpoint.every", every, advised, f"{plan.interval_steps:,} steps" if plan and plan.interval_steps else "")
    expected = "-" if found.expected is None else f"{found.expected:.1%}"
    configured = plan.configured_goodput if plan else None
    row("goodput", f"{told.goodput:.1%}", expected, "-" if configured is None else f"{configured:.1%}")
    return f"{columns(rows)}\n{_meaning(found)}"


def _meaning(found: Reliability) -> str:
    """What the fit says, in words."""
    if found.shape is None or found.shape_error is None:
        return f"the formulas take failures to be memoryless; a shape is fitted to {FEWEST} and more"
    if abs(found.shape - 1) <= 2 * found.shape_error:
        return "failures are memoryless as far as can be told, as the formulas take them to be"
    how = "come in bursts" if found.shape < 1 else "come more regularly than chance has it"
    return f"failures {how}, and the formulas, which take them to be memoryless, are only a guide"


def _maybe(seconds: float | None) -> str:
    return "-" if seconds is None else "any" if math.isinf(seconds) else took(seconds)


def _right(rows: Sequence[Sequence[str]], *numbers: int) -> str:
    """Columns as text, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([[cell.rjust(widths[i]) if i in numbers else cell for i, cell in enumerate(row)] for row in rows])
