"""python -m meshtrain.plan: what each device will hold, send and wait for, before anything runs."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meshtrain.cli import Parser, check_target, command, whole_number, write_target
from meshtrain.config import Config, ConfigError, chosen, load, notes, short, to_yaml
from meshtrain.errors import say
from meshtrain.parallel import placement
from meshtrain.plan import advice, axes, flags, page, report, scaling, ticks
from meshtrain.plan.cluster.cluster import Cluster, named
from meshtrain.plan.compiled import Compiled, compile_step, parse_target
from meshtrain.plan.estimate import Plan, estimate, large_enough, usual_cluster
from meshtrain.plan.failures import faults
from meshtrain.plan.search import Found, search
from meshtrain.schedule import Table, Timeline, draw

DESCRIPTION = "What each device will hold, send and wait for, before anything runs."


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.kueue and not options.jobs:
        parser.error("--kueue DIR is for --jobs FILE: it writes what places those jobs")
    if options.jobs:
        return _jobs(options)
    if not options.config and not options.measure:
        parser.error("--config FILE is needed: the YAML file of the run")
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.measure:
        return _measure()
    config = load(options.config, options.set)
    _check_targets(config, options)
    cluster = _cluster(config, options)
    if options.flags:
        return _flags(config, cluster, options)
    if options.search:
        return _search(config, cluster, options)
    return _plan(config, cluster, options)


def _parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.plan", description=DESCRIPTION)
    parser.add_config(required=False)
    parser.add_argument("--cluster", metavar="FILE|NAME", help="a YAML file, one of configs/clusters, or an accelerator; default: cpu with run.fake_devices, else h100")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="prints one JSON object in place of tables")
    parser.add_argument("--search", action="store_true", help="ranks every legal layout of the cluster's devices")
    parser.add_argument("--devices", type=whole_number, metavar="N", help="devices to search layouts for; default: all of the cluster's, else the mesh's")  # fmt: skip
    parser.add_argument("--write", metavar="FILE", help="where --search writes the best layout's config; default: CONFIG-best.yaml")  # fmt: skip
    parser.add_argument("--gantt", metavar="FILE", help="draws the pipeline's schedule as SVG; - draws it as text")
    parser.add_argument(
        "--csv", metavar="FILE", help="writes the schedule's table as a start for one's own; - prints it"
    )
    parser.add_argument("--html", metavar="FILE", help="writes the whole report as one page with pictures")
    parser.add_argument("--compile", metavar="TARGET[xN]", help="compiles the step for cpu, a100, h100, h200 or b200, described only, and compares")  # fmt: skip
    parser.add_argument(
        "--jobs", metavar="FILE", help="places the jobs of a YAML file on the cluster; see configs/jobs"
    )
    parser.add_argument("--kueue", metavar="DIR", help="with --jobs, writes queues and jobs for Kueue on Kubernetes")
    parser.add_argument("--flags", action="store_true", help="prints the flags of XLA and NCCL that launch sets for the config on the cluster, and why")  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="measures this machine and prints a cluster description")
    return parser


def _check_targets(config: Config, options: argparse.Namespace) -> None:
    """Refuses at once what else would be found to be no place for a picture or a file when all is planned."""
    for flag, does in (("gantt", "draws"), ("csv", "writes")):
        if getattr(options, flag) and not options.search and config.mesh.pipeline == 1:
            raise ConfigError(
                f"--{flag} {does} a pipeline's schedule, but mesh.pipeline is 1; give it at least 2 stages."
            )
    gantt = None if options.gantt == "-" else options.gantt
    if gantt and Path(gantt).suffix.lower() not in ("", ".svg"):
        meant = short(Path(gantt).with_suffix(".svg"))
        raise ConfigError(
            f"--gantt {short(gantt)}: the picture is SVG, so that its name must end in .svg; did you mean {meant}?"
        )
    table = None if options.csv == "-" else options.csv
    if table and Path(table).suffix.lower() not in ("", ".csv"):
        meant = short(Path(table).with_suffix(".csv"))
        raise ConfigError(
            f"--csv {short(table)}: parallel.schedule takes a name that ends in .csv; did you mean {meant}?"
        )
    for path in (gantt, table, options.html, options.write):
        if path:
            check_target(path)


def _cluster(config: Config, options: argparse.Namespace) -> Cluster:
    needed = max(config.mesh.devices, options.devices or 0) if options.search else config.mesh.devices
    usual = usual_cluster(config)
    if options.compile:
        target = parse_target(options.compile, config.mesh.devices)
        usual = {"a100": "a100-80"}.get(target, target)
    cluster = named(options.cluster or usual, needed)
    if options.search and cluster.devices < (options.devices or 0):
        raise ConfigError(f"--devices {options.devices} is more than the {cluster.devices} devices of cluster {cluster.name}.")  # fmt: skip
    return cluster if options.search else large_enough(cluster, config)


def _plan(config: Config, cluster: Cluster, options: argparse.Namespace) -> int:
    planned = estimate(config, cluster)
    changes = advice.changes(planned)
    found = planned.as_json() | {"faults": report.faults_json(faults(planned))}
    found["traffic"] = report.traffic_json(planned)
    found["axes"] = axes.as_json(planned)
    found["changes"] = [list(change.settings) for change in changes]
    compiled = compile_step(config, options.compile, cluster) if options.compile else None
    if compiled:
        found["compiled"] = compiled.as_json()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(planned, compiled)
    if options.gantt and planned.timeline:
        _gantt(planned.timeline, options.gantt)
    if options.csv:
        _csv(ticks.table(config), options.csv)
    if options.html:
        points = scaling.strong(config, cluster), scaling.weak(config, cluster)
        write_target(options.html, page.page(planned, *points, _notes(planned)))
    if not planned.fits:
        say(advice.sentence(planned, changes))
    return 0


def _print(planned: Plan, compiled: Compiled | None) -> None:
    console = Console(highlight=False)
    console.print(report.render(planned))
    if compiled:
        console.print(report.compared(planned, compiled))
    for note in _notes(planned):
        console.print(f"note: {note}", style="yellow")


def _notes(planned: Plan) -> list[str]:
    """What a run of the config would log before its first step (its schedule where that was left open; what is padded, replicated or
    cannot be sharded, and its cost), and what its schedule costs by the plan.
    """
    config = planned.config
    return [*chosen(config), *notes(config), *placement.notes(config), *advice.notes(planned), *axes.notes(planned)]


def _gantt(timeline: Timeline, target: str) -> None:
    if target == "-":
        print(draw.gantt_text(timeline))
    else:
        write_target(target, draw.gantt_svg(timeline))


def _csv(table: Table, target: str) -> None:
    if target == "-":
        print(table.to_csv(), end="")
    else:
        write_target(target, table.to_csv())


def _search(config: Config, cluster: Cluster, options: argparse.Namespace) -> int:
    given = options.cluster and options.cluster.endswith((".yaml", ".yml")) and not cluster.shared
    devices = options.devices or (cluster.devices if given else config.mesh.devices)
    found = search(config, cluster, devices)
    if not found.plans:
        smallest = estimate(found.smallest.config, cluster)
        raise ConfigError(
            f"none of {found.legal:,} layouts fits: the smallest holds {report.size(smallest.bytes)} a device, and {cluster.accelerator.name} "
            f"has {report.size(cluster.accelerator.usable_bytes)}; take more devices, or a smaller batch or model."
        )
    if options.json:
        print(json.dumps(_found_json(found, devices), indent=2))
    else:
        Console(highlight=False).print(report.ranking(found, devices))
    target = options.write or f"{Path(options.config).stem}-best.yaml"
    write_target(target, to_yaml(found.plans[0].config))
    return 0


def _found_json(found: Found, devices: int) -> dict:
    best = [
        {"settings": report.settings(p.config), "step_seconds": p.seconds, "total_bytes": int(p.bytes), "mfu": p.mfu}
        for p in found.plans
    ]
    return {"devices": devices, "legal": found.legal, "fitting": found.fitting, "seconds": found.seconds, "best": best}


def _flags(config: Config, cluster: Cluster, options: argparse.Namespace) -> int:
    there = flags.installed()
    if options.json:
        print(json.dumps(flags.as_json(config, cluster, there, os.environ), indent=2))
    else:
        print(flags.to_text(config, cluster, there, os.environ))
    return 0


def _jobs(options: argparse.Namespace) -> int:
    from meshtrain.plan.jobs import command

    if options.html:
        check_target(options.html)
    return command.run(options, write_target)


def _measure() -> int:
    from meshtrain.probe.measure import for_plan

    described, text = for_plan()
    print(text, file=sys.stderr)
    print(described, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
