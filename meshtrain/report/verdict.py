"""Healthy or not: in which state a run is, and the reasons for a verdict."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from meshtrain.report.facts import Facts
from meshtrain.report.measured import Speed, most_held
from meshtrain.survive import history as histories
from meshtrain.survive.beat import HOST
from meshtrain.survive.life import took
from meshtrain.survive.reliability import by_kind
from meshtrain.telemetry.progress import duration

State = Literal["done", "going on", "stalled", "stopped", "over", "not begun"]
Level = Literal["good", "note", "bad"]

PATIENCE, PATIENT_STEPS = 60.0, 20  # seconds, and typical steps, for which no row of a run that goes on says nothing
BUSY = 1800.0  # seconds for which an evaluation, a save or a compilation may last
WAITING = 0.05  # share of the steps' time waiting for data that is worth a word
NEAR = 0.95  # share of a memory's limit that is near it
RISEN = 1.05  # times its least, smoothed, that a loss has risen,
CHANCE = 5.0  # and times what it differs by chance: the least of hundreds of means lies three such below
AGAIN = 3  # evaluations in a row without a lower loss that are no chance


@dataclass(frozen=True)
class Reason:
    level: Level
    sentence: str
    finding: bool = False  # of a diagnosis


def state_of(facts: Facts, step: int, steps: int | None, speed: Speed | None) -> State:
    if facts.config is not None and facts.best.ends(facts.config.eval.patience) and facts.best.last == step:
        return "done"
    history = facts.survived.history if facts.survived else None
    if history and history.over:
        return "done" if steps and step >= steps else "over"
    if steps and step >= steps:
        return "done"
    going = facts.in_use or bool(history)
    if facts.in_use is None and facts.written is not None:
        going = facts.now - facts.written < _patience(facts, speed)
    if not step:
        return "going on" if going else "not begun"
    if not going:
        return "stopped"
    silent = facts.now - facts.written if facts.written is not None else 0.0
    return "stalled" if silent > _patience(facts, speed) else "going on"


def _patience(facts: Facts, speed: Speed | None) -> float:
    """Seconds without a row that a run that goes on may need."""
    newest = facts.samples.get(0)
    if newest is not None and newest.rows:
        phases = {name.split(".", 1)[1]: newest[name][-1] for name in newest.names("phase_seconds.")}
        spent = {name: float(seconds) for name, seconds in phases.items() if math.isfinite(seconds)}
        # By its newest sample it was at something that no row tells of.
        if spent and max(spent, key=spent.__getitem__) not in (*HOST, "wait"):
            return BUSY
    return max(PATIENCE, PATIENT_STEPS * speed.median) if speed else BUSY


def firing(facts: Facts) -> list[tuple[str, str, str]]:
    """(rule, severity, sentence) of the alerts that have not been cleared, the newest word of each rule and rank."""
    newest: dict[tuple[str, str], Any] = {}
    for alert in facts.alerts:
        newest[str(alert.get("rule")), str(alert.get("rank"))] = alert
    return [
        (histories.text(a.get("rule")), histories.text(a.get("severity")), histories.text(a.get("sentence")))
        for a in newest.values()
        if a.get("state") == "firing"
    ]


def alerts_by_rule(facts: Facts) -> list[tuple[str, int]]:
    """How often each rule began to fire, the most frequent first."""
    return Counter(histories.text(a.get("rule")) for a in facts.alerts if a.get("state") == "firing").most_common()


def reasons(facts: Facts, state: State, speed: Speed | None, loss: np.ndarray) -> Iterator[Reason]:
    columns = facts.steps
    if n := columns.not_finite.get("loss"):
        yield Reason("bad", f"the loss was not finite in {n:,} row{'' if n == 1 else 's'}.")
    if state == "stalled" and facts.written is not None:
        age = duration(facts.now - facts.written)
        yield Reason("bad", f"no row has come for {age}, and yet a process holds the directory: the run may hang.")
    if state == "stopped":
        yield Reason("note", "no process is at work on it; run the same command again to go on.")
    over = [p for p in facts.survived.history.plans[-1:] if p.state == "over"] if facts.survived else []
    for plan in over:
        if plan.code not in (0, 75):
            yield Reason("bad", f"its supervisors gave it up: {histories.text(plan.reason)}.")
    # An alert of a run that is over says what its last moment was.
    for rule, severity, sentence in firing(facts):
        level: Level = "bad" if severity in ("critical", "error") and state in ("going on", "stalled") else "note"
        yield Reason(level, f"alert {rule}: {sentence or 'it fires'}{'' if sentence.endswith('.') else '.'}")
    yield from _of_loss(loss)
    yield from _of_held_out(facts)
    if skipped := columns.known("skipped").size and int(columns.known("skipped").max()):
        yield Reason("note", f"float16: {skipped:,} steps were skipped since their gradient overflowed.")
    if speed and speed.waiting is not None and speed.waiting > WAITING:
        yield Reason(
            "note", f"{speed.waiting:.0%} of the steps' time is waiting for data: data.prefetch, or a faster source."
        )
    for held in most_held(facts):
        if held.limit and held.used > NEAR * held.limit:
            yield Reason("note", f"{held.what} holds {held.used / held.limit:.0%} of its memory's limit.")
    if damaged := [c.name for c in facts.checkpoints if c.problem]:
        yield Reason("note", f"checkpoint {', '.join(damaged[:5])} cannot be gone on from: see checkpoint verify.")
    if facts.survived and (found := facts.survived.reliability.failures):
        kinds = ", ".join(f"{n} × {kind}" for kind, n in by_kind(found))
        lost = facts.survived.ledger.seconds["lost"] + facts.survived.ledger.seconds["down"]
        many = "fault" if len(found) == 1 else "faults"
        yield Reason(
            "note", f"{len(found)} {many} ({kinds}); {took(lost)} lost to work done again and time without a process."
        )
    for finding in facts.findings or ():
        if sentence := histories.text(finding.get("sentence")):
            share = histories.number(finding.get("severity"))
            name = histories.text(finding.get("name"))
            if name != "none":
                worth = f" (worth {share:.0%} of a step)" if share else ""
                yield Reason("note", f"{sentence.rstrip('.')}{worth}.", finding=True)


def _of_loss(loss: np.ndarray) -> Iterator[Reason]:
    few = last_few(loss)
    if loss.size < 40:
        return
    smooth = np.convolve(loss, np.full(few, 1 / few), "valid")
    least = int(np.argmin(smooth))
    # By how much a mean of so few rows differs by chance: neighbours differ by the noise of two.
    noise = float(np.std(np.diff(loss))) / math.sqrt(2 * few)
    if smooth[-1] > RISEN * smooth[least] and smooth[least] > 0 and smooth[-1] - smooth[least] > CHANCE * noise:
        yield Reason("note", f"the loss has risen from {smooth[least]:.4g} to {smooth[-1]:.4g} since.")


def _of_held_out(facts: Facts) -> Iterator[Reason]:
    best, evals = facts.best, facts.steps.known("eval_loss")
    if best.since >= AGAIN and evals.size and evals[-1] > RISEN * best.loss > 0:
        yield Reason(
            "note",
            f"the loss of held-out text was lowest after step {best.step:,}, {best.loss:.4g}, and is {evals[-1]:.4g}, {best.since} evaluations "
            "later: the run may learn its training text by heart.",
        )


def last_few(values: np.ndarray) -> int:
    """How many rows a figure at the end is a mean of."""
    return max(1, min(100, values.size // 20))
