"""`jobset` and `trainjob`: manifests for Kubernetes, of one indexed Job with a pod a node.

Who acts on which exit code, by the Job's own rules (batch/v1, podFailurePolicy, in their order): 2 and 3 fail the Job, and so the set,
at once. A pod that stopped (75) or was drained or preempted (DisruptionTarget) is started again, and not counted. Any other end, such as
a killed supervisor, is counted against survive.restarts; its pod is started again too. A new pod has the name of the old one, which has
ended by then, and its supervisor joins the run that went on without it. The first pod to end with 0 says that the run is done
(successPolicy, Kubernetes 1.31). So nothing is left for a restart of the whole set, which would start healthy pods anew.

- JobSet: jobset.x-k8s.io/v1alpha2. A pod is reached as NAME-node-0-INDEX.NAME.
- TrainJob: trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2. A TrainJob has no rules on exit codes, its runtime has: both are printed.
"""

import argparse

from meshtrain.cli import STOPPED, USAGE, Parser
from meshtrain.launch.job import GRACE, Job, absolute, add_engine, add_time, engine_job, seconds, word
from meshtrain.launch.manifest import dumped
from meshtrain.launch.outcome import GIVEN_UP

NODE = "node"  # of the replicated job and of its container, as Kubeflow Trainer looks for them
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
INDEX = "$(JOB_COMPLETION_INDEX)"  # the kubelet puts it in


def add(parser: Parser) -> None:
    add_engine(parser)
    add_time(parser)
    parser.add_argument("--image", required=True, help="a container image that has meshtrain")
    parser.add_argument("--namespace", type=word)
    parser.add_argument(
        "--volume", required=True, type=word, metavar="CLAIM", help="a claim that all pods may write to (ReadWriteMany)"
    )
    parser.add_argument(
        "--mount", default="/work", type=absolute, help="where it is; paths of the config begin there; default: /work"
    )


def jobset(options: argparse.Namespace) -> str:
    job = engine_job(options)
    return dumped(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job, options),
            "spec": _set(job, options, {"parallelism": job.nodes, "completions": job.nodes}, {}),
        }
    )


def trainjob(options: argparse.Namespace) -> str:
    job = engine_job(options)
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, options),
        "spec": {"mlPolicy": {"numNodes": job.nodes}, "template": {"spec": _set(job, options, {}, ANCESTOR)}},
    }
    trained = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, options),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {"numNodes": job.nodes},
        },
    }
    return dumped(runtime, trained)


def _metadata(job: Job, options: argparse.Namespace) -> dict:
    return {"name": job.name} | ({"namespace": options.namespace} if options.namespace else {})


def _set(job: Job, options: argparse.Namespace, size: dict, labels: dict) -> dict:
    """A JobSet's spec. It is not restarted: its Job starts pods again."""
    template = {"metadata": {"labels": labels}} if labels else {}
    limit = {"activeDeadlineSeconds": seconds(options.time)} if options.time else {}
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [USAGE, GIVEN_UP]}},
        {"action": "Ignore", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [STOPPED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
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
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template | {"spec": spec}}],
    }


def _pod(job: Job, options: argparse.Namespace) -> dict:
    gpus = {"nvidia.com/gpu": str(job.devices)} if job.devices else {}
    cores = {"cpu": str(options.cpus_per_node)} if options.cpus_per_node else {}
    resources = {key: value for key, value in (("requests", cores | gpus), ("limits", gpus)) if value}
    # "$$" stands for a dollar sign; what a user gave names no variable of the kubelet.
    words = [word.replace("$", "$$") for word in job.supervisor]
    container = {
        "name": NODE,
        "image": options.image,
        "command": [*words, "--node", f"n{INDEX}", "--address", f"{job.name}-{NODE}-0-{INDEX}.{job.name}"],
        "workingDir": options.mount,
        **({"resources": resources} if resources else {}),
        "volumeMounts": [{"name": "runs", "mountPath": options.mount}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        # NCCL needs more shared memory than the 64 MB that a container has by default.
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
