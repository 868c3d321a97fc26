"""python -m meshtrain.probe: what the links and devices really give, and which is slow."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from meshtrain.allreduce import ALGORITHMS
from meshtrain.cli import DONE, Parser, check_target, command, write_target
from meshtrain.cluster.cluster import Cluster, named
from meshtrain.config import Config, ConfigError, MeshConfig, load, short
from meshtrain.errors import nearest, say
from meshtrain.probe import describe, judge, page, report
from meshtrain.probe.figures import PARTS, Probe

DESCRIPTION = (
    "Measures how fast links and devices really are, and finds the slow ones; start it on every "
    "node, like a run."
)
WOULD = """\
probe measures, on all devices that JAX finds here (or on all nodes, if it is started on each as a run is):

  barrier      how long it takes all to meet, and who comes late
  collectives  what each kind gives along each axis of the mesh, over sizes of message
  pairs        latency and bandwidth between devices, two at a time
  products     how fast each device multiplies matrices, alone and all at once

It takes some seconds on accelerators and one to two minutes on fake CPU devices. Each device is kept busy meanwhile and
should do nothing else. Begin with one of

  meshtrain probe --output cluster.yaml    all of it, and a file for plan --cluster and mesh.cluster
  meshtrain probe --only products          one part, in seconds
  meshtrain probe --json                   all of it, for programs"""
# Which is what XLA does
PROGRAMS = tuple(name for name in ALGORITHMS if name != "psum")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    if not (sys.argv[1:] if arguments is None else arguments):
        print(WOULD)
        return DONE
    options = parser().parse_args(arguments)
    config = _config(options)
    _check(options, config)
    # whoever asks for --help does not wait for JAX
    from meshtrain.probe.measure import Wanted, measure_here

    wanted = Wanted(
        (options.only,) if options.only else PARTS,
        algorithms=_algorithms(options),
        every_pair=options.every_pair,
    )
    with _output_to_errors():
        probe = measure_here(config, wanted, partial(_check_files, options))
    if probe is not None:
        _show(probe, _cluster(options.cluster, probe.size), options)
    return DONE


@contextlib.contextmanager
def _output_to_errors() -> Iterator[None]:
    """Standard output is for the figures alone: Gloo, which joins CPUs of several processes, writes words of its own
    there.
    """
    # Started with its standard output closed, a process has none.
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.probe", description=DESCRIPTION)
    parser.add_config(required=False)
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="the mesh to measure, as in data=4,islands=2,tensor=4 (default: a machine's devices are tensor ranks, "
        "machines are data ranks)",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE|NAME",
        help="a YAML file or an accelerator to compare the figures with",
    )
    parser.add_argument(
        "--every-pair",
        action="store_true",
        help="measures every pair of devices even if there are more than 16, as a device_order needs; takes minutes",
    )
    parser.add_argument(
        "--only", choices=PARTS, help="measures only this part (default: all)"
    )
    parser.add_argument(
        "--algorithms",
        metavar="NAME,...|all",
        help=f"message programs to measure beside XLA's own: {', '.join(PROGRAMS)}",
    )
    parser.add_argument(
        "--json", action="store_true", help="prints one JSON object instead of tables"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="writes a cluster file for meshtrain plan --cluster",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="writes everything as one page, with a picture of the speed between each pair of devices",
    )
    return parser


def _config(options: argparse.Namespace) -> Config | None:
    if options.config and options.mesh:
        raise ConfigError("--mesh and --config both give a mesh; leave one out.")
    if options.set and not options.config:
        raise ConfigError(
            "--set overrides a key of --config FILE, which is missing; --mesh gives a mesh without one."
        )
    if options.config:
        return load(options.config, options.set, reading=True)
    if options.mesh:
        return replace(Config(), mesh=MeshConfig.read(options.mesh))
    return None


def _algorithms(options: argparse.Namespace) -> tuple[str, ...]:
    if options.algorithms in (None, "all"):
        return PROGRAMS if options.algorithms else ()
    names = tuple(dict.fromkeys(options.algorithms.split(",")))
    for name in names:
        if name not in PROGRAMS:
            legal = (
                nearest(name, PROGRAMS) or f"; legal are {', '.join(PROGRAMS)}, or all."
            )
            raise ConfigError(f"--algorithms has {short(repr(name))}{legal}")
    return names


def _check(options: argparse.Namespace, config: Config | None) -> None:
    """Refuses at once what would be refused when all is measured."""
    if options.output and options.only:
        raise ConfigError(
            "--output writes all that a cluster file holds; leave --only out."
        )
    asked = options.algorithms != "all" and _algorithms(options)
    if (
        asked
        and "hierarchical" in asked
        and (config is None or config.mesh.islands == 1)
    ):
        raise ConfigError(
            "--algorithms: hierarchical sums in islands first, and the mesh has none; give islands, as in --mesh "
            "data=4,islands=2."
        )
    if options.algorithms and options.only not in (None, "collectives"):
        raise ConfigError(
            f"--algorithms are of collectives, which --only {options.only} leaves out."
        )
    for path, endings in (
        (options.output, (".yaml", ".yml")),
        (options.html, (".html",)),
    ):
        if path and Path(path).suffix.lower() not in endings:
            raise ConfigError(f"{short(path)}: its name must end in {endings[0]}.")


def _check_files(options: argparse.Namespace, devices: int) -> None:
    """The files that the first process reads and writes; the others may be on machines that have none of them."""
    for path in filter(None, (options.output, options.html)):
        check_target(path)
    _cluster(options.cluster, devices)


def _cluster(name: str | None, devices: int) -> Cluster | None:
    if name is None:
        return None
    cluster = named(name, devices)
    if cluster.devices < devices:
        raise ConfigError(
            f"--cluster {short(name)} describes {cluster.devices} devices, and {devices} are measured."
        )
    return cluster


def _show(probe: Probe, cluster: Cluster | None, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(as_json(probe, cluster), indent=2, allow_nan=False))
    else:
        print(report.to_text(probe, cluster))
    if options.output:
        write_target(options.output, describe.to_yaml(probe))
        if (together := describe.cluster_pairs(probe)) and not together.is_ordered:
            say(
                f"devices that fast links join are no neighbours in the mesh; mesh.cluster={options.output} has it "
                "take them in the order found."
            )
    if options.html:
        write_target(options.html, page.page(probe, cluster))


def as_json(probe: Probe, cluster: Cluster | None) -> dict:
    """The figures, what is slow, and with a cluster the scores."""
    content = probe.as_json() | {
        "findings": [asdict(one) for one in judge.findings(probe, cluster)]
    }
    if cluster:
        for entry, collective in zip(
            content["collectives"], probe.collectives, strict=True
        ):
            entry["score"] = judge.score(cluster, probe, collective)
            for sized in entry["sizes"]:
                sized["described_seconds"] = judge.described(
                    cluster, probe, collective, sized["bytes"]
                )
        content["cluster"] = {
            "name": cluster.name,
            "device_scores": judge.device_scores(cluster, probe),
        }
    return content


if __name__ == "__main__":
    sys.exit(main())
