"""The same placement as Kueue is told of it: what there is, who may have how much, which job goes first.

    queues.yaml  Topology               block of links, then the node itself
                 ResourceFlavor         the nodes, by a label of theirs, and their topology
                 ClusterQueue           the quota: all devices of the cluster
                 LocalQueue             where the jobs of a namespace wait
                 WorkloadPriorityClass  one for each priority
    NAME.yaml    ConfigMap, JobSet      as `meshtrain.launch.kubernetes` writes them, with its queue, its priority and
                                        where its pods belong

Kueue (kueue.x-k8s.io/v1beta2, apis/kueue/v1beta2 in kubernetes-sigs/kueue) chooses nodes by itself. It is told the
nodes of each job in the placement and the devices on each, and to keep a job in one block where it can, or must
(`together`).
"""

import re
from pathlib import Path
from typing import Any

import yaml

from meshtrain.cli import Parser
from meshtrain.cluster.cluster import Cluster
from meshtrain.errors import ConfigError, refusal, say, short
from meshtrain.launch import kubernetes
from meshtrain.launch.job import manifest
from meshtrain.plan.jobs.listed import Jobs, JobSpec
from meshtrain.plan.jobs.report import Result
from meshtrain.plan.jobs.requests import JobShape, configured, settings

Manifest = dict[str, Any]
API = "kueue.x-k8s.io/v1beta2"
GPU = "nvidia.com/gpu"
HOSTNAME = "kubernetes.io/hostname"
QUEUES = "queues.yaml"
# As the API takes them.
NAME = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL = rf"({NAME}(\.{NAME})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LEGAL = {
    "queue": (NAME, "lower-case letters, digits and - inside are legal"),
    "namespace": (NAME, "lower-case letters, digits and - inside are legal"),
    "block_label": (f"({LABEL})?", "write a label's name, as in example.com/block"),
    "node_label": (
        f"{LABEL}=[A-Za-z0-9._-]+",
        "write a label and its value, as in team=a",
    ),
}


def check(jobs: Jobs, cluster: Cluster, directory: str) -> None:
    """Refuses at once what would be found missing when all is placed, and makes the directory."""
    if cluster.accelerator.platform != "gpu":
        raise ConfigError(
            f"--kueue is for NVIDIA GPUs ({GPU}); cluster {cluster.name} has {cluster.accelerator.name}."
        )
    with_config = [job.name for job in jobs.jobs if job.config]
    for name in ("image", "volume"):
        if with_config and not getattr(jobs.kueue, name):
            raise ConfigError(
                f"--kueue needs kueue.{name} in the file of jobs: job {with_config[0]} has a config, so that a JobSet "
                "is written."
            )
    for name, (pattern, legal) in LEGAL.items():
        value = getattr(jobs.kueue, name)
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"kueue.{name} is {short(repr(value))}; {legal}.")
    if any(job.name == Path(QUEUES).stem for job in jobs.jobs):
        raise ConfigError(
            f"--kueue writes {QUEUES} and a file for each job, so that no job can have the name {Path(QUEUES).stem}."
        )
    owners: dict[str, str] = {}
    for job in jobs.jobs:
        if not job.config:
            continue
        run = configured(job).run.directory
        if (other := owners.setdefault(run, job.name)) != job.name:
            raise ConfigError(
                f"--kueue: jobs {other} and {job.name} both have run.directory {short(run)}; give each its own, as in "
                f"set: [run.directory=runs/{job.name}]."
            )
    try:
        Path(directory).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--kueue {short(directory)}: no such directory can be made: {refusal(error)}."
        ) from None


def files(result: Result, directory: str) -> dict[str, str]:
    """Path -> text of the manifests. A job that has no config gets no JobSet, and one that fits nowhere none either."""
    manifests = {str(Path(directory) / QUEUES): manifest(*queues(result))}
    bare = []
    for request in result.packing.requests:
        if not request.job.config:
            bare.append(request.job.name)
        elif request.shapes:
            placed = result.placed.get(request.job.name)
            shape = placed.shape if placed else request.shapes[0]
            documents = jobset(request.job, shape, result.jobs)
            manifests[str(Path(directory) / f"{request.job.name}.yaml")] = manifest(
                *documents
            )
    if bare:
        say(
            f"{', '.join(bare)}: without a config there is no JobSet; give yours the label {_QUEUE}: "
            f"{result.jobs.kueue.queue}."
        )
    return manifests


