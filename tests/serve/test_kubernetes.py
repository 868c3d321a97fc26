"""configs/serving/kubernetes.yaml against the models that Kubeflow makes of the API servers' own schemas, and against
the server itself.
"""

import re
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models
from starlette.routing import Route

from meshtrain.serve import __main__ as command
from meshtrain.serve.app import application
from meshtrain.serve.listening import CLOSING
from meshtrain.serve.metrics import METRICS, SERVE
from meshtrain.serve.service import Service

SERVING = Path(__file__).parents[2] / "configs/serving"
DOCUMENTS = {
    document["kind"]: document
    for document in yaml.safe_load_all((SERVING / "kubernetes.yaml").read_text())
}
ADAPTER = yaml.safe_load((SERVING / "prometheus-adapter.yaml").read_text())
DEPLOYMENT, AUTOSCALER, MONITOR = (
    DOCUMENTS[k]["spec"]
    for k in ("Deployment", "HorizontalPodAutoscaler", "PodMonitor")
)
POD = DEPLOYMENT["template"]["spec"]
(CONTAINER,) = POD["containers"]
(PORT,) = CONTAINER["ports"]
PROBES = {
    name: CONTAINER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")
}


@pytest.fixture(scope="module")
def options():
    """What the server's own parser makes of the container's command."""
    assert CONTAINER["command"][:3] == ["python", "-m", "meshtrain.serve"]
    return command.parser().parse_args(CONTAINER["command"][3:])


@pytest.fixture(scope="module")
def paths():
    return {
        route.path
        for route in application(Service("model")).routes
        if isinstance(route, Route)
    }


@pytest.mark.parametrize(
    "model, document",
    [
        (models.IoK8sApiCoreV1PodTemplateSpec, DEPLOYMENT["template"]),
        (models.IoK8sApimachineryPkgApisMetaV1LabelSelector, DEPLOYMENT["selector"]),
        (models.IoK8sApiCoreV1Service, DOCUMENTS["Service"]),
        (
            models.IoK8sApimachineryPkgApisMetaV1LabelSelector,
            DOCUMENTS["PodDisruptionBudget"]["spec"]["selector"],
        ),
        (
            models.IoK8sApiAutoscalingV2HorizontalPodAutoscaler,
            DOCUMENTS["HorizontalPodAutoscaler"],
        ),
    ],
)
def test_every_field_is_one_of_the_api(model, document):
    # What a model does not know it drops, and what is of another type it refuses.
    assert model.from_dict(document).to_dict() == document


def test_fields_that_no_model_has_are_those_of_the_api_reference():
    # apps/v1 and policy/v1 are not among Kubeflow's models.
    assert DEPLOYMENT.keys() == {
        "selector",
        "strategy",
        "progressDeadlineSeconds",
        "template",
    }
    assert DEPLOYMENT["strategy"].keys() == {"rollingUpdate"}
    assert DEPLOYMENT["strategy"]["rollingUpdate"].keys() == {
        "maxUnavailable",
        "maxSurge",
    }
    assert DOCUMENTS["PodDisruptionBudget"]["spec"].keys() == {
        "maxUnavailable",
        "selector",
    }
    versions = {kind: document["apiVersion"] for kind, document in DOCUMENTS.items()}
    assert versions == {
        "Deployment": "apps/v1",
        "Service": "v1",
        "PodDisruptionBudget": "policy/v1",
        "HorizontalPodAutoscaler": "autoscaling/v2",
        "PodMonitor": "monitoring.coreos.com/v1",
    }


def test_all_mean_the_same_pods():
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    selectors = (
        DEPLOYMENT["selector"],
        MONITOR["selector"],
        DOCUMENTS["PodDisruptionBudget"]["spec"]["selector"],
    )
    assert all(selector["matchLabels"] == labels for selector in selectors)
    assert DOCUMENTS["Service"]["spec"]["selector"] == labels
    name = DOCUMENTS["Deployment"]["metadata"]["name"]
    assert AUTOSCALER["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": name,
    }


