"""python -m meshtrain.launch: runs or prints what starts a run on several nodes, by one of several launchers."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from meshtrain.cli import DONE, Parser, command
from meshtrain.errors import say
from meshtrain.launch.job import Launcher

# A new launcher is a file with a table LAUNCHERS, and its name here.
MODULES = ("local_nodes", "ssh", "slurm", "kubernetes", "on_ray", "sky")
LAUNCHERS: dict[str, Launcher] = {}
for module in MODULES:
    LAUNCHERS |= import_module(f"meshtrain.launch.{module}").LAUNCHERS
SHARED = (
    "every node must see the config, the data and the run directory at the same path"
)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    words = parser()
    _check_options(
        words.commands, list(sys.argv[1:] if arguments is None else arguments)
    )
    options = words.parse_args(arguments)
    chosen = LAUNCHERS[options.launcher]
    if chosen.run is not None:
        return chosen.run(options)
    assert chosen.text is not None
    print(chosen.text(options), end="")
    say(f"{chosen.hint}; {SHARED}.")
    return DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.launch",
        description="Starts a run on several nodes: a supervisor on each (meshtrain survive), which keeps it "
        "going through faults.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong config, 3 given up, 75 stopped: only then start it again.",
    )
    commands = parser.add_subparsers(dest="launcher", required=True)
    for name, launcher in LAUNCHERS.items():
        launcher.add(
            commands.add_parser(
                name, help=launcher.meaning, description=f"{launcher.meaning}."
            )
        )
    return parser


def _check_options(parsers: Mapping[str, Parser], words: Sequence[str]) -> None:
    """An option that another launcher has is not misspelt."""
    if not words or words[0] not in parsers:
        return
    # argparse has no other way to ask a parser for its options.
    options = {name: parser._option_string_actions for name, parser in parsers.items()}
    for option in (
        word.partition("=")[0] for word in words[1:] if word.startswith("--")
    ):
        having = [name for name, own in options.items() if option in own]
        if having and words[0] not in having:
            parsers[words[0]].error(
                f"{option} is an option of {', '.join(having)}, and not of {words[0]}"
            )


if __name__ == "__main__":
    sys.exit(main())
