"""The page of metrics over HTTP: each process's own, and on the first one what all have."""

import socket
import time
import urllib.error
import urllib.request

import pytest

from meshtrain.telemetry.endpoint import Board, Endpoint

parser = pytest.importorskip("prometheus_client.openmetrics.parser")


@pytest.fixture
def served():
    """Makes endpoints that have heard of two steps, and of samples of so many processes."""
    endpoints = []

    def serve(rank=0, processes=0):
        board = Board(rank, f"host{rank}", "runs/x", {"tokens": 300.0}, 10)
        board(
            {"step": 2, "loss": 2.5, "eval_loss": 3.0, "tokens": 100, "time": 1.0},
            "step",
        )
        board(
            {
                "step": 3,
                "loss": None,
                "tokens": 100,
                "data_wait_seconds": 0.5,
                "time": 2.0,
            },
            "step",
        )
        power = {"device_power_watts": {"0": 700.0, "1": 500.0}}
        for seconds in (1.0, 2.0):
            board(
                {"rank": rank, "cpu_ratio": 0.5, "phase_seconds": {"wait": seconds}}
                | power,
                "process",
            )
        for other in range(1, processes):
            row = {
                "rank": other,
                "cpu_ratio": 0.5 + other / 10,
                "device_power_watts": {"0": 600.0},
            }
            board(row | {"phase_seconds": {"wait": other}}, "process")
        endpoints.append(Endpoint("127.0.0.1", 0, board))
        return endpoints[-1]

    yield serve
    for endpoint in endpoints:
        endpoint.close()


def fetched(url, accept="application/openmetrics-text"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def series(endpoint):
    kind, text = fetched(endpoint.url)
    assert kind.startswith("application/openmetrics-text")
    return {
        (sample.name, *(f"{k}={v}" for k, v in sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def sums_up(endpoint):
    return any(name.startswith("meshtrain_processes_") for name, *_ in series(endpoint))


def test_a_step_and_a_sample_are_read_over_http(served):
    endpoint = served()
    values = series(endpoint)
    assert values["meshtrain_step",] == 3
    assert values["meshtrain_eval_loss",] == 3.0, "of the last evaluation"
    assert ("meshtrain_loss",) not in values, "an unknown value is left out"
    assert values["meshtrain_tokens_total",] == 300.0
    assert values["meshtrain_phase_seconds_total", "phase=wait"] == 3.0
    assert values["meshtrain_device_power_watts", "device=1"] == 500.0
    assert values["meshtrain_process_info", "run=runs/x", "rank=0", "host=host0"] == 1
    assert not sums_up(endpoint), "one process needs no summary"


def test_the_older_format_and_other_paths(served):
    url = served().url
    kind, text = fetched(url, "text/plain")
    assert kind.startswith("text/plain; version=0.0.4") and "# EOF" not in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetched(url.replace("metrics", "etc/passwd"))


def test_the_first_process_serves_the_least_the_middle_and_the_greatest_of_all_with_their_ranks(
    served,
):
    values = series(served(processes=4))
    for name, over, value, rank in (
        ("cpu_ratio", "median", 0.6, 1),
        ("cpu_ratio", "max", 0.8, 3),
        ("device_power_watts", "min", 500.0, 0),
    ):
        assert values[f"meshtrain_processes_{name}", f"over={over}"] == value
        assert (
            values["meshtrain_processes_rank", f"metric={name}", f"over={over}"] == rank
        )
    assert values["meshtrain_processes_phase_seconds", "phase=wait", "over=max"] == 3


def test_other_processes_leave_the_steps_metrics_to_the_first(served):
    values = series(served(rank=3))
    assert ("meshtrain_step",) not in values and (
        "meshtrain_tokens_total",
    ) not in values
    assert values["meshtrain_cpu_ratio",] == 0.5


def test_a_process_that_fell_silent_is_left_out(served, monkeypatch):
    endpoint, began, summed = served(processes=3), time.monotonic(), []
    for seconds in (5, 25, 100):
        monkeypatch.setattr(
            "meshtrain.telemetry.endpoint.time.monotonic", lambda at=began + seconds: at
        )
        summed.append(sums_up(endpoint))
    assert summed == [True, True, False]


def test_many_processes_are_summed_up_beside_the_scrapes(served, monkeypatch):
    monkeypatch.setattr("meshtrain.telemetry.endpoint.FEW", 2)
    endpoint = served(processes=3)
    assert not sums_up(endpoint)
    endpoint.on_tick(0.0)
    assert sums_up(endpoint)


@pytest.mark.parametrize("port", ["taken", 65536])
def test_a_port_that_cannot_be_had_is_a_sentence(port, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = Endpoint(
            "127.0.0.1",
            other.getsockname()[1] if port == "taken" else port,
            Board(0, "", "", {}, 1),
        )
    assert not endpoint.url
    (said,) = capsys.readouterr().err.splitlines()
    assert (
        said.endswith("training goes on without.")
        and "cannot be served on 127.0.0.1:" in said
    )
    endpoint.close()


def test_the_port_is_free_after_the_end(served):
    first = served()
    first.close()
    second = Endpoint(
        "127.0.0.1", int(first.url.split(":")[2].split("/")[0]), Board(0, "", "", {}, 1)
    )
    assert second.url == first.url
    second.close()
