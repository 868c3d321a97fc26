"""python -m meshtrain.plan: what each device will hold, send and wait for, before anything runs."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meshtrain import units
from meshtrain.cli import (
    DONE,
    FAILED,
    Parser,
    check_target,
    command,
    whole_number,
    write_target,
)
from meshtrain.cluster.cluster import Cluster, named, usual_cluster
from meshtrain.config import Config, ConfigError, chosen, load, notes, short, to_yaml
from meshtrain.config.follow import as_run_on
from meshtrain.config.load import given_devices
from meshtrain.draw.svg import file
from meshtrain.errors import say
from meshtrain.launch import flags
from meshtrain.parallel import float8, placement
from meshtrain.plan import advice, axes, page, pipeline, report, scaling
from meshtrain.plan.compiled import CLUSTERS, compile_step, parse_target
from meshtrain.plan.estimate import Plan, estimate, large_enough
from meshtrain.plan.jobs import command as jobs
from meshtrain.plan.search import expert_reason, search
from meshtrain.schedule import draw
from meshtrain.sources import SOURCES

# A layout that is legal for every model and batch.
ONE_DEVICE = (
    "mesh.data=1",
    "mesh.tensor=1",
    "mesh.pipeline=1",
    "mesh.context=1",
    "mesh.islands=1",
    "parallel.microbatches=1",
    "parallel.schedule=auto",
    "parallel.virtual_stages=1",
    "parallel.layer_split=null",
    "parallel.sequence_parallel=false",
    "parallel.context_strategy=auto",
)
DESCRIPTION = (
    "Shows what each device will hold, send and wait for, before anything runs."
)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = parser()
    options = words.parse_args(arguments)
    if options.kueue and not options.jobs:
        words.error("--kueue DIR is for --jobs FILE: it writes what places those jobs")
    if options.jobs:
        if options.html:
            check_target(options.html)
        return jobs.run(options, write_target)
    if options.measure:
        # In a process of its own: measuring is another command, which stands on the planner.
        return subprocess.run(
            [sys.executable, "-m", "meshtrain.probe.measure"]
        ).returncode
    if not options.config:
        words.error("--config FILE is needed: the YAML file of the run")
    # Who names a file alone wants the file alone.
    ranked = options.search
    options.search = options.search or bool(options.write)
    config = _load(options)
    _check_targets(config, options)
    cluster = _cluster(config, options)
    config = as_run_on(cluster.accelerator.platform, config)
    if options.flags:
        known = config, cluster, flags.installed(), os.environ
        print(
            json.dumps(flags.as_json(*known), indent=2)
            if options.json
            else flags.to_text(*known)
        )
        return 0
    if options.search:
        return _search(config, cluster, options, ranked)
    return _plan(config, cluster, options)


def parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.plan", description=DESCRIPTION)
    parser.add_config(required=False)
    parser.add_argument(
        "--cluster",
        metavar="FILE|NAME",
        help="a YAML file, one of configs/clusters, or an accelerator (default: cpu with run.fake_devices, else h100)",
    )
    parser.add_argument(
        "--json", action="store_true", help="prints one JSON object instead of tables"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="ranks every legal layout of the cluster's devices",
    )
    parser.add_argument(
        "--allow",
        choices=("float8",),
        help="with --search, also layouts with precision.matmul: float8, which changes losses a little",
    )
    parser.add_argument(
        "--devices",
        type=whole_number,
        metavar="N",
        help="devices to search layouts for (default: all of the cluster's, else the mesh's)",
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="where to write the best layout's config (default with --search: CONFIG-best.yaml); "
        "without --search, only the file's name is printed",
    )
    parser.add_argument(
        "--gantt",
        metavar="FILE",
        help="draws the pipeline's schedule as SVG; - draws it as text",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="writes the schedule's table, to start your own from; - prints it",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="writes the whole report as one page with pictures",
    )
    parser.add_argument(
        "--compile",
        metavar="TARGET[xN]",
        help="compiles the step for cpu, a100, h100, h200 or b200, described only, and compares it with the plan",
    )
    parser.add_argument(
        "--jobs",
        metavar="FILE",
        help="places the jobs of a YAML file on the cluster; see configs/jobs",
    )
    parser.add_argument(
        "--kueue",
        metavar="DIR",
        help="with --jobs, writes queues and jobs for Kueue on Kubernetes",
    )
    parser.add_argument(
        "--flags",
        action="store_true",
        help="prints the XLA and NCCL flags that launch sets for this config and cluster, and why",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measures this machine and prints a cluster description",
    )
    return parser


def _load(options: argparse.Namespace) -> Config:
    """The config; of a search also one whose own layout is not legal, since the search replaces it: then on one
    device.
    """
    try:
        return load(options.config, options.set, reading=True)
    except ConfigError as error:
        if not options.search:
            raise
        try:
            config = load(options.config, [*options.set, *ONE_DEVICE], reading=True)
        except ConfigError:
            raise error from None  # another key is wrong
    options.devices = options.devices or given_devices(options.config, options.set)
    return config


def _check_targets(config: Config, options: argparse.Namespace) -> None:
    """Refuses, before anything is planned, targets that no picture or file can be written to."""
    files = [options.html, options.write]
    for flag, does, suffix, reason in (
        (
            "gantt",
            "draws",
            ".svg",
            "the picture is SVG, so that its name must end in .svg",
        ),
        ("csv", "writes", ".csv", "parallel.schedule takes a name that ends in .csv"),
    ):
        path = getattr(options, flag)
        if path and not options.search and config.mesh.pipeline == 1:
            raise ConfigError(
                f"--{flag} {does} a pipeline's schedule, but mesh.pipeline is 1; give it at least 2 stages."
            )
        if path and path != "-":
            files.append(path)
            if Path(path).suffix.lower() not in ("", suffix):
                meant = short(Path(path).with_suffix(suffix))
                raise ConfigError(
                    f"--{flag} {short(path)}: {reason}; did you mean {meant}?"
                )
    for path in filter(None, files):
        check_target(path)


def _cluster(config: Config, options: argparse.Namespace) -> Cluster:
    needed = (
        max(config.mesh.devices, options.devices or 0)
        if options.search
        else config.mesh.devices
    )
    usual = usual_cluster(config)
    if options.compile:
        target = parse_target(options.compile, config.mesh.devices)
        usual = CLUSTERS.get(target, target)
    cluster = named(options.cluster or usual, needed)
    if options.search and cluster.devices < (options.devices or 0):
        raise ConfigError(
            f"--devices {options.devices} is more than the {cluster.devices} devices of cluster {cluster.name}."
        )
    return cluster if options.search else large_enough(cluster, config)


def _plan(config: Config, cluster: Cluster, options: argparse.Namespace) -> int:
    planned = estimate(config, cluster)
    changes = advice.changes(planned)
    compiled = compile_step(config, options.compile) if options.compile else None
    only_files = (options.gantt or options.csv or options.html) and not compiled
    if options.json:
        output = report.as_json(planned) | {
            "changes": [list(change.settings) for change in changes]
        }
        print(
            json.dumps(
                output | ({"compiled": compiled.as_json()} if compiled else {}),
                indent=2,
            )
        )
    elif not only_files:
        console = Console(highlight=False)
        console.print(report.render(planned))
        if compiled:
            console.print(report.compared(planned, compiled))
        for note in _notes(planned):
            console.print(f"note: {note}", style="yellow")
    if options.gantt and (line := planned.timeline):
        _print_or_write(
            options.gantt,
            draw.gantt_text(line, _width()),
            file(draw.gantt_svg(line, units.duration)),
        )
    if options.csv:
        table = pipeline.table(config).to_csv()
        _print_or_write(options.csv, table, table)
    if options.html:
        points = scaling.strong(config, cluster), scaling.weak(config, cluster)
        write_target(options.html, page.page(planned, *points, _notes(planned)))
    if planned.fits:
        return DONE
    say(advice.sentence(planned, changes))
    return FAILED


def _width() -> int:
    return Console().width if sys.stdout.isatty() else 120


def _print_or_write(target: str, text: str, file: str) -> None:
    if target == "-":
        print(text, end="")
    else:
        write_target(target, file)


def _notes(planned: Plan) -> list[str]:
    """Notes that a run of the config would log before its first step (its schedule where that was left open; what is
    padded, replicated or cannot be sharded, and its cost), and those on what its schedule costs by the plan.
    """
    config = planned.config
    return [
        *chosen(config),
        *notes(config),
        *placement.notes(config),
        *float8.notes(config),
        *advice.notes(planned),
        *axes.notes(planned),
        *_not_here(config),
    ]


def _not_here(config: Config) -> list[str]:
    """Notes on what training would refuse on this machine; it may be planned for another."""
    data = config.data
    fakes = config.run.fake_devices
    needed = config.mesh.devices
    sources = data.mixture or (data.source,)
    files = [("source", name) for name in sources if name not in SOURCES]
    files += [("tokenizer", data.tokenizer)] if data.tokenizer != "byte" else []
    sentences = [
        f"data.{key} {short(name)} is not on this machine; training needs it."
        for key, name in files
        if not os.path.lexists(Path(name).expanduser())
    ]
    if 0 < fakes < needed:
        sentences.append(
            f"run.fake_devices {fakes} is less than the {needed} devices of the mesh: training on fake devices is "
            "refused."
        )
    return sentences


def _search(
    config: Config, cluster: Cluster, options: argparse.Namespace, ranked: bool
) -> int:
    own_size = (
        options.cluster
        and options.cluster.endswith((".yaml", ".yml"))
        and not cluster.shared
    )
    devices = options.devices or (cluster.devices if own_size else config.mesh.devices)
    result = search(config, cluster, devices, float8=options.allow == "float8")
    if not result.plans:
        smallest = estimate(result.smallest.config, cluster)
        raise ConfigError(
            f"none of {result.legal:,} layouts fits: the smallest holds {units.size(smallest.bytes)} a device, and "
            f"{cluster.accelerator.name} "
            f"has {units.size(cluster.accelerator.usable_bytes)}; take more devices, or a smaller batch or model."
        )
    if options.json:
        best = [
            {
                "settings": report.settings(p.config),
                "step_seconds": p.seconds,
                "total_bytes": int(p.bytes),
                "mfu": p.mfu,
            }
            for p in result.plans
        ]
        sizes = {
            "devices": devices,
            "legal": result.legal,
            "fitting": result.fitting,
            "seconds": result.seconds,
            "expert_parallelism": expert_reason(result),
        }
        print(json.dumps(sizes | {"best": best}, indent=2))
    elif ranked:
        Console(highlight=False).print(report.ranking(result, devices))
    target = options.write or f"{Path(options.config).stem}-best.yaml"
    write_target(target, to_yaml(result.plans[0].config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
