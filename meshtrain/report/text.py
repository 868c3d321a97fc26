"""The report of a run for a terminal: the answer first, then a few lines for each of its reasons."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from meshtrain.config import short
from meshtrain.pictures.picture import columns
from meshtrain.plan import report
from meshtrain.report.facts import Checkpoint, Facts
from meshtrain.report.measured import Bounds, Speed, Spent, parts
from meshtrain.report.summary import Summary, settings
from meshtrain.report.verdict import alerts_by_rule, firing
from meshtrain.survive import life
from meshtrain.telemetry.progress import duration

BAR = 30  # letters of the longest bar
LETTERS = "▁▂▃▄▅▆▇█"
LEAST_SHARE = 0.0005  # of a time that is shown
MOST_CHECKPOINTS = 6  # the newest


def sparkline(values: np.ndarray, width: int = 40) -> str:
    """Values as letters of rising height: means of `width` equal stretches; what is not finite is a blank."""
    values = np.asarray(values, float)
    if not values.size:
        return ""
    edges = np.linspace(0, values.size, min(width, values.size) + 1).astype(int)
    means = []
    for first, last in pairwise(edges):
        part = values[first:last][np.isfinite(values[first:last])]
        means.append(part.mean() if part.size else np.nan)
    found = np.array(means)
    good = np.isfinite(found)
    if not good.any():
        return " " * len(found)
    low, high = found[good].min(), found[good].max()
    scaled = (found - low) / ((high - low) or 1.0) * (len(LETTERS) - 1)
    return "".join(LETTERS[round(x)] if ok else " " for x, ok in zip(scaled, good, strict=True))


def title(facts: Facts) -> str:
    """What ran, in a line."""
    if facts.config is None:
        return short(facts.name)
    config, mesh = facts.config, facts.config.mesh
    many = f"{report.count(facts.plan.parameters)} parameters" if facts.plan else "unknown size"
    return (
        f"{short(facts.name)}: {config.model.family}, {many}, {mesh}, "
        f"{config.train.global_batch_size} x {config.train.sequence_length} tokens a step"
    )


def render(facts: Facts, summary: Summary, diagnosis: str = "") -> str:
    """The whole of it; with what a diagnosis that was just made says, in place of the findings of an earlier one."""
    reasons = [r for r in summary.reasons if not (diagnosis and r.finding)]
    parts = [
        f"{summary.verdict}\n{title(facts)}",
        "\n".join(f"{'!' if r.level == 'bad' else '·'} {r.sentence}" for r in reasons),
        diagnosis.rstrip(),
        "\n".join(_losses(facts, summary)),
        "\n".join(speed_lines(facts, summary)),
        _times(f"where the run's time went, by {summary.wall_from}", summary.wall),
        _times("a step on the host", summary.parts),
        "" if diagnosis else _parts(facts),
        _memory(facts, summary),
        "\n".join(_survived(facts)),
        _alerts(facts),
        _checkpoints(facts),
        _settings(facts),
        "\n".join(f"note: {note}" for note in facts.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _losses(facts: Facts, summary: Summary) -> Iterator[str]:
    if summary.loss is None or summary.loss_begin is None:
        return
    yield f"loss   {summary.loss_begin:.4f} → {summary.loss:.4f}  {sparkline(facts.steps['loss'])}"
    if summary.eval_loss is not None:
        yield f"eval   {held_out(summary)}  {sparkline(facts.steps.known('eval_loss'))}"
    if summary.accuracy is not None:
        found = facts.steps.known("eval_accuracy")
        yield f"right  {summary.accuracy:.1%} of held-out images, at most {found.max():.1%}  {sparkline(found)}"
    rates = facts.steps.known("learning_rate")
    if rates.any():
        yield f"rate   {rates[-1]:.4g}, at most {rates.max():.4g}  {sparkline(rates)}"
    yield f"tokens {report.count(summary.tokens)}"


def held_out(summary: Summary) -> str:
    """The losses of held-out text, in words."""
    if summary.eval_least is None or summary.eval_loss is None:
        return "-"
    said = f"{summary.eval_loss:.4f}, lowest {summary.eval_least:.4f} after step {summary.eval_least_step:,}"
    if summary.patience_left is None or summary.state == "done":
        return said
    more = "evaluation" if summary.patience_left == 1 else "evaluations"
    return f"{said}, ends after {summary.patience_left} more {more} without a lower one"


def speed_lines(facts: Facts, summary: Summary) -> Iterator[str]:
    """How fast, against what is possible."""
    speed, bounds = summary.speed, summary.bounds
    if speed is None:
        return
    yield f"speed  {how_fast(speed)}"
    if bounds and facts.plan:
        yield f"       {against(speed, bounds, facts.plan.cluster.name)}"
        rows = [["", "a step", "MFU"]]
        for name, seconds in ladder(speed, bounds):
            share = bounds.compute / seconds
            rows.append([f"  {name}", report.duration(seconds), f"{share:.1%}"])
        yield columns(rows, "       ")


def how_fast(speed: Speed) -> str:
    found = (
        f"{report.duration(speed.median)} a step ({report.duration(speed.p10)} to {report.duration(speed.p90)} for 8 of 10), "
        f"{speed.tokens_per_second:,.0f} tokens/s"
    )
    return found if speed.mfu is None else f"{found}, MFU {speed.mfu:.1%}"


def against(speed: Speed, bounds: Bounds, cluster: str) -> str:
    """Held against the plan, in a sentence."""
    times = speed.median / bounds.planned
    how = f"{times:.2f} times the planned step" if times >= 1 else f"{1 / times:.2f} times as fast as planned"
    return f"{how} on {cluster}; the roofline there, bound by {bounds.bound}, is {report.duration(bounds.roof)}"


def ladder(speed: Speed, bounds: Bounds) -> list[tuple[str, float]]:
    """What is possible, from the peak down to what is."""
    found = [("compute at the peak", bounds.compute)]
    if bounds.bound != "compute":
        found.append((f"roofline, bound by {bounds.bound}", bounds.roof))
    return [*found, ("planned", bounds.planned), ("measured", speed.median)]


def _times(head: str, spent: Sequence[Spent]) -> str:
    spent = [part for part in spent if part.share >= LEAST_SHARE]
    if not spent:
        return ""
    top = max(part.share for part in spent)
    rows = [
        [
            f"  {part.name}",
            report.duration(part.seconds),
            f"{part.share:.1%}",
            "█" * max(round(BAR * part.share / top), 1),
        ]
        for part in spent
    ]
    return f"{head}\n{columns(rows)}"


def _parts(facts: Facts) -> str:
    """Where a step's time went by a trace, beside the plan."""
    found = parts(facts)
    rows = [[f"  {p.name}", *shared(p.seconds, p.share), *shared(p.planned, p.planned_share)] for p in found]
    return columns([["a step, by a trace", "measured", "", "planned", ""], *rows]) if rows else ""


