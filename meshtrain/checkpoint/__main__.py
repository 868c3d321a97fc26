"""python -m meshtrain.checkpoint ls | show | verify | diff: what a run has saved, whether it is intact, what
differs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.checkpoint import steps
from meshtrain.cli import FAILED, USAGE, Parser, command
from meshtrain.errors import refusal, say, short
from meshtrain.files import PASSING, is_address


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # whoever asks for --help does not wait for JAX
    from meshtrain.checkpoint import command as commands

    try:
        code: int = getattr(commands, options.command)(options)
        return code
    except OSError as error:
        if not error.filename:
            raise
        # No permission; or a run that goes on has just removed the step.
        say(f"{short(error.filename)} cannot be read: {refusal(error)}.")
        return FAILED if error.errno in PASSING else USAGE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.checkpoint", description="Looks at checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one_step = "a run directory (its newest step is taken) or one step"
    any_steps = "a run directory, its checkpoints/, or one step"
    for name, text, paths in (
        ("ls", "steps, dates, losses and sizes", {"directory": any_steps}),
        (
            "show",
            "one step: losses, config, versions, the tree of arrays",
            {"directory": one_step},
        ),
        (
            "verify",
            "compare every file with its digest; exit code 1 if a step is damaged",
            {"directory": any_steps},
        ),
        (
            "diff",
            "shows what differs between two checkpoints; exit code 1 if anything does",
            {"first": one_step, "second": one_step},
        ),
    ):
        parsed = commands.add_parser(name, help=text, description=text)
        for path, meaning in paths.items():
            parsed.add_argument(path, type=_place, help=meaning)
        parsed.add_argument(
            "--json", action="store_true", help="prints JSON, for programs"
        )
        if name in ("show", "verify"):
            text = (
                "this step of a run: its number, newest, or best (the lowest eval loss)"
            )
            parsed.add_argument("--step", type=_step, metavar="N", help=text)
        if name == "diff":
            parsed.add_argument(
                "--no-values", action="store_true", help="do not read the arrays"
            )
    return parser


def _place(text: str) -> Path | str:
    return text if is_address(text) else Path(text)


def _step(text: str) -> str:
    if text in ("newest", "best") or steps.is_number(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none; give a number, newest or best")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # reading a checkpoint takes no accelerator
    sys.exit(main())
