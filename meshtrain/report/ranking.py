"""Any number of runs beside each other: what each has come to, the best first, and the keys in which they differ.

    eval loss  loss    tokens/s  step   learning_rate
    2.1043     2.0911     51,204  40/40  0.003
    2.3370     2.3127     50,988  40/40  0.001

The best has the lowest validation loss, or the lowest loss at the end where a run has no validation.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config import Config
from meshtrain.config.follow import followed, value_of
from meshtrain.config.key import keys
from meshtrain.draw import page as pages
from meshtrain.draw.picture import columns
from meshtrain.draw.svg import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from meshtrain.errors import short
from meshtrain.report.charts import Curve, chart
from meshtrain.report.facts import config_of, refuse_no_run
from meshtrain.report.measured import speed_of
from meshtrain.report.rows import Columns, read
from meshtrain.report.summary import setting_text
from meshtrain.run.directory import METRICS

# Of so many curves, the best runs'
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
LONGEST = 24  # letters of a cell
FIGURES = ("eval loss", "loss", "tokens/s", "step")


@dataclass(frozen=True)
class RankedRun:
    """The results of one run. None: its rows do not say."""

    run: str
    eval_loss: float | None  # the lowest
    loss: float | None  # mean of the last twentieth of its rows
    tokens_per_second: float | None
    step: int
    steps: int | None  # of the whole run
    config: dict[str, Any]  # the keys that differ

    @property
    def cells(self) -> tuple[str, ...]:
        losses = ("-" if x is None else f"{x:.4f}" for x in (self.eval_loss, self.loss))
        speed = self.tokens_per_second
        step = f"{self.step}/{'?' if self.steps is None else self.steps}"
        return (*losses, "-" if speed is None else f"{speed:,.0f}", step)


@dataclass(frozen=True)
class Ranking:
    """Runs, the best first, with the rows of each, and the keys in which they differ."""

    runs: tuple[RankedRun, ...]
    rows: tuple[Columns, ...]
    keys: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"keys": self.keys, "runs": [asdict(run) for run in self.runs]}


def rank(directories: Sequence[Path], named: Sequence[str] | None = None) -> Ranking:
    """Returns the ranking of runs, by the keys that are `named`, else by those in which their configs differ.

    ConfigError for a directory that is not a run.
    """
    for directory in directories:
        refuse_no_run(directory)
    configs = [config_of(directory, []) for directory in directories]
    shown = tuple(_differing(configs) if named is None else named)
    entries = []
    for directory, config in zip(directories, configs, strict=True):
        rows = read(directory / METRICS)[0]
        entries.append((_ranked(directory, config, rows, shown), rows))
    validated = all(
        run.eval_loss is not None for run, _ in entries if run.loss is not None
    )

    def order(entry: tuple[RankedRun, Columns]) -> float:
        value = entry[0].eval_loss if validated else entry[0].loss
        return math.inf if value is None else value

    entries.sort(key=order)
    return Ranking(
        tuple(run for run, _ in entries), tuple(rows for _, rows in entries), shown
    )


def _differing(configs: Sequence[Config | None]) -> list[str]:
    """Returns the keys in which configs differ, but for where they are written and what only follows."""
    known = [config for config in configs if config is not None]
    return [
        path
        for path in keys(Config)
        if path != "run.directory"
        and any(value_of(config, path) != value_of(known[0], path) for config in known)
        and not all(followed(config, path) for config in known)
    ]


def _ranked(
    directory: Path, config: Config | None, rows: Columns, shown: Sequence[str]
) -> RankedRun:
    steps = rows.known("step")
    losses = rows.known("loss")
    # A run whose last loss is no number has come to nothing.
    diverged = losses.size == 0 or not np.isfinite(rows["loss"][-1])
    evaluated = rows.known("eval_loss")
    speed = speed_of(rows)
    return RankedRun(
        run=str(directory),
        eval_loss=float(evaluated.min()) if evaluated.size and not diverged else None,
        loss=None if diverged else float(losses[-max(1, losses.size // 20) :].mean()),
        tokens_per_second=speed.tokens_per_second if speed else None,
        step=int(steps[-1]) if steps.size else 0,
        steps=config.train.steps if config else None,
        config={
            path: None if config is None else value_of(config, path) for path in shown
        },
    )


def _names(paths: Sequence[str]) -> list[str]:
    """Returns keys by their last word, where that is enough to tell them apart."""
    lasts = [path.rpartition(".")[2] for path in paths]
    return [
        path if lasts.count(last) > 1 else last
        for path, last in zip(paths, lasts, strict=True)
    ]


def _table(ranking: Ranking, with_names: bool) -> list[list[str]]:
    """Returns the heads and the cells of each run."""
    first = ["run"] if with_names else []
    lines = [[*first, *FIGURES, *_names(ranking.keys)]]
    for run in ranking.runs:
        name = [short(Path(run.run).name or run.run)] if with_names else []
        values = [setting_text(value) for value in run.config.values()]
        lines.append([*name, *run.cells, *values])
    return lines


def render(ranking: Ranking, width: int = 80, with_names: bool = True) -> str:
    """Returns the ranking for a terminal: of more keys than its width has room for, the first."""
    lines = [[_cut(cell) for cell in line] for line in _table(ranking, with_names)]
    least = len(FIGURES) + with_names
    left_out = 0
    while len(lines[0]) > least and _wide(lines) > width:
        lines = [line[:-1] for line in lines]
        left_out += 1
    more = (
        f"\n{left_out} more of the keys that differ: --html FILE shows all."
        if left_out
        else ""
    )
    return f"{columns(lines)}{more}\n"


def _cut(cell: str) -> str:
    return cell if len(cell) <= LONGEST else f"{cell[: LONGEST - 1]}…"


def _wide(lines: Sequence[Sequence[str]]) -> int:
    return max(map(len, columns(lines).splitlines()))


def page(ranking: Ranking, title: str) -> str:
    """Returns the ranking as a page: the losses of the best runs over their steps, and a table of all."""
    heads, *lines = _table(ranking, with_names=True)
    rows = [[escape(cell) for cell in line] for line in lines]
    curves = []
    # The table is the legend: a chart has no room for six long names.
    for row, measured, colour in zip(rows, ranking.rows, COLOURS, strict=False):
        row[0] = (
            f'<span class="chip" style="background:{colour}">&nbsp;</span> {row[0]}'
        )
        curves.append(Curve("", measured["step"], measured["loss"], colour))
    drawing = chart("loss", curves, "{:.4g}".format)
    about = (
        f"of the best {len(curves)} runs" if len(rows) > len(curves) else "of all runs"
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        pages.figures([pages.figure("Loss", about, drawing)]) if drawing else "",
        "<h2>All runs, the best first</h2>",
        pages.table(heads, rows),
    ]
    return pages.page(title, body)
