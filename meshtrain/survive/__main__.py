"""python -m meshtrain.survive --config FILE: one a node, until the last step is taken.

Besides: status RUN, stats RUN, inject KIND@STEP:RANK.
"""

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cli import DONE, Parser, command, is_config
from meshtrain.cluster.cluster import named
from meshtrain.config import Config, ConfigError, load
from meshtrain.config.inject import KINDS, FaultRequest, parse, requests
from meshtrain.draw.svg import file
from meshtrain.errors import nearest, say, short
from meshtrain.files import write_atomically
from meshtrain.launch import flags
from meshtrain.survive import history, picture, stats
from meshtrain.survive.records import NAME
from meshtrain.survive.store import SURVIVE, refuse_unsafe
from meshtrain.survive.supervisor import Supervisor

ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
LOOPBACK = ("127.", "::1", "localhost")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        of_command, run = COMMANDS[words[0]]
        return run(of_command().parse_args(words[1:]))
    supervises = parser()
    if words and not words[0].startswith("-") and not is_config(words[0]):
        ending = (
            nearest(words[0], COMMANDS) or "; legal are " + ", ".join(COMMANDS) + "."
        )
        supervises.error(f"there is no command {short(words[0])}{ending}")
    options = supervises.parse_args(words)
    config = load(options.config, options.set)
    node = socket.gethostname() if options.node is None else options.node
    if not NAME.fullmatch(node):
        raise ConfigError(
            f"--node is {short(repr(node))}; a node's name has letters, digits, dots, dashes and underscores, at most "
            "64, and begins "
            "with a letter or a digit."
        )
    address = options.address or (
        "127.0.0.1" if config.survive.most == 1 else socket.gethostname()
    )
    if not ADDRESS.fullmatch(address):
        raise ConfigError(
            f"--address is {short(repr(address))}; it must be a host's name or IP address."
        )
    _check(requests(config.survive.inject), config.survive.most, "the run")
    if options.flags:
        _set_flags(config, options.flags)
    supervisor = Supervisor(config, node, address)
    if config.survive.most > 1 and not address.startswith(LOOPBACK):
        _warn_if_unreachable()
    return supervisor.run()


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.survive",
        description="Supervises a run through faults, one on every node, until its last step is taken.",
        epilog=f"See also meshtrain survive {', '.join(COMMANDS)}, each with --help.",
    )
    parser.add_config()
    parser.add_argument(
        "--node", help="a name for this node, unique in the run (default: the host's)"
    )
    parser.add_argument(
        "--address", help="how other nodes reach this one (default: the host's name)"
    )
    parser.add_argument(
        "--flags",
        metavar="FILE|NAME",
        help="sets XLA and NCCL flags for this cluster, unless the environment does; "
        "meshtrain plan --flags shows them",
    )
    parser.beside = {name: of_command for name, (of_command, _) in COMMANDS.items()}
    return parser


