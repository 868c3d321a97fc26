"""Describes a run to every launcher: its number of nodes, what each has, and the supervisor's command; and declares the
options that launchers share.
"""

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

import yaml

from meshtrain.cli import Parser, whole_number
from meshtrain.cluster.cluster import machine_devices, named, usual_cluster
from meshtrain.config import Config, load
from meshtrain.config.load import IMPORTS
from meshtrain.config.values import as_text
from meshtrain.errors import ConfigError, divisors, listed_divisors, short
from meshtrain.launch import flags

REQUEUES = 100  # times that a run is started again after it was stopped, at most
GRACE = 120  # seconds from SIGTERM to SIGKILL: to end the step, and write a checkpoint
LONGEST_NAME = 40  # Kubernetes puts a name and an index into 63 characters
PAUSE = 10  # seconds before a killed supervisor is started again
# For engines that do not start it again themselves; leaves its exit code in $code.
AGAIN = """\
left={restarts}
while :; do
  code=0
  {supervisor} || code=$?
  if [ "$code" -lt 128 ] || [ "$left" -eq 0 ]; then break; fi
  left=$((left - 1))
  echo "the supervisor was killed (exit code $code); it is started again" >&2
  sleep {pause}
done
"""


class Launcher(NamedTuple):
    """A way to start a run: one that runs gives its exit code, one that prints its text and a hint on what to do with
    it.
    """

    meaning: str
    add: Callable[[Parser], None]  # options
    run: Callable[[argparse.Namespace], int] | None = None
    text: Callable[[argparse.Namespace], str] | None = None
    hint: str = ""


@dataclass(frozen=True)
class LaunchJob:
    """A run, as something that an engine starts."""

    name: str  # lower-case letters, digits and -
    nodes: int
    devices: int  # a node
    supervisor: tuple[str, ...]  # the command of one node, without --node and --address
    run: str  # the run directory, as the config has it
    restarts: int  # of nodes whose supervisor was killed, in all
    imports: tuple[str, ...]  # run.imports, which the config needs on the nodes too


def add_engine(parser: Parser) -> None:
    """The options of all engines."""
    parser.add_config()
    add_flags(parser)
    parser.add_argument(
        "--nodes", type=whole_number, help="nodes to ask for (default: survive.wanted)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=_count,
        metavar="N",
        help="GPUs of a node; 0: none (default: what the mesh needs)",
    )
    parser.add_argument(
        "--cpus-per-node",
        type=whole_number,
        metavar="N",
        help="CPU cores (default: left to the engine)",
    )
    parser.add_argument(
        "--name", type=_name, help="of the job (default: the run directory's)"
    )
    parser.add_argument(
        "--python", default="python", help="the interpreter on the nodes"
    )


def add_flags(parser: Parser) -> None:
    """The options of all launchers that say which flags of XLA and NCCL the nodes get (`meshtrain.launch.flags`)."""
    parser.add_argument(
        "--cluster",
        metavar="FILE|NAME",
        help="what the nodes are, for the flags that they get (default: as for meshtrain plan)",
    )
    parser.add_argument(
        "--no-flags",
        action="store_true",
        help="leave XLA_FLAGS and NCCL's variables as they are; meshtrain plan --flags shows them",
    )


def add_requeues(parser: Parser) -> None:
    meaning = "times that a stopped run (exit code 75) is started again, at most"
    parser.add_argument(
        "--requeues", type=_count, default=REQUEUES, metavar="N", help=meaning
    )


def add_mount(parser: Parser) -> None:
    meaning = "where it is; paths of the config begin there"
    parser.add_argument("--mount", default="/work", type=absolute, help=meaning)


def add_time(parser: Parser) -> None:
    parser.add_argument(
        "--time",
        type=duration,
        help="the longest that it may run: H:MM:SS or DAYS-HH:MM:SS",
    )


def engine_job(options: argparse.Namespace, shipped: str = "") -> LaunchJob:
    """Returns the job of an engine's options.

    `shipped`: where the config's file is on the nodes, if the engine takes it there.
    """
    config = load(options.config, options.set)
    nodes = options.nodes or config.survive.wanted
    job = make(config, options, nodes, options.python, shipped)
    gpus = job.devices if options.gpus_per_node is None else options.gpus_per_node
    return replace(job, name=options.name or job.name, devices=gpus)


def _job_name(config: Config) -> str:
    """Returns a name that all engines take, after the run directory."""
    name = re.sub("[^a-z0-9]+", "-", PurePath(config.run.directory).name.lower())
    return name.lstrip("-0123456789")[:LONGEST_NAME].rstrip("-") or "meshtrain"


