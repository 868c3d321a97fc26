"""The page of metrics, read by prometheus_client's own parsers, and what it counts."""

import numpy as np
import pytest
from fake_serving import fake

from meshtrain.generate.request import Request
from meshtrain.serve.metrics import METRICS, SERVE
from meshtrain.telemetry import catalogue

openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
plain = pytest.importorskip("prometheus_client.parser")


def page(server, parser=openmetrics):
    """{name: {labels: value}} of what a scrape reads."""
    accept = "application/openmetrics-text" if parser is openmetrics else "text/plain"
    answer = server.client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(accept)
    found: dict = {}
    for family in parser.text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = (
                sample.value
            )
    return found


@pytest.mark.parametrize(
    "parser", [openmetrics, plain], ids=["OpenMetrics", "Prometheus"]
)
def test_every_metric_is_on_the_page_and_counts_what_was_done(parser):
    with fake() as server:
        for _ in range(2):
            server.completion(n=2, temperature=0)
        server.completion(stream=True, temperature=1)
        server.completion(prompt=5)
        server.client.get("/nowhere")
        found = page(server, parser)
    for metric in METRICS:
        assert metric.sample + ("_bucket" if metric.bounds else "") in found, (
            metric.name
        )
    value = {
        name.removeprefix(SERVE): values[()]
        for name, values in found.items()
        if () in values
    }
    expected = {
        "ready": 1, "slots": 2, "busy_slots": 0, "queue": 4, "open_requests": 0, "tokens_total": 20, "prompt_tokens_total": 15,
        "first_token_seconds_count": 5, "token_seconds_count": 5, "request_seconds_count": 3,
    }  # fmt: skip
    assert {name: value[name] for name in expected} == expected
    assert value["steps_total"] > 0 and value["compiled_total"] > 0
    requests = found[f"{SERVE}requests_total"]
    assert requests["/v1/completions", "200"] == 3
    assert requests["/v1/completions", "400"] == requests["other", "404"] == 1
    assert 0 < value["first_token_seconds_sum"] < value["request_seconds_sum"] * 2


def test_waiting_and_busy_are_those_of_the_moment():
    with fake(slots=1) as server:
        server.pace.hold()
        tickets = [
            server.engine.submit(Request(np.array([k + 1]), 4), lambda piece: None)
            for k in range(3)
        ]
        server.until(lambda status: status.busy == 1)
        found = page(server)
        assert (found[f"{SERVE}busy_slots"], found[f"{SERVE}waiting"]) == (
            {(): 1},
            {(): 2},
        )
        for ticket in tickets:
            ticket.cancel()


def test_before_a_model_is_loaded_the_page_says_not_ready_and_nothing_of_an_engine():
    with fake() as server:
        server.service.served, served = None, server.service.served
        found = page(server)
        assert found[f"{SERVE}ready"] == {(): 0}
        assert not {f"{SERVE}slots", f"{SERVE}tokens_total"} & found.keys()
        server.service.served = served


def test_names_end_on_their_unit_and_are_no_runs():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.exposed.endswith(metric.unit) for metric in METRICS)
    assert not {metric.exposed for metric in METRICS} & {
        metric.exposed for metric in catalogue.METRICS
    }
    assert all(list(metric.bounds) == sorted(set(metric.bounds)) for metric in METRICS)


@pytest.mark.parametrize("accept", ["*/*", ""])
def test_whoever_asks_for_no_format_gets_the_text_that_every_scraper_parses(accept):
    with fake() as server:
        answer = server.client.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(plain.text_string_to_metric_families(answer.text))
    assert not {"unknown", "untyped"} & {family.type for family in families}
    assert any(family.samples for family in families if family.type == "counter")
