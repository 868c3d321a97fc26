"""`jobset` and `trainjob`: manifests for Kubernetes, of one indexed Job with a pod a node.

Who acts on which exit code, by the Job's own rules (batch/v1, podFailurePolicy, in their order): 2 and 3 fail the Job,
and so the set, at once. A pod that stopped (75) or was drained or preempted (DisruptionTarget) is started again, and
not counted. Any other end, such as a killed supervisor, is counted against survive.restarts; its pod is started again
too. A new pod has the name of the old one, which has ended by then, and its supervisor joins the run that went on
without it. The first pod to end with 0 says that the run is done (successPolicy, Kubernetes 1.31). So nothing is left
for a restart of the whole set, which would start healthy pods anew.

The config's file goes along as a ConfigMap; data and runs lie in a volume that all pods share.

- JobSet: jobset.x-k8s.io/v1alpha2. A pod is reached as NAME-node-0-INDEX.NAME.
- TrainJob: trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2. A TrainJob has no rules on exit codes, its runtime has:
  both are printed.
"""

import argparse
import shlex
from pathlib import Path

from meshtrain.cli import STOPPED, USAGE, Parser
from meshtrain.config.imports import files
from meshtrain.config.load import config_files
from meshtrain.config.places import config_file
from meshtrain.errors import ConfigError, short
from meshtrain.launch import GIVEN_UP
from meshtrain.launch.job import (
    GRACE,
    Launcher,
    LaunchJob,
    add_engine,
    add_mount,
    add_time,
    engine_job,
    manifest,
    seconds,
    text_of,
    word,
)

CONFIG = "/etc/meshtrain/config.yaml"  # in a pod
MEMORY = 4  # GiB that a device's process asks for, if nothing is said
# Of the replicated job and of its container, as Kubeflow Trainer looks for them
NODE = "node"
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
INDEX = "$(JOB_COMPLETION_INDEX)"  # the kubelet puts it in


def add(parser: Parser) -> None:
    add_engine(parser)
    add_time(parser)
    parser.add_argument(
        "--image", required=True, help="a container image that has meshtrain"
    )
    parser.add_argument("--namespace", type=word)
    parser.add_argument(
        "--volume",
        required=True,
        type=word,
        metavar="CLAIM",
        help="a claim that all pods may write to (ReadWriteMany)",
    )
    add_mount(parser)
    parser.add_argument(
        "--memory-per-node",
        type=_quantity,
        metavar="SIZE",
        help=f"asked for, and not exceeded, as in 512Gi (default: {MEMORY}Gi a device asked for, no limit)",
    )
    parser.add_argument(
        "--priority-class",
        type=word,
        metavar="NAME",
        help="of the pods, see configs/serving/sharing.yaml",
    )
    parser.add_argument(
        "--shared-memory",
        type=_quantity,
        default="16Gi",
        metavar="SIZE",
        help="of /dev/shm, a part of a node's memory",
    )


def jobset(options: argparse.Namespace) -> str:
    job = engine_job(options, CONFIG)
    return manifest(
        _config(job, options),
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job, options),
            "spec": _set(
                job, options, {"parallelism": job.nodes, "completions": job.nodes}, {}
            ),
        },
    )


def trainjob(options: argparse.Namespace) -> str:
    job = engine_job(options, CONFIG)
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, options),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes},
            "template": {"spec": _set(job, options, {}, ANCESTOR)},
        },
    }
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": job.name,
    }
    trained = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, options),
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": job.nodes}},
    }
    return manifest(_config(job, options), runtime, trained)


def _config(job: LaunchJob, options: argparse.Namespace) -> dict:
    metadata = _metadata(job, options) | {"name": f"{job.name}-config"}
    file, *bases = config_files(config_file(options.config))
    if bases:
        whole = f"meshtrain train --config {shlex.quote(str(file))} --print-config > whole.yaml"
        raise ConfigError(
            f"{short(file)} has a base, and a job holds one config; {whole} writes it."
        )
    data = {Path(CONFIG).name: Path(file).read_text(), **files(job.imports)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _metadata(job: LaunchJob, options: argparse.Namespace) -> dict:
    return {"name": job.name} | (
        {"namespace": options.namespace} if options.namespace else {}
    )


def _set(job: LaunchJob, options: argparse.Namespace, size: dict, labels: dict) -> dict:
    """Returns a JobSet's spec. It is not restarted: its Job starts pods again."""
    template = {"metadata": {"labels": labels}} if labels else {}
    limit = {"activeDeadlineSeconds": seconds(options.time)} if options.time else {}

    def match_codes(action: str, *codes: int) -> dict:
        return {
            "action": action,
            "onExitCodes": {
                "containerName": NODE,
                "operator": "In",
                "values": list(codes),
            },
        }

    drained = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    rules = [
        match_codes("FailJob", USAGE, GIVEN_UP),
        match_codes("Ignore", STOPPED),
        drained,
    ]
    spec = {
        "completionMode": "Indexed",
        **size,
        **limit,
        "backoffLimit": job.restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": {"spec": _pod(job, options)},
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": NODE, "replicas": 1, "template": template | {"spec": spec}}
        ],
    }


def _pod(job: LaunchJob, options: argparse.Namespace) -> dict:
    gpus = {"nvidia.com/gpu": str(job.devices)} if job.devices else {}
    memory = options.memory_per_node
    devices = max(1, job.devices)
    asked = {
        "cpu": str(options.cpus_per_node or devices),
        "memory": memory or f"{MEMORY * devices}Gi",
    }
    limits = gpus | ({"memory": memory} if memory else {})
    resources = {"requests": asked | gpus} | ({"limits": limits} if limits else {})
    # "$$" stands for a dollar sign; what a user gave names no variable of the kubelet.
    words = [word.replace("$", "$$") for word in job.supervisor]
    container = {
        "name": NODE,
        "image": options.image,
        "command": [
            *words,
            "--node",
            f"n{INDEX}",
            "--address",
            f"{job.name}-{NODE}-0-{INDEX}.{job.name}",
        ],
        "workingDir": options.mount,
        "resources": resources,
        "volumeMounts": [
            {"name": "runs", "mountPath": options.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
            {
                "name": "config",
                "mountPath": CONFIG.rpartition("/")[0],
                "readOnly": True,
            },
        ],
    }
    priority = (
        {"priorityClassName": options.priority_class} if options.priority_class else {}
    )
    return {
        "restartPolicy": "Never",
        **priority,
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        # NCCL needs more shared memory than the 64 MB that a container has by default.
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}},
            {
                "name": "memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory},
            },
            {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        ],
    }


_quantity = text_of("[1-9][0-9]{0,8}(Mi|Gi|Ti)", "is not a size; write it as 512Gi")

LAUNCHERS = {
    "jobset": Launcher(
        "print a Kubernetes JobSet", add, text=jobset, hint="kubectl apply -f it"
    ),
    "trainjob": Launcher(
        "print a Kubeflow TrainJob", add, text=trainjob, hint="kubectl apply -f it"
    ),
}