def _warn_if_unreachable() -> None:
    """Warns if other hosts cannot reach this one: on CPUs, JAX listens at the address of the host's name, whatever
    --address is.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return
    if address.startswith(LOOPBACK) and not any(Path("/dev").glob("nvidia[0-9]*")):
        far = (
            f"the name of this host, {name}, is {address} here, at which processes on CPUs of other hosts do not "
            "reach it"
        )
        say(f"{far}: give it its own address in /etc/hosts, if there are others.")


def _set_flags(config: Config, cluster: str) -> None:
    settings = flags.settings(
        config, named(cluster, config.mesh.devices), flags.installed(), os.environ
    )
    for entry in settings:
        is_set = f"{entry.name}={entry.value}: {entry.reason}."
        say(f"{entry.name} is left alone: {entry.left}." if entry.left else is_set)
    os.environ.update(flags.environment(settings, os.environ))


def _check(asked: Sequence[FaultRequest], ranks: int, run: str) -> None:
    """Raises ConfigError for a fault that nobody would inject: its rank does not exist, or it is made before a run."""
    for request in asked:
        if request.kind.where == "start":
            raise ConfigError(
                f"{request.kind.name} is made before a run begins: {request.kind.does}."
            )
        if ranks and request.rank >= ranks:
            raise ConfigError(
                f"{request.name} is for rank {request.rank}, but {run} has {ranks}, counted from 0."
            )


def _inject_parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.survive inject",
        description="Injects a fault into a run while it trains.",
    )
    fault_help = "as in kill@40:1, which kills rank 1 after step 40"
    parser.add_argument("fault", nargs="?", metavar="KIND@STEP:RANK", help=fault_help)
    run_help = "the run's directory (default: the only one in runs/)"
    parser.add_argument("run", nargs="?", metavar="RUN", help=run_help)
    parser.add_argument(
        "--list", action="store_true", help="prints all kinds of faults"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --list, prints JSON, for programs"
    )
    return parser


def _inject(options: argparse.Namespace) -> int:
    if options.list:
        kinds = [
            {"number": kind.number, "name": kind.name, "does": kind.does}
            for kind in KINDS.values()
        ]
        lines = [
            f"{kind.number:2} {kind.name:18} {kind.does}" for kind in KINDS.values()
        ]
        print(json.dumps(kinds, indent=2) if options.json else "\n".join(lines))
        return DONE
    if options.fault is None:
        _inject_parser().error(
            "a fault is missing, KIND@STEP:RANK; --list shows the kinds."
        )
    asked = parse(options.fault, "the command")
    runs = (
        [Path(options.run)]
        if options.run
        else [path.parent for path in Path("runs").glob(f"*/{SURVIVE}")]
    )
    if len(runs) != 1:
        example = "name one after the fault, as in survive inject kill@40:1 runs/mine"
        raise ConfigError(f"there are {len(runs)} supervised runs in runs/; {example}.")
    run = runs[0]
    directory = runs[0] / SURVIVE / "inject"
    if not directory.is_dir():
        raise ConfigError(
            f"{run} is not a run that a supervisor looks after; give its run.directory."
        )
    refuse_unsafe(run)
    refuse_unsafe(directory, follow=False)
    _check(
        asked,
        max((len(plan.members) for plan in history.read(run).plans), default=0),
        str(run),
    )
    name = options.fault
    k = 1
    # Asked for once more under another name, or it would count as done.
    while (directory / name).exists():
        k += 1
        name = f"{options.fault.partition('.')[0]}.{k}"
    write_atomically(directory / name, b"")
    print(f"{name} is asked for in {run}.")
    return DONE


def _parser_of_run(word: str, description: str) -> Parser:
    parser = Parser(prog=f"python -m meshtrain.survive {word}", description=description)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="prints JSON, for programs")
    return parser


def _status_parser() -> Parser:
    return _parser_of_run(
        "status",
        "Shows what a run does now: its nodes, their steps, its latest faults.",
    )


def _status(options: argparse.Namespace) -> int:
    status = (
        json.dumps(stats.status_json(options.run), indent=2) + "\n"
        if options.json
        else stats.show_status(options.run)
    )
    print(status, end="")
    return DONE


def _stats_parser() -> Parser:
    parser = _parser_of_run(
        "stats",
        "Shows where a run's time went, its faults, and how reliable its nodes are.",
    )
    parser.add_argument(
        "--svg", metavar="FILE", type=Path, help="writes a picture of the run's life"
    )
    return parser


def _stats(options: argparse.Namespace) -> int:
    if options.svg:
        write_atomically(options.svg, file(picture.svg(options.run)).encode())
    print(
        json.dumps(stats.to_json(options.run), indent=2) + "\n"
        if options.json
        else stats.show(options.run),
        end="",
    )
    return DONE


# Commands that may be given instead of a config.
COMMANDS = {
    "status": (_status_parser, _status),
    "stats": (_stats_parser, _stats),
    "inject": (_inject_parser, _inject),
}


if __name__ == "__main__":
    sys.exit(main())
