"""python -m meshtrain.sweep --config FILE --over KEY=A,B: trains a config with each combination of values, and ranks
the runs.

    meshtrain sweep --config FILE --over optimizer.learning_rate=1e-3,3e-3 --over model.layers=2,4

    runs/quickstart/
      learning_rate=1e-3,layers=2/      a run directory for each combination
      learning_rate=1e-3,layers=4/
      sweep.html                        losses and the table, the best first

Every combination is checked before the first one runs. They run one after the other. A sweep that was stopped or killed
goes on when it is typed again: a run that is done is not run anew, one that is not resumes from its checkpoint.

Exit codes: 0 all runs are done; 1 some failed, the others are done; 2 wrong usage; 75 stopped on request.
"""

import hashlib
import math
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshtrain.cli import (
    DONE,
    FAILED,
    STOPPED,
    USAGE,
    Parser,
    command,
    number_from,
    whole_number,
)
from meshtrain.config import ConfigError, load, short, to_yaml
from meshtrain.errors import say
from meshtrain.files import write_atomically
from meshtrain.launch.local_nodes import supervise_all
from meshtrain.report import ranking
from meshtrain.run.directory import CONFIG, METRICS

MOST = 4096  # runs, each of whose configs is checked
DONE_WITH = ".swept"  # in a run directory that is done: the digest of its config
PAGE = "sweep.html"
DIRECTORY = "run.directory"
# a comma within brackets or quotes belongs to a value
_VALUES = re.compile(r"""(?:\[[^]]*\]|"[^"]*"|'[^']*'|[^,])+""")


class SweepAxis(NamedTuple):
    """A key and the values that it takes, as they are typed."""

    key: str
    values: tuple[str, ...]


class SweepRun(NamedTuple):
    """One combination: its directory, the overrides of the config, and what its config is known by."""

    directory: Path
    overrides: tuple[str, ...]
    digest: str

    def is_done(self) -> bool:
        mark = self.directory / DONE_WITH
        return mark.is_file() and mark.read_text() == self.digest


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    axes = axes_of(options.over)
    runs = planned(options.config, options.set, axes, options.random, options.seed)
    failed = False
    for number, run in enumerate(runs, 1):
        name = f"run {number} of {len(runs)}, {run.directory.name}"
        if run.is_done():
            print(f"{name}: done already", flush=True)
            continue
        print(name, flush=True)
        code = supervise_all({name: _command(options.config, run)})
        if code in (STOPPED, USAGE):
            if code == STOPPED:
                say("the sweep is stopped; type it again to go on.")
            return code
        if code == DONE:
            write_atomically(run.directory / DONE_WITH, run.digest.encode())
        else:
            say(f"{name}: failed with exit code {code}; the sweep goes on.")
            failed = True
    _report(runs, axes)
    return FAILED if failed else DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.sweep",
        description="Trains a config with each combination of values of its keys, one run after the other, and ranks "
        "the runs. The same command resumes a sweep that was stopped.",
    )
    parser.add_config()
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="KEY=A,B",
        help="a key and its values, as in optimizer.learning_rate=1e-3,3e-3; may be repeated",
    )
    parser.add_argument(
        "--random",
        type=whole_number,
        metavar="N",
        help="runs N random combinations of the grid (default: all)",
    )
    parser.add_argument(
        "--seed",
        type=number_from(0, 2**31 - 1, int),
        default=0,
        metavar="S",
        help="the random seed of --random",
    )
    return parser


def axes_of(texts: Sequence[str]) -> list[SweepAxis]:
    """Returns the keys that are swept, with their values; ConfigError for what is none."""
    axes: dict[str, SweepAxis] = {}
    for text in texts:
        key, _, given = (part.strip() for part in text.partition("="))
        values = tuple(value.strip() for value in _VALUES.findall(given))
        shown = f"--over {short(text)}"
        if not key or not all(values) or not values:
            raise ConfigError(
                f"{shown}: write --over section.key=A,B, a key and its values."
            )
        if len(set(values)) < len(values):
            raise ConfigError(f"{shown}: a value stands there twice.")
        if key == DIRECTORY:
            raise ConfigError(
                f"{shown}: each run has a directory of its own; sweep other keys."
            )
        if key in axes:
            raise ConfigError(
                f"{shown}: --over {key} is given twice; list all values in one."
            )
        axes[key] = SweepAxis(key, values)
    return list(axes.values())


def planned(
    config: str,
    given: Sequence[str],
    axes: Sequence[SweepAxis],
    count: int | None,
    seed: int,
) -> list[SweepRun]:
    """Returns the runs of a sweep, in the order of the grid: of its combinations all, or `count` drawn by `seed`.

    ConfigError, with the combination, where the config of one is not legal.
    """
    total = math.prod(len(axis.values) for axis in axes)
    asked = total if count is None else min(count, total)
    if asked > MOST:
        raise ConfigError(
            f"the sweep has {asked:,} runs; at most {MOST:,} are legal, and --random N draws so many of the grid."
        )
    places = (
        range(total)
        if asked == total
        else sorted(random.Random(seed).sample(range(total), asked))
    )
    runs = []
    for place in places:
        chosen: list[tuple[str, str]] = []
        for axis in reversed(axes):
            place, k = divmod(place, len(axis.values))
            chosen.insert(0, (axis.key, axis.values[k]))
        runs.append(_checked(config, given, chosen))
    directories = [run.directory for run in runs]
    if twice := next((d for d in directories if directories.count(d) > 1), None):
        raise ConfigError(
            f"two runs of the sweep would have the directory {short(twice)}."
        )
    return runs


def _checked(
    config: str, given: Sequence[str], chosen: Sequence[tuple[str, str]]
) -> SweepRun:
    """Returns the run of one combination of keys and values."""
    overrides = [*given, *(f"{key}={value}" for key, value in chosen)]
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen)
    try:
        root = Path(load(config, overrides).run.directory)
        directory = root / re.sub(r"[^\w.,=+-]", "_", name)[:200]
        overrides.append(f"{DIRECTORY}={directory}")
        text = to_yaml(load(config, overrides))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return SweepRun(
        directory, tuple(overrides), hashlib.sha256(text.encode()).hexdigest()
    )


def _command(config: str, run: SweepRun) -> list[str]:
    words = [sys.executable, "-m", "meshtrain.train", "--config", config]
    return [
        *words,
        *(word for override in run.overrides for word in ("--set", override)),
    ]


def _report(runs: Sequence[SweepRun], axes: Sequence[SweepAxis]) -> None:
    """Prints the table of the runs that have begun, and writes its page beside them."""
    begun = [
        run.directory
        for run in runs
        if any((run.directory / name).exists() for name in (CONFIG, METRICS))
    ]
    if not begun:
        return
    ranked = ranking.rank(begun, [axis.key for axis in axes])
    print(f"\n{ranking.render(ranked, with_names=False)}", end="")
    target = runs[0].directory.parent / PAGE
    write_atomically(
        target, ranking.page(ranked, f"Sweep of {target.parent.name}").encode()
    )
    print(f"the best run is in {ranked.runs[0].run}; {target} has its curves")


if __name__ == "__main__":
    sys.exit(main())