def test_servers_take_the_nodes_of_runs_and_never_runs_those_of_servers():
    text = (SERVING / "sharing.yaml").read_text()
    classes = {one["metadata"]["name"]: one for one in yaml.safe_load_all(text)}
    known = {
        "apiVersion",
        "kind",
        "metadata",
        "value",
        "globalDefault",
        "preemptionPolicy",
        "description",
    }
    for one in classes.values():
        assert (one["apiVersion"], one["kind"]) == (
            "scheduling.k8s.io/v1",
            "PriorityClass",
        )
        assert (
            one.keys() == known
            and not one["globalDefault"]
            and 0 < one["value"] <= 1_000_000_000
        )
    serve, train = classes["meshtrain-serve"], classes["meshtrain-train"]
    assert serve["value"] > train["value"]
    assert (serve["preemptionPolicy"], train["preemptionPolicy"]) == (
        "PreemptLowerPriority",
        "Never",
    )
    assert (
        f"deployment {DOCUMENTS['Deployment']['metadata']['name']} " in text
        and "--priority-class meshtrain-train" in text
    )


def test_the_server_takes_the_command_and_listens_where_it_is_asked(options):
    assert (options.host, options.port) == ("0.0.0.0", PORT["containerPort"])
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert str(options.path.parent) in mounts and {*mounts.values()} == {
        volume["name"] for volume in POD["volumes"]
    }
    asked = [probe["httpGet"]["port"] for probe in PROBES.values()]
    asked += [port["targetPort"] for port in DOCUMENTS["Service"]["spec"]["ports"]]
    asked += [endpoint["port"] for endpoint in MONITOR["podMetricsEndpoints"]]
    assert set(asked) == {PORT["name"]}


def test_what_is_probed_and_scraped_is_a_route_that_needs_no_key(paths):
    asked = {probe["httpGet"]["path"] for probe in PROBES.values()}
    asked |= {endpoint["path"] for endpoint in MONITOR["podMetricsEndpoints"]}
    assert asked == {"/health", "/metrics"} <= paths


def test_the_key_is_where_the_server_looks_for_it():
    (key,) = [one for one in CONTAINER["env"] if one["name"] == command.KEY]
    assert "value" not in key and key["valueFrom"]["secretKeyRef"].keys() == {
        "name",
        "key",
    }


def test_no_probe_ends_a_server_that_loads_or_drains(options):
    seconds = {
        name: probe["periodSeconds"] * probe["failureThreshold"]
        for name, probe in PROBES.items()
    }
    # Liveness is asked only once startup has had its 200, and not once a pod is told to go.
    assert seconds["startup"] >= 1800 and seconds["liveness"] >= 60
    assert DEPLOYMENT["progressDeadlineSeconds"] > seconds["startup"]
    # It is out of the Service before it takes no more.
    assert seconds["readiness"] < options.notice
    assert (
        POD["terminationGracePeriodSeconds"] >= options.notice + options.drain + CLOSING
    )
    assert options.drain >= options.request_timeout


def test_the_pod_may_write_only_where_it_must():
    pod, security = POD["securityContext"], CONTAINER["securityContext"]
    assert (
        pod["runAsNonRoot"]
        and pod["runAsUser"] > 0
        and not POD["automountServiceAccountToken"]
    )
    assert (
        security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    )
    assert security["capabilities"] == {"drop": ["ALL"]}
    by_name = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    written = {
        by_name[volume["name"]] for volume in POD["volumes"] if "emptyDir" in volume
    }
    environment = {one["name"]: one.get("value") for one in CONTAINER["env"]}
    assert written == {
        environment["HOME"],
        environment["JAX_COMPILATION_CACHE_DIR"],
        "/dev/shm",
    }
    assert (
        CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
        == CONTAINER["resources"]["requests"]["nvidia.com/gpu"]
    )


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_the_servers_metrics():
    for rule, metric in zip(
        ADAPTER["rules"]["custom"], AUTOSCALER["metrics"], strict=True
    ):
        assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
        named = set(
            re.findall(rf"{SERVE}\w+", rule["seriesQuery"] + rule["metricsQuery"])
        )
        assert named - {f"{SERVE}ready"} == {
            f"{SERVE}{name}" for name in ("slots", "busy_slots", "waiting")
        }
        assert named <= {known.sample for known in METRICS}
        # Labels that a PodMonitor puts on each series; the adapter fills in <<...>>.
        assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}
        assert set(re.findall("<<(.*?)>>", rule["metricsQuery"])) == {
            ".GroupBy",
            ".LabelMatchers",
        }
        # In thousandths: pods are added before all slots are in use.
        target = metric["pods"]["target"]
        assert (
            target["type"] == "AverageValue"
            and 0 < int(target["averageValue"].removesuffix("m")) < 1000
        )
    unavailable = DOCUMENTS["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    assert unavailable < AUTOSCALER["minReplicas"] <= AUTOSCALER["maxReplicas"]
