"""The command `--jobs`: reads, places, prints, draws."""

import argparse
import json
import math
from collections.abc import Callable

from rich.console import Console

from meshtrain.cluster.cluster import Cluster, known, named, resized
from meshtrain.errors import ConfigError
from meshtrain.plan.jobs import kueue, page, report
from meshtrain.plan.jobs.listed import Jobs, read
from meshtrain.plan.jobs.packing import Packer
from meshtrain.plan.jobs.report import Result
from meshtrain.plan.jobs.requests import Speeds, requests, wanted
from meshtrain.plan.jobs.searched import strategies

OF_A_CONFIG = (
    "config",
    "set",
    "search",
    "devices",
    "write",
    "gantt",
    "csv",
    "compile",
    "measure",
)


def run(options: argparse.Namespace, write: Callable[[str, str], None]) -> int:
    """Runs the command; `write` writes a text to a path. Jobs that do not fit do not make it fail."""
    if flags := [flag for flag in OF_A_CONFIG if getattr(options, flag)]:
        raise ConfigError(
            f"--{flags[0]} and --jobs do not go together: the file of jobs names each one's config and set."
        )
    jobs = read(options.jobs)
    cluster = _cluster(jobs, options.cluster or "h100")
    if options.kueue:
        kueue.check(jobs, cluster, options.kueue)
    result = place(jobs, cluster)
    reasons = [
        sentence
        for request in result.packing.requests
        if (sentence := report.reason(result, request))
    ]
    if options.json:
        print(json.dumps(report.as_json(result), indent=2))
    elif not options.html:
        console = Console(highlight=False)
        console.print(report.render(result))
        for sentence in reasons:
            console.print(f"note: {sentence}", style="yellow", markup=False)
    if options.html:
        write(options.html, page.page(result, reasons))
    if options.kueue:
        for path, text in kueue.files(result, options.kueue).items():
            write(path, text)
    return 0


def place(jobs: Jobs, cluster: Cluster) -> Result:
    """Every strategy's packing of the jobs."""
    speeds = Speeds(cluster)
    return Result(
        jobs,
        strategies(Packer(cluster, requests(jobs, cluster, speeds), speeds), jobs),
        speeds,
    )


def _cluster(jobs: Jobs, name: str) -> Cluster:
    """The cluster of --cluster with the nodes that the file gives; a name without them is as large as all jobs together
    need.
    """

    def together(per_node: int) -> int:
        """Devices of whole nodes that all jobs need at once."""
        return sum(math.ceil(wanted(job) / per_node) * per_node for job in jobs.jobs)

    cluster = known()[name] if name in known() else named(name, together(1))
    if cluster.shared:
        return resized(cluster, together(1))
    if jobs.nodes:
        return resized(cluster, jobs.nodes * cluster.devices_per_node)
    if name in known():
        return resized(cluster, together(cluster.devices_per_node))
    return cluster
