"""Writes the report of a run for a terminal: the answer first, then its reasons, the losses, and the sections."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from meshtrain import units
from meshtrain.config import short
from meshtrain.draw.picture import columns
from meshtrain.report.facts import RunFacts
from meshtrain.report.sections import Figure, Section, findings, sections
from meshtrain.report.summary import Summary

BAR = 30  # letters of the longest bar
LETTERS = "▁▂▃▄▅▆▇█"
MOST_ROWS = 6  # of a table, the newest
MOST_LETTERS = 40  # of a text in one


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
    low = means[known].min()
    high = means[known].max()
    scaled = (means - low) / ((high - low) or 1.0) * (len(LETTERS) - 1)
    return "".join(
        LETTERS[round(x)] if ok else " " for x, ok in zip(scaled, known, strict=True)
    )


def title(facts: RunFacts) -> str:
    """Returns what ran, in a line."""
    if facts.config is None:
        return short(facts.name)
    config = facts.config
    mesh = facts.config.mesh
    parameters = (
        f"{units.count(facts.plan.parameters)} parameters"
        if facts.plan
        else "unknown size"
    )
    return (
        f"{short(facts.name)}: {config.model.family}, {parameters}, {mesh}, "
        f"{config.train.global_batch_size} x {config.train.sequence_length} tokens a step"
    )


def render(facts: RunFacts, summary: Summary) -> str:
    """Returns the whole of it."""
    diagnosis = findings(facts.diagnosis)
    # Findings have a section of their own.
    reasons = [r for r in summary.reasons if not r.finding]
    parts = [
        f"{summary.verdict}\n{title(facts)}",
        "\n".join(f"{'!' if r.level == 'bad' else '·'} {r.sentence}" for r in reasons),
        section_text(diagnosis) if diagnosis else "",
        "\n".join(_losses(facts, summary)),
        *map(section_text, sections(facts, summary)),
        "\n".join(f"note: {note}" for note in facts.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section_text(section: Section) -> str:
    """Returns a section as lines."""
    lines = [section.title, *(f"  {sentence}" for sentence in section.sentences)]
    for number, item in enumerate(section.items, 1):
        lines += [
            f"  {number}. {item.sentence}",
            *(f"     {words}" for words in (item.advice, item.flags) if words),
        ]
    if section.unknown:
        lines += [
            "  It cannot be told:",
            *(f"  - {sentence}" for sentence in section.unknown),
        ]
    for figure in section.figures:
        if figure.rows:
            lines += [f"  {figure.title}, {figure.about}", _rows(figure)]
    if section.table is not None:
        heads, rows, what, newest, texts = section.table
        # The sections of a config, which has no heads, are all named.
        cut = heads and (newest or texts) and len(rows) > MOST_ROWS
        if texts:
            rows = [
                [" ".join(cell.split())[:MOST_LETTERS] for cell in row] for row in rows
            ]
        lines.append(
            columns(
                [heads, *(rows[-MOST_ROWS:] if cut else rows)] if heads else rows,
                "    ",
            )
        )
        if cut:
            lines.append(f"    the newest {MOST_ROWS} of {len(rows):,} {what}")
    return "\n".join([*lines, *(f"  {line}" for line in section.lines)])


def _rows(figure: Figure) -> str:
    rows: Sequence[Sequence[str]] = [
        [row.name, *row.figures, "█" * max(round(BAR * row.bar), 1) if row.bar else ""]
        for row in figure.rows
    ]
    return columns(rows, "    ")


def _losses(facts: RunFacts, summary: Summary) -> Iterator[str]:
    if summary.loss is None or summary.loss_begin is None:
        return
    yield f"loss   {summary.loss_begin:.4f} → {summary.loss:.4f}  {sparkline(facts.steps['loss'])}"
    if summary.reward is not None:
        rewards = facts.steps.known("rl/reward")
        yield f"reward {rewards[0]:.4g} → {summary.reward:.4g}  {sparkline(rewards)}"
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
    return (
        f"{words}, ends after {summary.patience_left} more {more} without a lower one"
    )
