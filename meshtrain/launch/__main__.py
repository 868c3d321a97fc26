"""python -m meshtrain.launch: runs or prints what starts a run on several nodes, by one of several ways."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshtrain.cli import DONE, Parser, command
from meshtrain.errors import say
from meshtrain.launch import kubernetes, local, ray, sky, slurm, ssh


class Way(NamedTuple):
    meaning: str
    add: Callable[[Parser], None]
    # One that runs gives its exit code, one that prints its text and what to do with it.
    run: Callable[[argparse.Namespace], int] | None = None
    text: Callable[[argparse.Namespace], str] | None = None
    hint: str = ""


WAYS = {
    "local": Way("run N nodes on this machine", local.add, local.run),
    "ssh": Way("run a node on each of some hosts", ssh.add, ssh.run),
    "slurm": Way("print a script for sbatch", slurm.add, text=slurm.text, hint="submit it with sbatch"),
    "jobset": Way("print a JobSet of Kubernetes", kubernetes.add, text=kubernetes.jobset, hint="kubectl apply -f it"),
    "trainjob": Way(
        "print a TrainJob of Kubeflow", kubernetes.add, text=kubernetes.trainjob, hint="kubectl apply -f it"
    ),
    "ray": Way("print a script that submits a Ray job", ray.add, text=ray.text, hint="run it with bash"),
    "sky": Way("print a task of SkyPilot", sky.add, text=sky.text, hint="give it to sky jobs launch"),
}
SHARED = "config, data and run directory must lie where every node sees them under the same name"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    meaning = "Starts a run on several nodes: a supervisor on each (python -m meshtrain.survive), which goes on through faults."
    ending = (
        "Exit codes: 0 done, 1 failed, 2 wrong config, 3 given up, 75 stopped; only the last is worth starting again."
    )
    parser = Parser(prog="python -m meshtrain.launch", description=meaning, epilog=ending)
    ways = parser.add_subparsers(dest="way", required=True)
    parsers = {
        name: ways.add_parser(name, help=way.meaning, description=f"{way.meaning}.") for name, way in WAYS.items()
    }
    for name, way in WAYS.items():
        way.add(parsers[name])
    _check_options(parsers, list(sys.argv[1:] if arguments is None else arguments))
    options = parser.parse_args(arguments)
    chosen = WAYS[options.way]
    if chosen.run is not None:
        return chosen.run(options)
    assert chosen.text is not None
    print(chosen.text(options), end="")
    say(f"{chosen.hint}; {SHARED}.")
    return DONE


def _check_options(parsers: Mapping[str, Parser], given: Sequence[str]) -> None:
    """An option that another way has is not misspelt."""
    if not given or given[0] not in parsers:
        return
    # argparse has no other way to ask a parser for its options.
    taken = {name: parser._option_string_actions for name, parser in parsers.items()}
    for option in (word.partition("=")[0] for word in given[1:] if word.startswith("--")):
        having = [name for name, options in taken.items() if option in options]
        if having and given[0] not in having:
            parsers[given[0]].error(f"{option} is an option of {', '.join(having)}, and not of {given[0]}")


if __name__ == "__main__":
    sys.exit(main())