def make(
    config: Config,
    options: argparse.Namespace,
    nodes: int,
    python: str,
    shipped: str = "",
) -> LaunchJob:
    """Makes a job on so many nodes.

    A config that says nothing of nodes (survive.wanted is 1) is for as many as there are; one that does may be given
    more of them, as spares, or fewer, which wait for the others to come from elsewhere.
    """
    wanted = config.survive.wanted
    devices = config.mesh.devices
    overrides = list(options.set)
    if wanted == 1 < nodes:
        if devices % nodes:
            raise ConfigError(
                f"the {devices} devices of the mesh do not divide into {nodes} nodes; legal are "
                f"{listed_divisors(devices)}."
            )
        wanted = nodes
        overrides.append(f"survive.wanted={nodes}")
    # Its other rules, such as survive.least, count for the nodes that there are.
    config = load(options.config, overrides)
    words = [python, "-m", "meshtrain.survive", "--config", shipped or options.config]
    # callers in Python need not have it
    trusted = getattr(options, "trust", [])
    if shipped and any(map(_is_file, config.run.imports)):
        # They lie beside the config there, in a directory that an engine makes as it will.
        there = PurePath(shipped).parent
        overrides = _import_from(there, config.run.imports, overrides)
        trusted = [str(there)]
    for override in overrides:
        words += ["--set", override]
    for folder in trusted:
        words += ["--trust", folder]
    cluster = options.cluster or usual_cluster(config)
    if options.cluster or not options.no_flags:
        _refuse_crowded(cluster, devices, wanted)
    if not options.no_flags and flags.settings(
        config, named(cluster, config.mesh.devices), {}, {}
    ):
        # Each node sets what its own versions take.
        words += ["--flags", cluster]
    return LaunchJob(
        _job_name(config),
        nodes,
        devices // wanted,
        tuple(words),
        config.run.directory,
        config.survive.restarts,
        config.run.imports,
    )


def _is_file(entry: str) -> bool:
    return entry.endswith(".py")


def _import_from(
    there: PurePath, imports: Sequence[str], overrides: Sequence[str]
) -> list[str]:
    """Returns overrides that import the files of `imports` from the folder `there`."""
    names = [
        str(there / PurePath(entry).name) if _is_file(entry) else entry
        for entry in imports
    ]
    others = [o for o in overrides if o.partition("=")[0].strip() != IMPORTS]
    return [*others, f"{IMPORTS}={as_text(names)}"]


def _refuse_crowded(cluster: str, devices: int, nodes: int) -> None:
    """Raises ConfigError where a node would need more devices than one of the cluster has."""
    held = machine_devices(cluster)
    needed = devices // nodes
    if held is None or needed <= held:
        return
    fewest = min(n for n in divisors(devices) if devices // n <= held)
    raise ConfigError(
        f"{nodes} node{'' if nodes == 1 else 's'} would need {needed} devices each for the {devices} of the mesh, and "
        "a node of cluster "
        f"{short(cluster)} has {held}; give at least {fewest} nodes, or the --cluster that the nodes are."
    )


def again(job: LaunchJob, words: str = "") -> str:
    """Returns shell lines that run a job's supervisor, with more words, and start it again when it was killed."""
    supervisor = f"{shlex.join(job.supervisor)} {words}".rstrip()
    return AGAIN.format(restarts=job.restarts, supervisor=supervisor, pause=PAUSE)


def text_of(pattern: str, sentence: str) -> Callable[[str], str]:
    """Returns an option's type: a text that matches, or an error that says `sentence` of it."""

    def matched(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{short(repr(text))} {sentence}")
        return text

    return matched


def absolute(text: str) -> str:
    """Checks a directory on the nodes."""
    if not text.startswith("/") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is not an absolute path")
    return text


# As Slurm writes it.
duration = text_of(
    r"([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]",
    "is not a time; write H:MM:SS or DAYS-HH:MM:SS",
)
_name = text_of(
    f"(?=.{{1,{LONGEST_NAME}}}$)[a-z]([a-z0-9-]*[a-z0-9])?",
    f"is not a name; it begins with a letter and has lower-case letters, digits and - inside, {LONGEST_NAME} at most",
)
# A cluster's name of something, to stand in a script or a manifest as it is: a partition, a namespace, an accelerator.
word = text_of(
    "[A-Za-z0-9][A-Za-z0-9._,-]{0,252}",
    "is not a name; letters, digits and . _ - , are legal",
)


def seconds(text: str) -> int:
    """Returns the seconds of a `duration`."""
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def _count(text: str) -> int:
    return 0 if text == "0" else whole_number(text)


class _ManifestDumper(yaml.SafeDumper):
    """Writes a text of several lines as lines."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style="|" if "\n" in data else None
        )


_ManifestDumper.add_representer(str, _ManifestDumper.represent_str)


def manifest(*documents: object) -> str:
    """Returns YAML as an engine takes it: keys in the given order, scripts as lines."""
    return yaml.dump_all(
        documents, Dumper=_ManifestDumper, sort_keys=False, width=2**16
    )
