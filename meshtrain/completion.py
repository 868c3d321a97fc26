"""python -m meshtrain.completion bash|zsh: what completes commands, options and keys in a shell; `--markdown`: the
reference of all commands.

Both are made from the commands' own parsers.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain import cli
from meshtrain.commands import COMMANDS, GROUPS, parser_of
from meshtrain.config import Config, ConfigError
from meshtrain.config.key import keys
from meshtrain.errors import not_installed

SHELLS = ("bash", "zsh")
PATHS = (
    "FILE",
    "RUN",
    "DIR",
    "HF_DIR",
    "PATH",
    "OUT",
)  # metavars of what a shell completes as a path


@cli.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.markdown:
        print(markdown(), end="")
    elif options.shell is None:
        raise ConfigError(f"a shell is missing; legal are {', '.join(SHELLS)}.")
    else:
        print(completion(options.shell))
    return cli.DONE


def parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m meshtrain.completion",
        description='Prints a script that completes commands, options and keys; eval "$(meshtrain '
        'completion bash)" activates it.',
    )
    parser.add_argument(
        "shell", nargs="?", choices=SHELLS, help="the shell to complete in"
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="prints the reference of all commands instead",
    )
    return parser


def completion(shell: str) -> str:
    """Returns a script that completes `meshtrain` in a shell. ConfigError without the extra that makes it."""
    try:
        import shtab
    except ImportError:
        raise not_installed(
            "completion needs the shtab library", "completion"
        ) from None

    whole = argparse.ArgumentParser(prog="meshtrain")
    commands = whole.add_subparsers()
    for name, meaning in COMMANDS.items():
        _add(commands, name, meaning, parser_of(name), shtab.FILE)
    words = " ".join(keys(Config))
    functions = {
        "bash": f"_meshtrain_keys() {{ compopt -o nospace; compgen -S= -W '{words}' -- \"$1\"; }}",
        "zsh": f"_meshtrain_keys() {{ compadd -S= -- {words}; }}",
    }
    script: str = shtab.complete(
        whole, shell, root_prefix="meshtrain", preamble=functions[shell]
    )
    return script


def _add(
    commands: argparse._SubParsersAction,
    name: str,
    meaning: str,
    of: cli.Parser,
    file: Mapping[str, Any],
) -> None:
    """Adds a command's parser, and those of its own commands, to the parser of all."""
    parser = commands.add_parser(
        name, help=meaning, parents=[of], add_help=False, conflict_handler="resolve"
    )
    for action in parser._actions:
        if action.dest == "set":
            action.complete = dict.fromkeys(SHELLS, "_meshtrain_keys")  # type: ignore[attr-defined]
        elif action.type is Path or str(action.metavar).partition("|")[0] in PATHS:
            action.complete = file  # type: ignore[attr-defined]
    if of.beside:
        inner = parser.add_subparsers()
        for one, parser_of_one in of.commands.items():
            _add(inner, one, parser_of_one.description or "", parser_of_one, file)


# --- the reference


def markdown() -> str:
    """Returns the reference of all commands as Markdown, under headings of the second and third level: of each its
    usage, arguments and options, as --help says them.
    """
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines += [f"## {group.capitalize()}", ""]
        for name, meaning in commands.items():
            lines += [
                f"### meshtrain {name}",
                "",
                f"{meaning[0].upper()}{meaning[1:]}.",
                "",
            ]
            for one in _help_texts(parser_of(name)):
                lines += ["```text", one, "```", ""]
    return "\n".join(lines)


def _help_texts(parser: cli.Parser) -> Iterator[str]:
    """Yields the help of a parser and of those of its own commands, in the words of `meshtrain COMMAND`, 100 columns
    wide.
    """
    parser.formatter_class = lambda prog: cli.Help(prog, width=100)  # type: ignore[assignment, return-value]
    parser.prog = re.sub("^python -m meshtrain[. ]", "meshtrain ", parser.prog)
    yield re.sub("python -m meshtrain[. ]", "meshtrain ", parser.format_help()).rstrip()
    for own in parser.commands.values():
        yield from _help_texts(own)


if __name__ == "__main__":
    sys.exit(main())
