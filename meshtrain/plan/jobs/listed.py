"""The file of jobs that `--jobs` takes: what runs, on how many devices, and what counts.

    strategy: search
    goal: throughput
    nodes: 16
    jobs:
      - {name: base, config: configs/llama3_8b.yaml, priority: 10, steps: 2000}
      - {name: short, config: configs/llama3_8b.yaml, any_of: [16, 32], set: [train.sequence_length=2048]}
      - {name: other, devices: 8, hours: 2}

A job with a config and no number of devices keeps its mesh; with a number, or several, it has the layout that is
fastest there.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from meshtrain.config.key import key
from meshtrain.config.load import read_section
from meshtrain.config.places import from_file
from meshtrain.errors import ConfigError, short

EXAMPLE = "it needs at least 'jobs: [{name: one, devices: 8}]'"
# Kubernetes puts a name and an index into 63 characters: meshtrain.launch.job.
NAME = "[a-z]([a-z0-9-]*[a-z0-9])?"
LONGEST_NAME = 40
MOST_JOBS = 500


@dataclass(frozen=True)
class JobSpec:
    """A run: a config, or so many devices that nothing more is known of."""

    name: str = key("", "what the report and Kubernetes call it")
    config: str = key(
        "",
        "the YAML file of its run, from this list's folder or the working directory, or the name of one that comes "
        "along; without one only its devices are known",
    )
    set: tuple[str, ...] = key((), "overrides of the config, as in mesh.data=2")
    devices: int = key(
        0,
        "devices that it takes, in the layout that is fastest there; 0: the mesh of the config",
        least=0,
    )
    any_of: tuple[int, ...] = key(
        (),
        "numbers of devices of which any will do, each in the fastest layout",
        least=1,
    )
    priority: int = key(0, "jobs of a higher one are placed first", least=-(2**31) + 1)
    steps: int = key(0, "steps until it is done; 0: those of the config", least=0)
    hours: float = key(
        0.0, "hours until it is done, in place of steps; 0: not known", least=0.0
    )
    together: bool = key(
        False,
        "within one node, or where it needs more within one block of links, or not at all",
    )


@dataclass(frozen=True)
class Kueue:
    """The facts that `--kueue` needs about the Kubernetes cluster."""

    queue: str = key("meshtrain", "name of both queues, the flavor and the topology")
    namespace: str = key("default", "where the jobs are")
    image: str = key(
        "", "a container image that has meshtrain, for the jobs with a config"
    )
    volume: str = key("", "a claim that all their pods may write to (ReadWriteMany)")
    mount: str = key(
        "/work", "where that is in a pod; paths of the configs begin there"
    )
    node_label: str = key(
        "nvidia.com/gpu.present=true", "a label that the nodes of this cluster have"
    )
    block_label: str = key(
        "",
        "the label whose value names a node's block of links; without one only its own name counts",
    )


@dataclass(frozen=True)
class Jobs:
    """Jobs in the order in which they came, and how to place them."""

    strategy: Literal["first_fit", "best_fit", "balance", "search"] = key(
        "search", "which nodes a job is given"
    )
    goal: Literal["utilisation", "latency", "throughput"] = key(
        "utilisation",
        "devices busy now; hours until jobs are done, in the mean; or tokens/s of what runs now",
    )
    nodes: int = key(
        0,
        "nodes of the cluster; 0: those of its file, or of a name as many as all jobs together need",
        least=0,
    )
    seed: int = key(0, "of what the search tries", least=0)
    jobs: tuple[JobSpec, ...] = ()
    kueue: Kueue = field(default_factory=Kueue)


def read(path: str | Path) -> Jobs:
    """The checked jobs of a YAML file; ConfigError (one sentence) otherwise."""
    jobs: Jobs = read_section(Jobs, path, "list of jobs", "--jobs", EXAMPLE)
    source = short(path)
    folder = Path(path).expanduser().parent
    jobs = replace(
        jobs,
        jobs=tuple(
            replace(job, config=from_file(job.config, folder)) for job in jobs.jobs
        ),
    )
    for problem in _problems(jobs):
        raise ConfigError(f"{source}: {problem}")
    return jobs


def _problems(jobs: Jobs) -> Iterator[str]:
    """Yields a sentence for all that is wrong with jobs, job by job."""
    if not 0 < len(jobs.jobs) <= MOST_JOBS:
        yield f"there are {len(jobs.jobs)} jobs; at least 1 and at most {MOST_JOBS} are legal."
    names: set[str] = set()
    for number, job in enumerate(jobs.jobs):
        name = f"jobs[{number}].name is"
        if not re.fullmatch(NAME, job.name) or len(job.name) > LONGEST_NAME:
            yield (
                f"{name} {short(repr(job.name))}; it begins with a letter and has lower-case letters, digits and - "
                f"inside, {LONGEST_NAME} at most."
            )
        if job.name in names:
            yield f"{name} {job.name}, as that of a job before it; give each its own."
        names.add(job.name)
        has = f"job {job.name} has"
        bare = not job.config
        if job.devices and job.any_of:
            yield f"{has} both devices and any_of; give one of them."
        if bare and not job.devices and not job.any_of:
            yield f"{has} no config, devices or any_of; give one of them."
        if job.steps and job.hours:
            yield f"{has} both steps and hours; give one of them."
        if bare and (job.steps or job.set):
            what = "steps" if job.steps else "set"
            yield f"{has} {what} but no config; give one, or hours in place of steps."
        if jobs.goal == "latency" and bare and not job.hours:
            yield f"{has} no hours, which goal: latency needs of a job without a config."