_QUEUE = "kueue.x-k8s.io/queue-name"
_PRIORITY = "kueue.x-k8s.io/priority-class"
# Of the nodes of a block, or where that is only a wish of one block after the other.
_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"


def queues(result: Result) -> list[Manifest]:
    """The objects that say what there is and who may have it: one flavor, all devices as the quota of one queue."""
    kueue = result.jobs.kueue
    cluster = result.packing.cluster
    label, _, value = kueue.node_label.partition("=")
    named = {"name": kueue.queue}
    levels = [kueue.block_label] if kueue.block_label else []
    quota = {"name": GPU, "nominalQuota": cluster.devices}
    group = {
        "coveredResources": [GPU],
        "flavors": [{"name": kueue.queue, "resources": [quota]}],
    }
    mine = {"matchLabels": {"kubernetes.io/metadata.name": kueue.namespace}}
    priorities = sorted({job.priority for job in result.jobs.jobs}, reverse=True)
    return [
        _object(
            "Topology",
            named,
            spec={"levels": [{"nodeLabel": name} for name in (*levels, HOSTNAME)]},
        ),
        _object(
            "ResourceFlavor",
            named,
            spec={"nodeLabels": {label: value}, "topologyName": kueue.queue},
        ),
        # A job that has no room does not hold up those behind it, as in `meshtrain.plan.jobs.packing`.
        _object(
            "ClusterQueue",
            named,
            spec={
                "namespaceSelector": mine,
                "queueingStrategy": "BestEffortFIFO",
                "resourceGroups": [group],
            },
        ),
        _object(
            "LocalQueue",
            named | {"namespace": kueue.namespace},
            spec={"clusterQueue": kueue.queue},
        ),
        *(
            _object("WorkloadPriorityClass", {"name": _class(priority)}, value=priority)
            for priority in priorities
        ),
    ]


def _object(kind: str, metadata: dict[str, str], **content: Any) -> Manifest:
    return {"apiVersion": API, "kind": kind, "metadata": metadata, **content}


def _class(priority: int) -> str:
    return f"priority-minus-{-priority}" if priority < 0 else f"priority-{priority}"


def jobset(job: JobSpec, shape: JobShape, jobs: Jobs) -> list[Manifest]:
    """A job's config and its JobSet for the nodes and devices that it was given, which Kueue lets start when there is
    room.
    """
    kueue = jobs.kueue
    assert shape.config is not None
    overrides = [*job.set, *settings(configured(job), shape.config)]
    if job.steps:
        overrides.append(f"train.steps={job.steps}")
    words = [
        "--config",
        job.config,
        "--name",
        job.name,
        "--nodes",
        str(shape.nodes),
        "--gpus-per-node",
        str(shape.each),
        "--image",
        kueue.image,
        "--volume",
        kueue.volume,
        "--mount",
        kueue.mount,
        "--namespace",
        kueue.namespace,
    ]
    for override in overrides:
        words += ["--set", override]
    parser = Parser(prog="python -m meshtrain.launch jobset")
    kubernetes.add(parser)
    *configs, document = yaml.safe_load_all(kubernetes.jobset(parser.parse_args(words)))
    document["metadata"]["labels"] = {
        _QUEUE: kueue.queue,
        _PRIORITY: _class(job.priority),
    }
    document["spec"]["suspend"] = True
    (replicated,) = document["spec"]["replicatedJobs"]
    level = kueue.block_label if kueue.block_label and shape.nodes > 1 else HOSTNAME
    kind = (
        _REQUIRED
        if shape.nodes == 1 or (job.together and kueue.block_label)
        else _PREFERRED
    )
    replicated["template"]["spec"]["template"]["metadata"] = {
        "annotations": {kind: level}
    }
    return [*configs, document]
