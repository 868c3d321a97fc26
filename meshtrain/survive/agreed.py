"""Finds the exit code that a run's supervisors agreed on, in the plans that they have written, and whether the run was
done before a supervisor began.

The command serves an engine that knows only the highest of their codes: before the supervisors are started it prints
the number of the run's newest plan, and afterwards ends with the code that they have agreed on since; if on none, with
what the engine's code stands for.
"""

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cli import DONE, FAILED, Parser, command
from meshtrain.config import Config, ConfigError, load
from meshtrain.files import entries, retried
from meshtrain.launch import is_final, outcome
from meshtrain.run.best import best_in
from meshtrain.run.directory import CONFIG, METRICS
from meshtrain.survive.records import LARGEST, RestartPlan, decode
from meshtrain.survive.store import NO_RECORD, SURVIVE, read_file


def newest(run: Path) -> int:
    """Returns the number of the newest plan in a run directory; 0 if there is none."""
    return max(_plans(run), default=0)


def agreed(run: Path, after: int) -> int | None:
    """Returns the code of a run that its supervisors have declared over, in a plan that is newer than `after`; None if
    they have not.
    """
    plans = _plans(run)
    number = max(plans, default=0)
    if number <= after:
        return None
    plan = decode(
        RestartPlan, retried(lambda: read_file(plans[number], LARGEST, NO_RECORD))
    )
    if plan is not None and plan.state == "over" and is_final(plan.code):
        return plan.code
    return None


def _plans(run: Path) -> dict[int, Path]:
    paths = entries(run / SURVIVE / "plans")
    return {
        int(path.stem): path
        for path in paths
        if re.fullmatch(r"[0-9]{1,12}\.json", path.name)
    }


def done_already(plans: Sequence[RestartPlan], config: Config, run: Path) -> str | None:
    """Returns why the run in a directory counts as done; None if it did not end well, or is to go on now.

    `plans`: all plans of its supervisors.
    """
    if not plans or plans[-1].kind != "done":
        return None
    step = plans[-1].step or 0
    patience = config.eval.patience
    steps: int | None = config.train.steps
    if config.train.epochs:
        # The steps follow once the data is open: then as the run has found them.
        steps = None
        with contextlib.suppress(ConfigError):
            train = load(run / CONFIG, reading=True).train
            steps = train.steps if train.epochs == config.train.epochs else None
    if steps is not None and step >= steps:
        return f"step {step} of {steps} was taken"
    # The run itself reports a file that cannot be read.
    with contextlib.suppress(OSError):
        if patience and (best := best_in(run / METRICS)).ends(patience):
            return f"it ended after step {step} by eval.patience: {best.why()}"
    return None


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m meshtrain.survive.agreed",
        description="Prints the exit code of a run on several nodes.",
    )
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument(
        "--after", type=int, help="the newest plan before the supervisors were started"
    )
    parser.add_argument(
        "--otherwise",
        type=int,
        default=FAILED,
        help="the exit code if the run was not declared over",
    )
    options = parser.parse_args(arguments)
    if options.after is None:
        print(newest(options.run))
        return DONE
    code = agreed(options.run, options.after)
    return outcome([options.otherwise]) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
