"""Executes the notebooks, which assert what they claim: python -m experiments.notebooks [NAME...] [--write]

Each in a fresh kernel, one after the other; prints a row for each, and below it what is wrong. Exit code 0 if all come
to their end, and those that are committed (`source.KEPT`) print what they printed (`compare.py` says what may differ).
--write builds experiments/NAME.ipynb.
"""

import fnmatch
import math
import signal
import sys
import time
from collections.abc import Sequence

from experiments.notebooks import compare, notebook, source
from experiments.notebooks.execute import (
    Raised,
    as_jupytext_reads,
    check_installed,
    execute,
)
from meshtrain import cli
from meshtrain.errors import ConfigError, nearest


@cli.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        prog="python -m experiments.notebooks", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="1_mesh, or a pattern such as '[12]_*' (default: all)",
    )
    parser.add_argument(
        "--write", action="store_true", help="saves the notebooks with their outputs"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="notebooks that would begin later are left out",
    )
    options = parser.parse_args(arguments)
    chosen = _chosen(options.names)
    check_installed()
    # Ended in any way, it ends its kernel first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    width = max(map(len, ["notebook", *chosen])) + 2
    print(f"{'notebook':<{width}}{'cells':>5}{'seconds':>9}  verdict", flush=True)
    began, failed = time.monotonic(), 0
    left = 0
    for name in chosen:
        started = time.monotonic()
        if started - began > 60 * options.minutes:
            print(
                f"{name:<{width}}{'':>14}  not begun within {options.minutes:g} minutes"
            )
            left += 1
            continue
        cells, verdict, wrong = _meet(name, options.write)
        print(
            f"{name:<{width}}{cells:>5}{time.monotonic() - started:>9.1f}  {verdict}",
            flush=True,
        )
        for line in wrong:
            print("    " + line.replace("\n", "\n    "), flush=True)
        failed += bool(wrong)
    print(
        f"{len(chosen) - left} notebooks, {failed} of them wrong, {time.monotonic() - began:.0f} s"
    )
    return cli.FAILED if failed else cli.DONE


def _chosen(patterns: list[str]) -> list[str]:
    names = source.names()
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            ending = (
                nearest(pattern, names) or f"; there are {', '.join(names) or 'none'}."
            )
            raise ConfigError(f"there is no notebook {pattern}{ending}")
    return [
        n
        for n in names
        if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)
    ]


def _meet(name: str, write: bool) -> tuple[int, str, list[str]]:
    """How many cells it has, the verdict in a few words, and what is wrong with it."""
    text = (source.SOURCES / f"{name}.py").read_text(encoding="utf-8")
    try:
        cells = source.read(text)
    except ConfigError as error:
        return 0, "not executed", [str(error)]
    wrong = source.lacks(name, cells)
    if as_jupytext_reads(text) != cells:
        wrong.append("jupytext reads other cells in it; use no magics.")
    file = source.NOTEBOOKS / f"{name}.ipynb"
    kept = (
        file.read_text(encoding="utf-8")
        if name in source.KEPT and file.exists()
        else ""
    )
    if name in source.KEPT and not write:
        wrong += notebook.stale(kept, cells) if kept else ["not written yet."]
    if wrong:
        return len(cells), "not executed", wrong
    try:
        outputs = execute(cells)
    except Raised as error:
        return len(cells), "raised", list(error.args)
    if wrong := notebook.unfit(cells, outputs):
        return len(cells), "unfit", wrong
    if write:
        made = notebook.make(cells, outputs)
        file.write_text(made, encoding="utf-8")
        return len(cells), f"written, {len(made.encode()):,} bytes", []
    if name not in source.KEPT:
        return len(cells), "holds", []
    wrong = compare.differences(cells, notebook.read(kept)[1], outputs)
    return len(cells), "differs" if wrong else "as committed", wrong


if __name__ == "__main__":
    sys.exit(main())
