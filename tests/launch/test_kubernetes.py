"""Manifests against the models that Kubeflow makes of the API servers' own schemas (the package kubeflow-trainer-api),
and what they say.
"""

import re
import shutil
import subprocess

import pytest
import yaml

from meshtrain.launch.__main__ import main

KINDS = {  # the names of their models
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
OPTIONS = ["--nodes", "4", "--volume", "runs", "--image", "registry/meshtrain:1"]
OPTIONS += ["--namespace", "team-a", "--time", "1:00:00"]
WAYS = {
    "jobset": ["ConfigMap", "JobSet"],
    "trainjob": ["ConfigMap", "TrainingRuntime", "TrainJob"],
}


@pytest.fixture
def manifests(config, capsys):
    def printed(way: str, *more: str) -> list[dict]:
        assert main([way, "--config", str(config), *OPTIONS, *more]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return printed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--gpus-per-node", "0", "--priority-class", "low"),
        ("--cpus-per-node", "96", "--mount", "/a b", "--memory-per-node", "1Ti"),
    ],
)
def test_every_field_is_one_of_the_api(manifests, way, more):
    from kubeflow_trainer_api import (
        models,
    )  # take two seconds, of every process that collects the tests

    documents = manifests(way, *more)
    assert [document["kind"] for document in documents] == WAYS[way]
    for document in documents:
        # What a model does not know it drops, and what is of another type it refuses.
        assert (
            getattr(models, KINDS[document["kind"]]).from_dict(document).to_dict()
            == document
        )


def _job(documents: list[dict]) -> dict:
    spec = next(
        document["spec"]
        for document in documents
        if document["kind"] in ("JobSet", "TrainingRuntime")
    )
    (replicated,) = spec.get("template", {"spec": spec})["spec"]["replicatedJobs"]
    assert replicated["name"] == "node" and replicated["replicas"] == 1
    return replicated["template"]


def _done(job: dict, code: int, conditions: tuple[str, ...] = ()) -> str:
    """What the Job's controller does about a pod that failed: the action of the first rule that fits, else Count."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In" and codes["values"] == sorted(codes["values"])
        if code in codes["values"] or {
            c["type"] for c in rule.get("onPodConditions", [])
        } & {*conditions}:
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("way", WAYS)
def test_pods_have_a_priority_where_one_is_asked_for(manifests, way):
    names = [
        _job(manifests(way, *more))["spec"]["template"]["spec"].get("priorityClassName")
        for more in ((), ("--priority-class", "low"))
    ]
    assert names == [None, "low"]


@pytest.mark.parametrize("way", WAYS)
def test_who_acts_on_which_exit_code(manifests, way):
    job = _job(manifests(way, "--set", "survive.restarts=7"))
    drained = ("DisruptionTarget",)
    for code, conditions, action in (
        (1, (), "Count"),
        (2, (), "FailJob"),
        (3, (), "FailJob"),
        (75, (), "Ignore"),
        (137, (), "Count"),
        (137, drained, "Ignore"),
        (3, drained, "FailJob"),
    ):
        assert _done(job, code, conditions) == action, (code, conditions)
    assert job["spec"]["backoffLimit"] == 7
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    # Without both, rules on exit codes are not legal, or two supervisors have one name.
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["podReplacementPolicy"] == "Failed"


def _expanded(word: str, variables: dict[str, str]) -> str:
    """As the kubelet does: $(NAME) of a variable that there is, $$ for a dollar sign."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]),
        word,
    )


@pytest.mark.parametrize("way", WAYS)
def test_each_pod_is_told_its_name_and_an_address_that_the_others_resolve(
    manifests, way
):
    odd = "data.source=$(JOB_COMPLETION_INDEX) $$ $x"
    (container,) = _job(manifests(way, "--set", odd))["spec"]["template"]["spec"][
        "containers"
    ]
    words = [
        _expanded(word, {"JOB_COMPLETION_INDEX": "3"}) for word in container["command"]
    ]
    assert words == [
        "python",
        "-m",
        "meshtrain.survive",
        "--config",
        "/etc/meshtrain/config.yaml",
        "--set",
        odd,
        "--set",
        "survive.wanted=4",
        "--node",
        "n3",
        "--address",
        "the-run-s-node-0-3.the-run-s",
    ]
    assert container["workingDir"] == "/work"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_the_trainjob_names_its_runtime(manifests):
    _, runtime, trained = manifests("trainjob")
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert trained["spec"]["runtimeRef"] == reference
    assert _job([runtime])["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert {trained["metadata"]["namespace"], runtime["metadata"]["namespace"]} == {
        "team-a"
    }


@pytest.mark.parametrize("way", WAYS)
def test_the_config_goes_along(manifests, config, way):
    documents = manifests(way)
    pod, shipped = _job(documents)["spec"]["template"]["spec"], documents[0]
    (volume,) = [
        volume["configMap"]["name"]
        for volume in pod["volumes"]
        if "configMap" in volume
    ]
    assert shipped["metadata"] == {"name": volume, "namespace": "team-a"}
    assert shipped["data"] == {"config.yaml": config.read_text()}
    (mount,) = [
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] == "config"
    ]
    assert mount == {"name": "config", "mountPath": "/etc/meshtrain", "readOnly": True}


GPUS = {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    "more, requests, limits",
    [
        ("", {"cpu": "2", "memory": "8Gi"} | GPUS, GPUS),
        ("--gpus-per-node 0", {"cpu": "1", "memory": "4Gi"}, None),
        (
            "--cpus-per-node 96 --memory-per-node 1Ti",
            {"cpu": "96", "memory": "1Ti"} | GPUS,
            {"memory": "1Ti"} | GPUS,
        ),
    ],
)
def test_what_a_node_asks_for(manifests, more, requests, limits):
    pod = _job(manifests("jobset", "--shared-memory", "64Gi", *more.split()))["spec"][
        "template"
    ]["spec"]
    resources = pod["containers"][0]["resources"]
    assert (resources["requests"], resources.get("limits")) == (requests, limits)
    assert {
        "name": "memory",
        "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"},
    } in pod["volumes"]


@pytest.mark.engines
@pytest.mark.parametrize("version", ["1.31", "1.33"])
@pytest.mark.parametrize("way", WAYS)
def test_by_the_schemas_of_the_api_server(manifests, way, version):
    """The Job that a JobSet makes, and the ConfigMap; those of a JobSet and a TrainJob are above."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (0.1 GB)"
    )
    documents = manifests(way, "--memory-per-node", "512Gi")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": documents[0]["metadata"],
    }
    job |= {"spec": _job(documents)["spec"]}
    for document in (documents[0], job):
        validator.validate(document, version, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(job, version, strict=True)


@pytest.mark.engines
@pytest.mark.parametrize("way", WAYS)
def test_kubectl_reads_it(config, tmp_path, capsys, way):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    assert main([way, "--config", str(config), *OPTIONS]) == 0
    (tmp_path / "m.yaml").write_text(capsys.readouterr().out)
    # The one command that asks no server.
    words = [
        "kubectl",
        "label",
        "--local",
        "-f",
        str(tmp_path / "m.yaml"),
        "a=b",
        "-o",
        "name",
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    names = ended.stdout.split()
    assert len(names) == len(WAYS[way]) and names[0] == "configmap/the-run-s-config", (
        ended.stderr
    )
