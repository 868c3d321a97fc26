"""What follows from the facts of a run: healthy or not, how fast against what is possible, where the time went. Figures, no layout."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshtrain.config import load
from meshtrain.config.follow import differences, followed
from meshtrain.report.facts import Facts
from meshtrain.report.measured import (
    Bounds,
    Held,
    Speed,
    Spent,
    bounds_of,
    most_held,
    on_host,
    speed_of,
    tokens_by_row,
    wall_time,
)
from meshtrain.report.verdict import Level, Reason, State, alerts_by_rule, firing, last_few, reasons, state_of


@dataclass(frozen=True)
class Summary:
    state: State
    step: int
    steps: int | None  # that were asked for
    tokens: float
    loss: float | None  # of the last rows
    loss_begin: float | None
    eval_loss: float | None
    eval_least: float | None
    eval_least_step: int | None
    accuracy: float | None  # of images: the last evaluation's
    patience_left: int | None  # evaluations without a lower loss until the run ends; none where it does not end so
    speed: Speed | None
    bounds: Bounds | None
    wall: tuple[Spent, ...]  # where the run's wall time went, as far as it is known
    wall_from: str  # by what
    parts: tuple[Spent, ...]  # of a step
    held: tuple[Held, ...]
    goodput: float | None
    faults: int
    reasons: tuple[Reason, ...]

    @property
    def level(self) -> Level:
        """The worst of its reasons."""
        levels = {reason.level for reason in self.reasons}
        return "bad" if "bad" in levels else "note" if "note" in levels else "good"

    @property
    def verdict(self) -> str:
        """Healthy or not, in a few words."""
        remarked = "but something was found" if any(r.finding for r in self.reasons) else "with remarks"
        word = {"good": "healthy", "note": f"healthy, {remarked}", "bad": "not healthy"}[self.level]
        if self.state == "not begun":
            return "not begun: no step has been taken"
        if self.state == "done" and self.steps and self.step < self.steps:
            return f"{word}; done, ended by eval.patience after step {self.step:,} of {self.steps:,}"
        if self.state == "done":
            return f"{word}; done, all {self.step:,} steps"
        where = "at" if self.state == "going on" else "after"
        return f"{word}; {self.state}, {where} step {self.step:,}{f' of {self.steps:,}' if self.steps else ''}"


def summarise(facts: Facts) -> Summary:
    """The figures and the verdict of a run."""
    columns, config = facts.steps, facts.config
    steps = config.train.steps if config else _whole(facts.values.get("train", {}).get("steps"))
    best, patience = facts.best, config.eval.patience if config else 0
    step = int(max(columns.known("step"), default=0))
    loss, evals, accuracies = (columns.known(name) for name in ("loss", "eval_loss", "eval_accuracy"))
    told = facts.survived.ledger if facts.survived else None
    speed = speed_of(columns, facts.plan)
    state = state_of(facts, step, steps, speed)
    wall, wall_from = wall_time(facts)
    return Summary(
        state=state,
        step=step,
        steps=steps,
        tokens=float(tokens_by_row(columns)[-1]) if columns.rows else 0.0,
        loss=float(np.mean(loss[-last_few(loss) :])) if loss.size else None,
        loss_begin=float(loss[0]) if loss.size else None,
        eval_loss=float(evals[-1]) if evals.size else None,
        eval_least=best.loss if best.step is not None else None,
        eval_least_step=best.step,
        accuracy=float(accuracies[-1]) if accuracies.size else None,
        patience_left=max(patience - best.since, 0) if patience else None,
        speed=speed,
        bounds=bounds_of(facts.plan) if facts.plan else None,
        wall=wall,
        wall_from=wall_from,
        parts=on_host(columns),
        held=tuple(most_held(facts)),
        goodput=told.goodput if told else None,
        faults=len(facts.survived.reliability.failures) if facts.survived else 0,
        reasons=tuple(reasons(facts, state, speed, loss)),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def settings(facts: Facts) -> list[tuple[str, Any]]:
    """The keys of the config that are neither at their default nor follow from others."""
    if facts.config is None:
        return []
    found = differences(asdict(load(None)), asdict(facts.config))
    return [(path, now) for path, _, now in found if path != "run.directory" and not followed(facts.config, path)]


def to_json(facts: Facts, summary: Summary) -> dict[str, Any]:
    """The same for programs. Seconds, bytes, tokens; what is not known is null or left out."""
    found = asdict(summary) | {"run": str(facts.directory), "verdict": summary.verdict, "level": summary.level}
    if summary.bounds:
        found["bounds"] |= {"roof": summary.bounds.roof, "bound_by": summary.bounds.bound}
    found["plan"] = facts.plan.as_json() if facts.plan else None
    found["checkpoints"] = [asdict(c) for c in facts.checkpoints]
    found["alerts"] = {"by_rule": dict(alerts_by_rule(facts)), "firing": [list(a) for a in firing(facts)]}
    found["findings"] = None if facts.findings is None else list(facts.findings)
    found["diagnosis"] = dict(facts.diagnosis) or None
    found["config"] = dict(settings(facts))
    found["ranks"], found["torn"], found["notes"] = facts.ranks, facts.torn, list(facts.notes)
    return plain(found)


def plain(value: Any) -> Any:
    """What JSON has a word for: an infinite or undefined number is none."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
