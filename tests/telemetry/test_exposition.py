"""The text for Prometheus, read back by prometheus_client's own parsers."""

import math

import pytest

from meshtrain.telemetry.exposition import (
    Distribution,
    MetricFamily,
    flat,
    render,
    wants_openmetrics,
)

openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
plain = pytest.importorskip("prometheus_client.parser")

FAMILIES = [
    MetricFamily(
        "mt_process",
        "info",
        "what it is",
        samples=[((("run", 'a "b"\\c\nd'), ("rank", "0")), 1)],
    ),
    MetricFamily("mt_loss", "gauge", 'a loss\nof "two" lines\\', samples=[((), 2.25)]),
    MetricFamily(
        "mt_odd",
        "gauge",
        "x",
        samples=[
            ((("k", str(k)),), v)
            for k, v in enumerate([math.nan, math.inf, -math.inf, 1e-300, 7])
        ],
    ),
    MetricFamily(
        "mt_spent_seconds",
        "counter",
        "x",
        "seconds",
        [((("phase", "wait"),), 12.5), ((("phase", "log"),), 0.1)],
    ),
    MetricFamily("mt_empty", "gauge", "no series, so it is not named"),
]


def read(parser, text):
    """{(name, labels): value} of all samples."""
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def written():
    endings = {"info": "_info", "counter": "_total", "gauge": ""}
    return {
        (f.name + endings[f.kind], labels): value
        for f in FAMILIES
        for labels, value in f.samples
    }


@pytest.mark.parametrize(
    "parser", [openmetrics, plain], ids=["OpenMetrics", "Prometheus"]
)
def test_what_is_written_is_what_others_read(parser):
    text = render(FAMILIES, openmetrics=parser is openmetrics)
    assert repr(read(parser, text)) == repr(written()), (
        "by text, since NaN equals nothing"
    )
    assert "mt_empty" not in text


def test_openmetrics_ends_and_names_units_and_the_older_format_does_neither():
    new, old = render(FAMILIES, openmetrics=True), render(FAMILIES, openmetrics=False)
    assert new.endswith("# EOF\n") and "# UNIT mt_spent_seconds seconds\n" in new
    assert "EOF" not in old and "UNIT" not in old
    assert (
        "# TYPE mt_spent_seconds counter\n" in new
        and "# TYPE mt_spent_seconds_total counter\n" in old
    )
    (family,) = (
        f
        for f in openmetrics.text_string_to_metric_families(new)
        if f.name == "mt_loss"
    )
    assert family.documentation == FAMILIES[1].meaning


@pytest.mark.parametrize(
    "parser", [openmetrics, plain], ids=["OpenMetrics", "Prometheus"]
)
def test_a_histogram_counts_what_is_at_most_each_bound(parser):
    seconds = Distribution((0.5, 2.0))
    for value in (0.1, 0.5, 0.6, 2.0, 7.0):
        seconds.add(value)
    family = MetricFamily(
        "mt_took_seconds",
        "histogram",
        "x",
        "seconds",
        distributions=[((("route", "a"),), seconds)],
    )
    found = read(parser, render([family], openmetrics=parser is openmetrics))
    route = ("route", "a")
    assert found == {
        ("mt_took_seconds_bucket", (route, ("le", "0.5"))): 2,
        ("mt_took_seconds_bucket", (route, ("le", "2.0"))): 4,
        ("mt_took_seconds_bucket", (route, ("le", "+Inf"))): 5,
        ("mt_took_seconds_sum", (route,)): pytest.approx(10.2),
        ("mt_took_seconds_count", (route,)): 5,
    }


def test_a_row_becomes_a_series_for_each_label():
    value = {"0": {"heat": 1, "power_cap": 0}, "1": {"heat": 0}}
    assert list(flat(value, ("device", "reason"))) == [
        ((("device", "0"), ("reason", "heat")), 1),
        ((("device", "0"), ("reason", "power_cap")), 0),
        ((("device", "1"), ("reason", "heat")), 0),
    ]
    assert list(flat(1.5, ())) == [((), 1.5)]
    assert (
        list(flat(None, ("device",)))
        == list(flat(1.5, ("device",)))
        == list(flat({"0": 1.5}, ()))
        == []
    )


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("application/*", False),
        ("text/html,*/*;q=0.8", False),
        ("text/plain", False),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
        ),
    ],
)
def test_the_format_is_the_one_that_is_asked_for(accept, expected):
    assert wants_openmetrics(accept) is expected
