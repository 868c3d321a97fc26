"""What every way to start a run needs to know of it: how many nodes, what each has, and the supervisor's command."""

import argparse
import re
from dataclasses import dataclass
from pathlib import PurePath

from meshtrain.cli import Parser, whole_number
from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, divisors, short
from meshtrain.plan import flags, named
from meshtrain.plan.estimate import usual_cluster

REQUEUES = 100  # times that a run is started again after it was stopped, at most
GRACE = 120  # seconds from SIGTERM to SIGKILL: to end the step, and write a checkpoint
LONGEST_NAME = 40  # Kubernetes puts a name and an index into 63 characters


@dataclass(frozen=True)
class Job:
    """A run, as something that an engine starts."""

    name: str  # lower-case letters, digits and -
    nodes: int
    devices: int  # a node
    supervisor: tuple[str, ...]  # the command of one node, without --node and --address
    run: str  # the run directory, as the config has it
    restarts: int  # of nodes whose supervisor was killed, in all


def add_engine(parser: Parser) -> None:
    """The options of all engines."""
    parser.add_config()
    add_flags(parser)
    parser.add_argument("--nodes", type=whole_number, help="nodes to ask for; default: survive.wanted")
    parser.add_argument("--gpus-per-node", type=_count, metavar="N", help="default: what the mesh needs; 0: none")
    parser.add_argument(
        "--cpus-per-node", type=whole_number, metavar="N", help="CPU cores; default: left to the engine"
    )
    parser.add_argument("--name", type=_name, help="of the job; default: the run directory's")
    parser.add_argument("--python", default="python", help="the interpreter on the nodes; default: python")


def add_flags(parser: Parser) -> None:
    """The options of all ways that say which flags of XLA and NCCL the nodes get (`meshtrain.plan.flags`)."""
    parser.add_argument("--cluster", metavar="FILE|NAME", help="what the nodes are, for the flags that they get; default: as for meshtrain.plan")  # fmt: skip
    parser.add_argument("--no-flags", action="store_true", help="leave XLA_FLAGS and NCCL's variables as they are; meshtrain.plan --flags shows them")  # fmt: skip


def add_requeues(parser: Parser) -> None:
    meaning = f"times that a stopped run (exit code 75) is started again, at most; default: {REQUEUES}"
    parser.add_argument("--requeues", type=_count, default=REQUEUES, metavar="N", help=meaning)


def add_time(parser: Parser) -> None:
    parser.add_argument("--time", type=duration, help="the longest that it may run: H:MM:SS or DAYS-HH:MM:SS")


def engine_job(options: argparse.Namespace) -> Job:
    """The job of an engine's options."""
    config = load(options.config, options.set)
    nodes = options.nodes or config.survive.wanted
    job = make(config, options, nodes, options.python)
    gpus = job.devices if options.gpus_per_node is None else options.gpus_per_node
    return Job(options.name or job.name, nodes, gpus, job.supervisor, job.run, job.restarts)


def make(config: Config, options: argparse.Namespace, nodes: int, python: str) -> Job:
    """A job on so many nodes. A config that says nothing of nodes (survive.wanted is 1) is for as many as there are; one that does may
    be given more of them, as spares, or fewer, which wait for the others to come from elsewhere."""
    wanted, devices, given = config.survive.wanted, config.mesh.devices, list(options.set)
    if wanted == 1 < nodes:
        if devices % nodes:
            raise ConfigError(
                f"the {devices} devices of the mesh do not divide into {nodes} nodes; legal are {divisors(devices)}."
            )
        wanted = nodes
        given.append(f"survive.wanted={nodes}")
    # Its other rules, such as survive.least, count for the nodes that there are.
    config = load(options.config, given)
    words = [python, "-m", "meshtrain.survive", "--config", options.config]
    for override in given:
        words += ["--set", override]
    if not options.no_flags:
        words += _flags(config, options.cluster or usual_cluster(config))
    survive = config.survive
    return Job(_named(config), nodes, devices // wanted, tuple(words), config.run.directory, survive.restarts)


def _flags(config: Config, cluster: str) -> list[str]:
    """What has each node set what its own versions take, if there is anything to set."""
    of_use = flags.settings(config, named(cluster, config.mesh.devices), {}, {})
    return ["--flags", cluster] if of_use else []


def duration(text: str) -> str:
    """H:MM:SS or DAYS-HH:MM:SS, as Slurm writes it."""
    if not re.fullmatch(r"([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]", text):
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is no time; write H:MM:SS or DAYS-HH:MM:SS")
    return text


def seconds(text: str) -> int:
    """Of a `duration`."""
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def _named(config: Config) -> str:
    found = re.sub("[^a-z0-9]+", "-", PurePath(config.run.directory).name.lower()).lstrip("-0123456789")
    return found[:LONGEST_NAME].rstrip("-") or "meshtrain"


def _name(text: str) -> str:
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", text) or len(text) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(
            f"{short(repr(text))} is no name; it begins with a letter and has lower-case letters, digits and - inside, {LONGEST_NAME} at most"
        )
    return text


def word(text: str) -> str:
    """What a cluster calls something, to stand in a script or a manifest as it is: a partition, a namespace, an accelerator."""
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._,-]{0,252}", text):
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is no name; letters, digits and . _ - , are legal")
    return text


def absolute(text: str) -> str:
    """A directory on the nodes."""
    if not text.startswith("/") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is no absolute path")
    return text


def _count(text: str) -> int:
    return 0 if text == "0" else whole_number(text)
