"""The lowest eval loss of a run so far, and for how long it has stood: what the best checkpoint and eval.patience go
by.

    eval loss   3.1   2.4   2.5   2.4   2.6    the best is 2.4, of the second evaluation; three in a row were not lower
    since        0     0     1     2     3     with eval.patience: 3 the run ends here

It follows from the rows of metrics.jsonl alone, where each evaluation stands once, however often the run was killed.
Imports no JAX.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.run import rows


@dataclass
class Best:
    """The best of the evaluations up to now."""

    step: int | None = None
    loss: float = math.inf
    since: int = 0  # evaluations in a row, up to the last, without a lower loss
    last: int = 0  # the step of the last

    def add(self, step: int, loss: float) -> bool:
        """Returns whether an evaluation after `step` has the lowest loss so far; neither an equal one nor NaN has."""
        self.last = step
        if loss < self.loss and math.isfinite(loss):
            self.step = step
            self.loss = loss
            self.since = 0
            return True
        self.since += 1
        return False

    def ends(self, patience: int) -> bool:
        """Returns whether eval.patience has the run end after the last evaluation."""
        return 0 < patience <= self.since

    def why(self) -> str:
        """Returns why it ends, in words."""
        if self.step is None:
            lowest = "gave a finite loss"
        else:
            lowest = f"was below {self.loss:.4f}, that of step {self.step}"
        return f"no evaluation of {self.since} in a row {lowest}"


def best_in(metrics: Path) -> Best:
    """Returns the best of a run's rows, up to the last; of a run without any, that of no evaluation."""
    evaluations = map(evaluation_of, rows.read(metrics, containing=b'"eval_loss"')[0])
    best = Best()
    for step, loss in sorted(dict(e for e in evaluations if e is not None).items()):
        best.add(step, loss)
    return best


def evaluation_of(row: Any) -> tuple[int, float] | None:
    """Returns the step and the loss of a row of metrics that tells of an evaluation; what was not finite is null
    there.
    """
    if not isinstance(row, dict) or "eval_loss" not in row:
        return None
    step = row.get("step")
    loss = row["eval_loss"]
    if (
        type(step) is not int
        or not 0 <= step < 1 << 63
        or not (loss is None or type(loss) is float)
    ):
        return None
    return step, math.nan if loss is None else loss
