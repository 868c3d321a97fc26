"""The report of a run for a terminal: the answer first, then a few lines for each of its reasons; and words that the page shares."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from meshtrain import units
from meshtrain.config import short
from meshtrain.draw.picture import columns
from meshtrain.report.facts import CheckpointFacts, RunFacts
from meshtrain.report.measured import Bounds, MemoryUse, Speed, StepPart, TimeShare, step_parts
from meshtrain.report.summary import Summary, alerts_by_rule, firing, loss_text, settings
from meshtrain.survive.stats import timeline

BAR = 30  # letters of the longest bar
LETTERS = "▁▂▃▄▅▆▇█"
LEAST_SHARE = 0.0005  # of a time that is shown
MOST_CHECKPOINTS = 6  # the newest


def sparkline(values: np.ndarray, width: int = 40) -> str:
    """Returns values as letters of rising height: means of `width` equal stretches; what is not finite is a blank."""
    values = np.asarray(values, float)
    if not values.size:
        return ""
    edges = np.linspace(0, values.size, min(width, values.size) + 1).astype(int)
    stretches = (values[first:last] for first, last in pairwise(edges))
    finite = [stretch[np.isfinite(stretch)] for stretch in stretches]
    means = np.array([stretch.mean() if stretch.size else np.nan for stretch in finite])
    known = np.isfinite(means)
    if not known.any():
        return " " * len(means)
    low, high = means[known].min(), means[known].max()
    scaled = (means - low) / ((high - low) or 1.0) * (len(LETTERS) - 1)
    return "".join(LETTERS[round(x)] if ok else " " for x, ok in zip(scaled, known, strict=True))


def title(facts: RunFacts) -> str:
    """Returns what ran, in a line."""
    if facts.config is None:
        return short(facts.name)
    config, mesh = facts.config, facts.config.mesh
    parameters = f"{units.count(facts.plan.parameters)} parameters" if facts.plan else "unknown size"
    return (
        f"{short(facts.name)}: {config.model.family}, {parameters}, {mesh}, "
        f"{config.train.global_batch_size} x {config.train.sequence_length} tokens a step"
    )


def render(facts: RunFacts, summary: Summary, diagnosis: str = "") -> str:
    """Returns the whole of it; with the words of a diagnosis that was just made, in place of the findings of an earlier one."""
    reasons = [r for r in summary.reasons if not (diagnosis and r.finding)]
    changed = ", ".join(f"{path} {short(value)}" for path, value in settings(facts))
    parts = [
        f"{summary.verdict}\n{title(facts)}",
        "\n".join(f"{'!' if r.level == 'bad' else '·'} {r.sentence}" for r in reasons),
        diagnosis.rstrip(),
        "\n".join(_losses(facts, summary)),
        "\n".join(_speed(facts, summary)),
        _times(f"where the run's time went, by {summary.wall_from}", summary.wall),
        _times("a step on the host", summary.parts),
        "" if diagnosis else _traced(facts),
        _memory(facts, summary),
        "\n".join(_survived(facts)),
        f"alerts {alert_counts(facts) or 'none began'}; {len(firing(facts)) or 'none'} still firing" if facts.alerts else "",
        _checkpoints(facts),
        f"config {changed}" if changed else "",
        "\n".join(f"note: {note}" for note in facts.notes),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _losses(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if summary.loss is None or summary.loss_begin is None:
        return
    yield f"loss   {summary.loss_begin:.4f} → {summary.loss:.4f}  {sparkline(facts.steps['loss'])}"
    if summary.eval_loss is not None:
        yield f"eval   {_eval_losses(summary)}  {sparkline(facts.steps.known('eval_loss'))}"
    if summary.accuracy is not None:
        accuracies = facts.steps.known("eval_accuracy")
        most = f"{summary.accuracy:.1%} of validation images, at most {accuracies.max():.1%}"
        yield f"right  {most}  {sparkline(accuracies)}"
    rates = facts.steps.known("learning_rate")
    if rates.any():
        yield f"rate   {rates[-1]:.4g}, at most {rates.max():.4g}  {sparkline(rates)}"
    yield f"tokens {units.count(summary.tokens)}"


def _eval_losses(summary: Summary) -> str:
    if summary.eval_least is None or summary.eval_loss is None:
        return "-"
    words = f"{summary.eval_loss:.4f}, lowest {summary.eval_least:.4f} after step {summary.eval_least_step:,}"
    if summary.patience_left is None or summary.state == "done":
        return words
    more = "evaluation" if summary.patience_left == 1 else "evaluations"
    return f"{words}, ends after {summary.patience_left} more {more} without a lower one"


def _speed(facts: RunFacts, summary: Summary) -> Iterator[str]:
    speed, bounds = summary.speed, summary.bounds
    if speed is None:
        return
    yield f"speed  {how_fast(speed)}"
    if bounds and facts.plan:
        yield f"       {against(speed, bounds, facts.plan.cluster.name)}"
        rows = [
            [f"  {name}", units.duration(seconds), f"{bounds.compute / seconds:.1%}"]
            for name, seconds in ladder(speed, bounds)
        ]
        yield columns([["", "a step", "MFU"], *rows], "       ")


def how_fast(speed: Speed) -> str:
    words = (
        f"{units.duration(speed.median)} a step ({units.duration(speed.p10)} to {units.duration(speed.p90)} for 8 of 10), "
        f"{speed.tokens_per_second:,.0f} tokens/s"
    )
    return words if speed.mfu is None else f"{words}, MFU {speed.mfu:.1%}"


def against(speed: Speed, bounds: Bounds, cluster: str) -> str:
    """Returns the speed beside the plan, in a sentence."""
    times = speed.median / bounds.planned
    how = f"{times:.2f} times the planned step" if times >= 1 else f"{1 / times:.2f} times as fast as planned"
    return f"{how} on {cluster}; the roofline there, bound by {bounds.bound}, is {units.duration(bounds.roof)}"


def ladder(speed: Speed, bounds: Bounds) -> list[tuple[str, float]]:
    """Returns the seconds of a step that are possible, from the peak of the devices down to those that were measured."""
    steps = [("compute at the peak", bounds.compute)]
    if bounds.bound != "compute":
        steps.append((f"roofline, bound by {bounds.bound}", bounds.roof))
    return [*steps, ("planned", bounds.planned), ("measured", speed.median)]


def _times(head: str, spent: Sequence[TimeShare]) -> str:
    spent = [part for part in spent if part.share >= LEAST_SHARE]
    top = max((part.share for part in spent), default=0.0)
    rows = []
    for part in spent:
        bar = "█" * max(round(BAR * part.share / top), 1)
        rows.append([f"  {part.name}", units.duration(part.seconds), f"{part.share:.1%}", bar])
    return f"{head}\n{columns(rows)}" if rows else ""


def _traced(facts: RunFacts) -> str:
    rows = []
    for part in step_parts(facts):
        measured, planned = measured_and_planned(part)
        rows.append([f"  {part.name}", *measured, *planned])
    return columns([["a step, by a trace", "measured", "", "planned", ""], *rows]) if rows else ""


def measured_and_planned(part: StepPart) -> list[tuple[str, str]]:
    """Returns the seconds of a part and their share of a step, where they are known; then those that were planned."""
    return [
        ("-" if seconds is None else units.duration(seconds) if seconds else "0", "" if share is None else f"{share:.0%}")
        for seconds, share in ((part.seconds, part.share), (part.planned, part.planned_share))
    ]  # fmt: skip


def sizes(use: MemoryUse) -> list[str]:
    """Returns the bytes in use, and their limit where there is one."""
    return [units.size(use.used), *([units.size(use.limit)] if use.limit else [])]


def _memory(facts: RunFacts, summary: Summary) -> str:
    uses = list(summary.held)
    if facts.plan:
        usable = facts.plan.cluster.accelerator.usable_bytes
        uses.append(MemoryUse("a device, as planned", facts.plan.bytes, usable))
    rows = []
    for use in uses:
        used, *limit = sizes(use)
        rows.append([f"  {use.what}", used, f"of {limit[0]}" if limit else ""])
    return f"memory, at most\n{columns(rows)}" if rows else ""


def _survived(facts: RunFacts) -> Iterator[str]:
    if facts.survived is not None:
        ledger = facts.survived.ledger
        yield f"goodput {ledger.goodput:.1%}, effective {ledger.effective:.1%}; survive stats says more"
        yield from (f"  {line}" for line in timeline(facts.survived.history, ledger, 78))


def alert_counts(facts: RunFacts) -> str:
    return ", ".join(f"{n} × {rule}" for rule, n in alerts_by_rule(facts))


def _checkpoints(facts: RunFacts) -> str:
    rows = [
        [f"  {c.name}", c.problem or c.saved.replace("+00:00", "Z"), *(["", "", ""] if c.problem else checkpoint_figures(c))]
        for c in facts.checkpoints[-MOST_CHECKPOINTS:]
    ]  # fmt: skip
    return columns([["  checkpoint", "saved", "loss", "eval loss", "size"], *rows]) if rows else ""


def checkpoint_figures(checkpoint: CheckpointFacts) -> tuple[str, str, str]:
    """Returns its loss, its eval loss and its size."""
    size = "-" if checkpoint.nbytes is None else units.size(checkpoint.nbytes)
    return loss_text(checkpoint.loss), loss_text(checkpoint.eval_loss) + (" best" if checkpoint.best else ""), size
