"""Samples of a run's evaluations (`eval.samples`), as rows of a table: those of at most `MOST_EVALUATIONS`, spread over
the run.

The texts are a model's: they may hold anything, and are cut where they are long.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from meshtrain.report.answers import Cells, cut
from meshtrain.run.rows import Row, RowReader
from meshtrain.survive.history import integer

HEADS = ("step", "", "eval loss", "prompt", "text")
MOST_EVALUATIONS = 12


def samples_in(row: Row) -> list[tuple[str, str]]:
    """Returns the samples of a row, each with its prompt; none of a row that has others."""
    samples = row.get("samples")
    if not isinstance(samples, list):
        return []
    return [
        (cut(sample["prompt"]), cut(sample["text"]))
        for sample in samples
        if isinstance(sample, dict)
        and all(isinstance(sample.get(name), str) for name in ("prompt", "text"))
    ]


def read(path: Path) -> tuple[Cells, ...]:
    """Returns rows of `HEADS`; none where there is no such file. OSError if it cannot be read."""
    return table(RowReader(path, containing=b'"samples"').new())


def table(rows: Iterable[Row]) -> tuple[Cells, ...]:
    """Returns rows of `HEADS` from those of metrics."""
    evaluations = [
        (step, row.get("eval_loss"), samples)
        for row in rows
        if (step := integer(row.get("step"))) is not None
        and (samples := samples_in(row))
    ]
    if not evaluations:
        return ()
    places = np.unique(
        np.linspace(0, len(evaluations) - 1, MOST_EVALUATIONS).astype(int)
    )
    return tuple(
        (
            f"{step:,}",
            str(number),
            f"{loss:.4f}" if isinstance(loss, float) else "-",
            prompt,
            text,
        )
        for step, loss, samples in (evaluations[place] for place in places)
        for number, (prompt, text) in enumerate(samples, 1)
    )
