"""The manifests against the fields of Kueue's API and of JobSet's.

Fields, whether they are required and what they hold: apis/kueue/v1beta2/*_types.go and
config/components/crd/bases/*.yaml of kubernetes-sigs/kueue; JobSet: the models of the package kubeflow-trainer-api.
"""

import re

import pytest
import yaml
from refusals import tells

from meshtrain.plan.__main__ import main

NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = rf"({NAME}/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])"


def text(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


# A type, a pattern of a text, a list of one of them, a mapping of labels (str: str), or fields by name, of which those
# with ! are required.
SPECS = {
    "Topology": {"spec!": {"levels!": [{"nodeLabel!": text(LABEL)}]}},
    "ResourceFlavor": {
        "spec": {
            "nodeLabels": {str: str},
            "nodeTaints": list,
            "tolerations": list,
            "topologyName": text(NAME),
        }
    },
    "ClusterQueue": {
        "spec": {
            "resourceGroups": [
                {
                    "coveredResources!": [str],
                    "flavors!": [
                        {
                            "name!": text(NAME),
                            "resources!": [
                                {
                                    "name!": str,
                                    "nominalQuota!": int,
                                    "borrowingLimit": int,
                                    "lendingLimit": int,
                                }
                            ],
                        }
                    ],
                }
            ],
            "cohortName": text(NAME),
            "queueingStrategy": text("StrictFIFO|BestEffortFIFO"),
            "namespaceSelector": {"matchLabels": {str: str}, "matchExpressions": list},
            "preemption": dict,
        }
    },
    "LocalQueue": {"spec!": {"clusterQueue": text(NAME), "stopPolicy": str}},
    "WorkloadPriorityClass": {"value!": int, "description": str},
}
NAMESPACED = {"LocalQueue"}


def check(value, schema, where):
    """Fails where a value is not as the schema says."""
    if isinstance(schema, re.Pattern):
        assert schema.fullmatch(value), where
    elif isinstance(schema, list):
        assert value, where
        for item in value:
            check(item, schema[0], where)
    elif isinstance(schema, type):
        assert type(value) is schema, where
    elif str in schema:
        assert all(type(word) is str for pair in value.items() for word in pair), where
    else:
        fields = {name.rstrip("!"): inner for name, inner in schema.items()}
        assert (
            {name[:-1] for name in schema if name.endswith("!")}
            <= set(value)
            <= set(fields)
        ), where
        for name, inner in value.items():
            check(inner, fields[name], f"{where}.{name}")


@pytest.fixture
def manifests(written, tmp_path, capsys):
    """A function (text) -> the documents that --kueue writes, by file."""

    def made(*text: str) -> dict[str, list[dict]]:
        directory = tmp_path / "out"
        assert (
            main(
                [
                    "--jobs",
                    written(*text),
                    "--cluster",
                    "h100",
                    "--kueue",
                    str(directory),
                ]
            )
            == 0
        )
        return {
            path.name: list(yaml.safe_load_all(path.read_text()))
            for path in directory.iterdir()
        }

    return made


@pytest.mark.thorough
def test_every_field_is_one_of_the_api(manifests):
    found = manifests()
    assert set(found) == {"queues.yaml", "run.yaml", "short.yaml"}
    kinds = [document["kind"] for document in found["queues.yaml"]]
    # One of each, and a second priority
    assert kinds == [*SPECS, "WorkloadPriorityClass"]
    for document in found["queues.yaml"]:
        assert document.pop("apiVersion") == "kueue.x-k8s.io/v1beta2"
        kind, metadata = document.pop("kind"), document.pop("metadata")
        assert set(metadata) == (
            {"name", "namespace"} if kind in NAMESPACED else {"name"}
        )
        assert re.fullmatch(NAME, metadata["name"])
        check(document, SPECS[kind], kind)
    for name in ("run", "short"):
        shipped, document = found[f"{name}.yaml"]
        assert shipped["kind"] == "ConfigMap" and "config.yaml" in str(shipped["data"])
        from kubeflow_trainer_api import models  # takes three seconds

        assert models.JobsetV1alpha2JobSet.from_dict(document).to_dict() == document


def test_the_check_finds_what_is_wrong():
    check(
        {"spec": {"levels": [{"nodeLabel": "kubernetes.io/hostname"}]}},
        SPECS["Topology"],
        "Topology",
    )
    levels: list[list] = [[], [{"nodeLabel": "a b"}], [{"label": "a"}]]
    for wrong in ({}, {"spec": {}}, *({"spec": {"levels": wrong}} for wrong in levels)):
        with pytest.raises(AssertionError):
            check(wrong, SPECS["Topology"], "Topology")


@pytest.mark.thorough
def test_queue_flavor_topology_and_classes_name_each_other(manifests):
    found = manifests()
    by_kind = {document["kind"]: document for document in found["queues.yaml"]}
    (group,) = by_kind["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    # A flavor has as many resources as are covered; a flavor with a topology has a label of nodes: validations of the
    # API.
    assert (
        group["coveredResources"]
        == [resource["name"] for resource in flavor["resources"]]
        == ["nvidia.com/gpu"]
    )
    assert flavor["resources"][0]["nominalQuota"] == 16
    assert flavor["name"] == by_kind["ResourceFlavor"]["metadata"]["name"]
    assert by_kind["ResourceFlavor"]["spec"]["nodeLabels"]
    assert (
        by_kind["ResourceFlavor"]["spec"]["topologyName"]
        == by_kind["Topology"]["metadata"]["name"]
    )
    labels = [level["nodeLabel"] for level in by_kind["Topology"]["spec"]["levels"]]
    assert labels == ["example.com/block", "kubernetes.io/hostname"]
    assert (
        by_kind["LocalQueue"]["spec"]["clusterQueue"]
        == by_kind["ClusterQueue"]["metadata"]["name"]
    )
    classes = {
        d["metadata"]["name"]: d["value"]
        for d in found["queues.yaml"]
        if d["kind"] == "WorkloadPriorityClass"
    }
    assert classes == {"priority-5": 5, "priority-0": 0}
    _, job = found["short.yaml"]
    assert (
        job["metadata"]["namespace"]
        == by_kind["LocalQueue"]["metadata"]["namespace"]
        == "team"
    )
    assert job["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": by_kind["LocalQueue"]["metadata"]["name"],
        "kueue.x-k8s.io/priority-class": "priority-5",
    }
    assert job["spec"]["suspend"] is True


def pods(job: dict) -> dict:
    (replicated,) = job["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]


def test_a_job_takes_what_it_was_given(manifests):
    _, job = manifests()["short.yaml"]
    (container,) = pods(job)["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    # Its config has tensor 2; the fastest layout of 4 devices, and the steps of the job.
    assert {"train.steps=10", "mesh.tensor=1"} <= set(container["command"])
    assert pods(job)["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-required-topology": "kubernetes.io/hostname"
    }


@pytest.mark.parametrize(
    "together, kind",
    [
        ("true", "kueue.x-k8s.io/podset-required-topology"),
        ("false", "kueue.x-k8s.io/podset-preferred-topology"),
    ],
)
def test_a_job_of_several_nodes_asks_for_one_block(manifests, together, kind):
    _, job = manifests(
        f"nodes: 2\njobs: [{{name: run, config: CONFIG, set: [mesh.data=8], together: {together}, priority: -3}}]\n"
        "kueue: {image: i, volume: v, block_label: example.com/block}"
    )["run.yaml"]
    assert pods(job)["metadata"]["annotations"] == {kind: "example.com/block"}
    assert job["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 2
    assert (
        job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "priority-minus-3"
    )


ONE = "jobs: [{name: run, config: CONFIG}"


@pytest.mark.parametrize(
    "text, said",
    [
        (f"{ONE}]", "--kueue needs kueue.image ... job run"),
        (f"{ONE}]\nkueue: {{image: i}}", "--kueue needs kueue.volume"),
        (
            f"{ONE}]\nkueue: {{image: i, volume: v, node_label: gpu}}",
            "kueue.node_label is 'gpu'; ... team=a.",
        ),
        (
            f"{ONE}, {{name: two, config: CONFIG}}]\nkueue: {{image: i, volume: v}}",
            "jobs run and two ... run.directory runs/small",
        ),
        ("jobs: [{name: queues, devices: 1}]", "no job ... name queues"),
        (f"{ONE}]\nkueue: {{image: i, volume: v, queue: A b}}", "kueue.queue is 'A b'"),
        (
            f"{ONE}]\nkueue: {{image: i, volume: v, block_label: a b}}",
            "kueue.block_label is 'a b'",
        ),
    ],
)
def test_mistakes_are_one_sentence(written, tmp_path, capsys, text, said):
    assert main(["--jobs", written(text), "--kueue", str(tmp_path / "out")]) == 2
    found = capsys.readouterr().err
    assert (
        tells(found, said)
        and found.count("\n") == 1
        and not (tmp_path / "out").exists()
    )
