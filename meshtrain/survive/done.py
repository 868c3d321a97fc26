"""Whether a run had come to its end before a supervisor began: then there is nothing to supervise."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from meshtrain.config import Config, ConfigError, load
from meshtrain.run.best import best_in
from meshtrain.run.directory import CONFIG, METRICS
from meshtrain.survive.records import Plan


def done_already(plans: Sequence[Plan], config: Config, run: Path) -> str | None:
    """By what the run in a directory ended well, in words; None if it did not, or is to go on now. `plans`: all of its supervisors'."""
    if not plans or plans[-1].kind != "done":
        return None
    step, steps, patience = plans[-1].step or 0, _steps(config, run), config.eval.patience
    if steps is not None and step >= steps:
        return f"step {step} of {steps} was taken"
    # What cannot be read the run itself will tell of.
    with contextlib.suppress(OSError):
        if patience and (best := best_in(run / METRICS)).ends(patience):
            return f"it ended after step {step} by eval.patience: {best.why()}"
    return None


def _steps(config: Config, run: Path) -> int | None:
    """Of the whole run. From train.epochs they follow once the data is open: then as the run has found them, None if it has not."""
    if not config.train.epochs:
        return config.train.steps
    try:
        found = load(run / CONFIG).train
    except ConfigError:
        return None
    return found.steps if found.epochs == config.train.epochs else None