def shared(seconds: float | None, share: float | None) -> tuple[str, str]:
    """Seconds and their share of a step, where they are known."""
    return ("-" if seconds is None else report.duration(seconds) if seconds else "0"), (
        "" if share is None else f"{share:.0%}"
    )


def _memory(facts: Facts, summary: Summary) -> str:
    rows = [
        [f"  {held.what}", report.size(held.used), f"of {report.size(held.limit)}" if held.limit else ""]
        for held in summary.held
    ]
    if facts.plan:
        usable = facts.plan.cluster.accelerator.usable_bytes
        rows.append(["  a device, as planned", report.size(facts.plan.bytes), f"of {report.size(usable)}"])
    return f"memory, at most\n{columns(rows)}" if rows else ""


def _survived(facts: Facts) -> Iterator[str]:
    if facts.survived is None:
        return
    told = facts.survived.ledger
    yield f"goodput {told.goodput:.1%}, effective {told.effective:.1%}; survive stats says more"
    yield from (f"  {one}" for one in life.line(facts.survived.history, told, 78))


def _alerts(facts: Facts) -> str:
    if not facts.alerts:
        return ""
    counts = ", ".join(f"{n} × {rule}" for rule, n in alerts_by_rule(facts))
    now = firing(facts)
    return f"alerts {counts or 'none began'}; {len(now) or 'none'} still firing"


def _checkpoints(facts: Facts) -> str:
    if not facts.checkpoints:
        return ""
    rows = [["  checkpoint", "saved", "loss", "eval loss", "size"]]
    for one in facts.checkpoints[-MOST_CHECKPOINTS:]:
        if one.problem:
            rows.append([f"  {one.name}", one.problem, "", "", ""])
        else:
            rows.append(
                [
                    f"  {one.name}",
                    one.saved.replace("+00:00", "Z"),
                    loss(one.loss),
                    eval_loss(one),
                    nbytes(one.nbytes),
                ]
            )
    return columns(rows)


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def eval_loss(one: Checkpoint) -> str:
    return loss(one.eval_loss) + (" best" if one.best else "")


def nbytes(value: int | None) -> str:
    return "-" if value is None else report.size(value)


def _settings(facts: Facts) -> str:
    found = [f"{path} {short(value)}" for path, value in settings(facts)]
    return "config " + ", ".join(found) if found else ""


def ago(seconds: float) -> str:
    return f"{duration(max(seconds, 0.0))} ago"
