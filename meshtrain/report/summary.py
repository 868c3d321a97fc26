"""Summarises the facts of a run: healthy or not and why, how fast against what is possible.

Figures and sentences, no layout.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from meshtrain import units
from meshtrain.config import load, short
from meshtrain.config.follow import differences, followed
from meshtrain.report import measured
from meshtrain.report.facts import RunFacts
from meshtrain.report.measured import Bounds, MemoryUse, Speed, TimeShare
from meshtrain.run.directory import GAPS
from meshtrain.survive import history as histories
from meshtrain.survive.detectors import patience
from meshtrain.survive.heartbeat import STEPPING
from meshtrain.survive.reliability import by_kind
from meshtrain.telemetry.thresholds import BY_RULE
from meshtrain.units import duration

RunState = Literal["done", "going on", "stalled", "stopped", "over", "not begun"]
Severity = Literal["good", "note", "bad"]

BUSY = 1800.0  # seconds for which an evaluation, a save or a compilation may last
WAITING = 0.05  # share of the steps' time waiting for data that is worth a word
RISEN = 1.05  # times its least, smoothed, that a loss has risen,
CHANCE = (
    # And times what it differs by chance: the least of hundreds of means lies three such below
    5.0
)
AGAIN = 3  # evaluations in a row without a lower loss that are no chance


@dataclass(frozen=True)
class Reason:
    level: Severity
    sentence: str
    finding: bool = False  # of a diagnosis


@dataclass(frozen=True)
class Summary:
    state: RunState
    step: int
    steps: int | None  # that were asked for
    tokens: float
    loss: float | None  # of the last rows
    loss_begin: float | None
    eval_loss: float | None
    eval_least: float | None
    eval_least_step: int | None
    accuracy: float | None  # of images: the last evaluation's
    reward: float | None  # of the last rows
    # The largest of a token's log-probability between drawing and training
    gap: float | None
    # Evaluations without a lower loss until the run ends; None where it does not end so
    patience_left: int | None
    speed: Speed | None
    bounds: Bounds | None
    wall: tuple[TimeShare, ...]  # where the run's wall time went, as far as it is known
    wall_from: str  # by what
    parts: tuple[TimeShare, ...]  # of a step
    held: tuple[MemoryUse, ...]
    goodput: float | None
    faults: int
    reasons: tuple[Reason, ...]

    @property
    def level(self) -> Severity:
        """The worst of its reasons."""
        levels = {reason.level for reason in self.reasons}
        return "bad" if "bad" in levels else "note" if "note" in levels else "good"

    @property
    def verdict(self) -> str:
        """Healthy or not, in a few words."""
        remarked = (
            "but something was found"
            if any(r.finding for r in self.reasons)
            else "with remarks"
        )
        word = {
            "good": "healthy",
            "note": f"healthy, {remarked}",
            "bad": "not healthy",
        }[self.level]
        if self.state == "not begun":
            return "not begun: no step has been taken"
        if self.state == "done" and self.steps and self.step < self.steps:
            return f"{word}; done, ended by eval.patience after step {self.step:,} of {self.steps:,}"
        if self.state == "done":
            return f"{word}; done, all {self.step:,} steps"
        where = "at" if self.state == "going on" else "after"
        return f"{word}; {self.state}, {where} step {self.step:,}{f' of {self.steps:,}' if self.steps else ''}"

    @property
    def figures(self) -> dict[str, str]:
        """The figures that are known, as they are written, by what they are."""
        speed = self.speed
        values = {
            "reward": loss_text(self.reward),
            "gap": "-" if self.gap is None else f"{self.gap:.2g}",
            "loss": loss_text(self.loss),
            "eval loss": loss_text(self.eval_loss),
            "lowest eval loss": loss_text(self.eval_least),
            "eval accuracy": percent(self.accuracy),
            "a step": units.duration(speed.median) if speed else "-",
            "tokens/s": f"{speed.tokens_per_second:,.0f}" if speed else "-",
            "MFU": percent(speed.mfu) if speed else "-",
            "data wait": percent(speed.waiting) if speed else "-",
            "goodput": percent(self.goodput),
        }
        return {name: value for name, value in values.items() if value != "-"}


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def summarise(facts: RunFacts) -> Summary:
    """Returns the figures and the verdict of a run."""
    columns = facts.steps
    config = facts.config
    steps = config.train.steps if config else None
    best = facts.best
    patience = config.eval.patience if config else 0
    step = int(max(columns.known("step"), default=0))
    loss, evals, accuracies = (
        columns.known(name) for name in ("loss", "eval_loss", "eval_accuracy")
    )
    speed = measured.speed_of(columns)
    state = _state(facts, step, steps, speed)
    wall, wall_from = measured.wall_time(facts)
    held = tuple(measured.most_held(facts))
    return Summary(
        state=state,
        step=step,
        steps=steps,
        tokens=float(measured.tokens_by_row(columns)[-1]) if columns.rows else 0.0,
        loss=_final(loss),
        loss_begin=float(loss[0]) if loss.size else None,
        eval_loss=float(evals[-1]) if evals.size else None,
        eval_least=best.loss if best.step is not None else None,
        eval_least_step=best.step,
        accuracy=float(accuracies[-1]) if accuracies.size else None,
        reward=_final(columns.known("rl/reward")),
        gap=max(columns.known("rl/gap_max").tolist(), default=None),
        patience_left=max(patience - best.since, 0) if patience else None,
        speed=speed,
        bounds=measured.bounds_of(facts.plan) if facts.plan else None,
        wall=wall,
        wall_from=wall_from,
        parts=measured.host_parts(columns),
        held=held,
        goodput=facts.survived.ledger.goodput if facts.survived else None,
        faults=len(facts.survived.reliability.failures) if facts.survived else 0,
        reasons=tuple(_reasons(facts, state, speed, held, loss)),
    )


def _state(
    facts: RunFacts, step: int, steps: int | None, speed: Speed | None
) -> RunState:
    if (
        facts.config is not None
        and facts.best.ends(facts.config.eval.patience)
        and facts.best.last == step
    ):
        return "done"
    history = facts.survived.history if facts.survived else None
    if steps and step >= steps:
        return "done"
    if history and history.over:
        return "over"
    going = facts.in_use or bool(history)
    silent = facts.now - facts.written if facts.written is not None else 0.0
    if facts.in_use is None and facts.written is not None:
        going = silent < _patience(facts, speed)
    if not step:
        return "going on" if going else "not begun"
    if not going:
        return "stopped"
    return "stalled" if silent > _patience(facts, speed) else "going on"


def _patience(facts: RunFacts, speed: Speed | None) -> float:
    """Seconds without a row that a run that goes on may need."""
    newest = facts.samples.get(0)
    if newest is not None and newest.rows:
        phases = {
            name.split(".", 1)[1]: float(newest[name][-1])
            for name in newest.names("phase_seconds.")
        }
        spent = {
            name: seconds for name, seconds in phases.items() if math.isfinite(seconds)
        }
        # By its newest sample it was at something that no row tells of.
        if spent and max(spent, key=spent.__getitem__) not in STEPPING:
            return BUSY
    if speed is None:
        return BUSY
    every = facts.config.log.every if facts.config else 1
    return patience(speed.median * every)


def firing(facts: RunFacts) -> list[tuple[str, str, str]]:
    """Returns (rule, severity, sentence) of the alerts that have not been cleared, the newest of each rule and rank."""
    newest: dict[tuple[str, str], Any] = {}
    for alert in facts.alerts:
        newest[str(alert.get("rule")), str(alert.get("rank"))] = alert
    return [
        (
            histories.text(a.get("rule")),
            histories.text(a.get("severity")),
            histories.text(a.get("sentence")),
        )
        for a in newest.values()
        if a.get("state") == "firing"
    ]


def alerts_by_rule(facts: RunFacts) -> list[tuple[str, int]]:
    """Returns how often each rule began to fire, the most frequent first."""
    return Counter(
        histories.text(a.get("rule"))
        for a in facts.alerts
        if a.get("state") == "firing"
    ).most_common()


def _reasons(
    facts: RunFacts,
    state: RunState,
    speed: Speed | None,
    held: Sequence[MemoryUse],
    loss: np.ndarray,
) -> Iterator[Reason]:
    if n := facts.steps.not_finite.get("loss"):
        yield Reason(
            "bad", f"the loss was not finite in {n:,} row{'' if n == 1 else 's'}."
        )
    yield from _reasons_of_state(facts, state)
    yield from _reasons_of_alerts(facts, state)
    yield from _risen_losses(facts, loss)
    yield from _reasons_of_steps(facts, speed, held)
    if damaged := [c.name for c in facts.checkpoints if c.problem]:
        yield Reason(
            "note",
            f"checkpoint {', '.join(damaged[:5])} cannot be gone on from: see checkpoint verify.",
        )
    if facts.survived and (failures := facts.survived.reliability.failures):
        kinds = ", ".join(f"{n} × {kind}" for kind, n in by_kind(failures))
        lost = (
            facts.survived.ledger.seconds["lost"]
            + facts.survived.ledger.seconds["down"]
        )
        many = (
            f"{len(failures)} {'fault' if len(failures) == 1 else 'faults'} ({kinds})"
        )
        yield Reason(
            "note",
            f"{many}; {duration(lost)} lost to work done again and time without a process.",
        )
    for finding in facts.findings or ():
        sentence = histories.text(finding.get("sentence"))
        if sentence and histories.text(finding.get("name")) != "none":
            share = histories.number(finding.get("severity"))
            worth = f" (worth {share:.0%} of a step)" if share else ""
            yield Reason("note", f"{sentence.rstrip('.')}{worth}.", finding=True)


def _reasons_of_state(facts: RunFacts, state: RunState) -> Iterator[Reason]:
    if state == "stalled" and facts.written is not None:
        age = duration(facts.now - facts.written)
        yield Reason(
            "bad",
            f"no row has come for {age}, and yet a process holds the directory: the run may hang.",
        )
    if state == "stopped":
        yield Reason(
            "note", "no process is at work on it; run the same command again to go on."
        )
    if facts.disagreed is not None and facts.disagreed > facts.steps.known("step").max(
        initial=0.0
    ):
        yield Reason(
            "bad",
            f"step {facts.disagreed:,} was not taken: drawing and training disagreed, and the rows are in "
            f"{GAPS}/{facts.disagreed}.npz.",
        )
    for restart in facts.survived.history.plans[-1:] if facts.survived else []:
        if restart.state == "over" and restart.code not in (0, 75):
            yield Reason(
                "bad", f"its supervisors gave it up: {histories.text(restart.reason)}."
            )


def _reasons_of_alerts(facts: RunFacts, state: RunState) -> Iterator[Reason]:
    # An alert of a run that is over says what its last moment was.
    for rule, severity, sentence in firing(facts):
        level: Severity = (
            "bad"
            if severity in ("critical", "error") and state in ("going on", "stalled")
            else "note"
        )
        yield Reason(
            level,
            f"alert {rule}: {sentence or 'it fires'}{'' if sentence.endswith('.') else '.'}",
        )


def _reasons_of_steps(
    facts: RunFacts, speed: Speed | None, held: Sequence[MemoryUse]
) -> Iterator[Reason]:
    if (skipped := facts.steps.known("skipped")).size and skipped.max() >= 1:
        yield Reason(
            "note",
            f"float16: {int(skipped.max()):,} steps were skipped since their gradient overflowed.",
        )
    if speed and speed.waiting is not None and speed.waiting > WAITING:
        waiting = f"{speed.waiting:.0%} of the steps' time is waiting for data"
        yield Reason("note", f"{waiting}: data.prefetch, or a faster source.")
    for use in held:
        if use.limit and use.used > BY_RULE[use.rule].fires * use.limit:
            yield Reason(
                "note",
                f"{use.what} holds {use.used / use.limit:.0%} of its memory's limit.",
            )


def _risen_losses(facts: RunFacts, loss: np.ndarray) -> Iterator[Reason]:
    few = _last_few(loss)
    # The loss of a policy is about 0 at any reward.
    if loss.size >= 40 and facts.steps.known("rl/answer_tokens").size == 0:
        smooth = np.convolve(loss, np.full(few, 1 / few), "valid")
        least = float(smooth.min())
        last = float(smooth[-1])
        # By how much a mean of so few rows differs by chance: neighbours differ by the noise of two.
        noise = float(np.std(np.diff(loss))) / math.sqrt(2 * few)
        if last > RISEN * least > 0 and last - least > CHANCE * noise:
            yield Reason(
                "note", f"the loss has risen from {least:.4g} to {last:.4g} since."
            )
    best = facts.best
    evals = facts.steps.known("eval_loss")
    if best.since >= AGAIN and evals.size and evals[-1] > RISEN * best.loss > 0:
        yield Reason(
            "note",
            f"the loss of validation text was lowest after step {best.step:,}, {best.loss:.4g}, and is "
            f"{evals[-1]:.4g}, {best.since} evaluations "
            "later: the run may learn its training text by heart.",
        )


def _final(values: np.ndarray) -> float | None:
    """Returns the mean of the last values, if there are any."""
    return float(np.mean(values[-_last_few(values) :])) if values.size else None


def _last_few(values: np.ndarray) -> int:
    """Returns how many rows the final figures average."""
    return max(1, min(100, values.size // 20))


def settings(facts: RunFacts) -> list[tuple[str, Any]]:
    """Returns the keys of the config that are neither at their default nor follow from others."""
    config = facts.config
    if config is None:
        return []
    changed = differences(asdict(load(None)), asdict(config))
    return [
        (path, now)
        for path, _, now in changed
        if path != "run.directory" and not followed(config, path)
    ]


def setting_text(value: object) -> str:
    """Returns a value of the config as a report shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return short(
        ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    )


def to_json(facts: RunFacts, summary: Summary) -> dict[str, Any]:
    """Returns the summary for programs. Seconds, bytes, tokens; what is not known is null or left out."""
    content = asdict(summary) | {
        "run": str(facts.directory),
        "verdict": summary.verdict,
        "level": summary.level,
    }
    if summary.bounds:
        content["bounds"] |= {
            "roof": summary.bounds.roof,
            "bound_by": summary.bounds.bound,
        }
    content["plan"] = facts.plan.as_json() if facts.plan else None
    content["checkpoints"] = [asdict(c) for c in facts.checkpoints]
    content["alerts"] = {
        "by_rule": dict(alerts_by_rule(facts)),
        "firing": [list(a) for a in firing(facts)],
    }
    content["findings"] = None if facts.findings is None else list(facts.findings)
    content["diagnosis"] = dict(facts.diagnosis) or None
    content["config"] = dict(settings(facts))
    content["ranks"] = facts.ranks
    content["torn"] = facts.torn
    content["notes"] = list(facts.notes)
    return histories.plain(content)
