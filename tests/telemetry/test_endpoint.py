"""The page of metrics over HTTP: each process's own, and on the first one what all have."""

import socket
import time
import urllib.error
import urllib.request

import pytest

from meshtrain.telemetry.endpoint import Board, Endpoint

parser = pytest.importorskip("prometheus_client.openmetrics.parser")


def served(rank=0, processes=0, totals=None):
    board = Board(rank, f"host{rank}", "runs/x", totals or {"tokens": 300.0}, 10)
    board({"step": 2, "loss": 2.5, "eval_loss": 3.0, "tokens": 100, "time": 1.0}, "step")
    board({"step": 3, "loss": None, "tokens": 100, "data_wait_seconds": 0.5, "time": 2.0}, "step")
    for seconds in (1.0, 2.0):
        board(
            {
                "rank": rank,
                "cpu_ratio": 0.5,
                "phase_seconds": {"wait": seconds},
                "device_power_watts": {"0": 700.0, "1": 500.0},
            },
            "process",
        )
    for other in range(1, processes):
        board(
            {
                "rank": other,
                "cpu_ratio": 0.5 + other / 10,
                "device_power_watts": {"0": 600.0},
                "phase_seconds": {"wait": other},
            },
            "process",
        )
    return Endpoint("127.0.0.1", 0, board)


def fetched(url, accept="application/openmetrics-text"):
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def series(text):
    return {
        (sample.name, *(f"{k}={v}" for k, v in sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def endpoint():
    found = served()
    yield found
    found.close()


def test_a_step_and_a_sample_are_read_over_http(endpoint):
    kind, text = fetched(endpoint.url)
    assert kind.startswith("application/openmetrics-text")
    found = series(text)
    assert found["meshtrain_step",] == 3
    assert found["meshtrain_eval_loss",] == 3.0, "of the last evaluation"
    assert ("meshtrain_loss",) not in found, "an unknown value is left out"
    assert found["meshtrain_tokens_total",] == 300.0
    assert found["meshtrain_phase_seconds_total", "phase=wait"] == 3.0
    assert found["meshtrain_device_power_watts", "device=1"] == 500.0
    assert found["meshtrain_process_info", "run=runs/x", "rank=0", "host=host0"] == 1
    assert not any(name.startswith("meshtrain_processes_") for name, *_ in found), "one process needs no summary of all"


def test_the_older_format_and_other_paths(endpoint):
    kind, text = fetched(endpoint.url, "text/plain")
    assert kind.startswith("text/plain; version=0.0.4") and "# EOF" not in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetched(endpoint.url.replace("metrics", "etc/passwd"))


def test_the_first_process_serves_the_least_the_middle_and_the_greatest_of_all_with_their_ranks():
    endpoint = served(processes=4)
    found = series(fetched(endpoint.url)[1])
    endpoint.close()
    assert found["meshtrain_processes_cpu_ratio", "over=median"] == 0.6
    assert found["meshtrain_processes_rank", "metric=cpu_ratio", "over=median"] == 1
    assert found["meshtrain_processes_cpu_ratio", "over=max"] == 0.8
    assert found["meshtrain_processes_rank", "metric=cpu_ratio", "over=max"] == 3
    assert found["meshtrain_processes_device_power_watts", "over=min"] == 500.0
    assert found["meshtrain_processes_rank", "metric=device_power_watts", "over=min"] == 0
    assert found["meshtrain_processes_phase_seconds", "phase=wait", "over=max"] == 3


def test_other_processes_leave_the_steps_metrics_to_the_first():
    endpoint = served(rank=3)
    found = series(fetched(endpoint.url)[1])
    endpoint.close()
    assert ("meshtrain_step",) not in found and ("meshtrain_tokens_total",) not in found
    assert found["meshtrain_cpu_ratio",] == 0.5


def summed_up(endpoint):
    return any(name.startswith("meshtrain_processes_") for name, *_ in series(fetched(endpoint.url)[1]))


def test_a_process_that_fell_silent_is_left_out(monkeypatch):
    endpoint, began, found = served(processes=3), time.monotonic(), []
    for seconds in (5, 25, 100):
        monkeypatch.setattr("meshtrain.telemetry.endpoint.time.monotonic", lambda at=began + seconds: at)
        found.append(summed_up(endpoint))
    endpoint.close()
    assert found == [True, True, False]


def test_many_processes_are_summed_up_beside_the_scrapes(monkeypatch):
    monkeypatch.setattr("meshtrain.telemetry.endpoint.FEW", 2)
    endpoint = served(processes=3)
    before = summed_up(endpoint)
    endpoint.tick(0.0)
    after = summed_up(endpoint)
    endpoint.close()
    assert (before, after) == (False, True)


@pytest.mark.parametrize("port", ["taken", 65536])
def test_a_port_that_cannot_be_had_is_a_sentence(port, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = Endpoint("127.0.0.1", other.getsockname()[1] if port == "taken" else port, Board(0, "", "", {}, 1))
    assert not endpoint.url
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("training goes on without.") and "cannot be served on 127.0.0.1:" in said
    endpoint.close()


def test_the_port_is_free_after_the_end():
    first = served()
    port = int(first.url.split(":")[2].split("/")[0])
    first.close()
    second = Endpoint("127.0.0.1", port, Board(0, "", "", {}, 1))
    assert second.url == first.url
    second.close()
