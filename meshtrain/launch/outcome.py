"""What a run came to, where its supervisors ended with different codes.

As a command it serves an engine that tells only the highest of them: before the supervisors are started it prints the number of the run's
newest plan, and afterwards ends with the code that they have agreed on since; if on none, with what the engine's code stands for.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshtrain.cli import DONE, FAILED, STOPPED, USAGE, Parser, command
from meshtrain.survive.records import LARGEST, Plan, decode
from meshtrain.survive.store import SURVIVE

GIVEN_UP = 3
# The first of these that any supervisor ended with is what the run came to. A supervisor ends with 0 or 3 only when the whole run has:
# another that was killed, or whose node was lost, says nothing against it. What never works (2) stands before what goes on (75), or a run
# with a node that is set up wrongly would be started again for ever.
ORDER = (DONE, GIVEN_UP, USAGE, STOPPED)


def outcome(codes: Iterable[int]) -> int:
    """One exit code of those of all supervisors; whatever else they are (a signal's, say) is a failure."""
    ended = set(codes)
    return next((code for code in ORDER if code in ended), FAILED)


def is_final(code: int) -> bool:
    """Whether a supervisor ended by itself, and not by a signal (negative, or 128 and more as shells have it)."""
    return 0 <= code < 128


def newest(run: Path) -> int:
    """The number of the newest plan in a run directory; 0 if there is none."""
    return max(_plans(run), default=0)


def agreed(run: Path, after: int) -> int | None:
    """The code of a run that its supervisors have declared over, in a plan that is newer than `after`; None if they have not."""
    plans = _plans(run)
    number = max(plans, default=0)
    if number <= after:
        return None
    try:
        with plans[number].open("rb") as file:
            plan = decode(Plan, file.read(LARGEST))
    except OSError:
        return None
    return plan.code if plan is not None and plan.state == "over" and is_final(plan.code) else None


def _plans(run: Path) -> dict[int, Path]:
    """Where each plan is, by its number."""
    try:
        found = list((run / SURVIVE / "plans").iterdir())
    except OSError:
        return {}
    return {int(path.stem): path for path in found if re.fullmatch(r"[0-9]{1,12}\.json", path.name)}


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m meshtrain.launch.outcome", description="What a run on several nodes came to.")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--after", type=_number, help="the newest plan before the supervisors were started")
    parser.add_argument(
        "--otherwise", type=_number, default=FAILED, help="an exit code, where the run was not declared over"
    )
    options = parser.parse_args(arguments)
    if options.after is None:
        print(newest(options.run))
        return DONE
    code = agreed(options.run, options.after)
    return outcome([options.otherwise]) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
