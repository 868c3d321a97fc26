"""The catalogue: names are of one form, and stand once."""

import re

from meshtrain.telemetry.catalogue import BY_NAME, METRICS


def test_each_name_stands_once():
    assert len(BY_NAME) == len(METRICS)


def test_names_are_what_prometheus_takes_and_end_on_their_unit():
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.unit in ("", "seconds", "bytes", "ratio", "tokens", "watts", "celsius")
        assert not metric.unit or metric.name.endswith(metric.unit), metric
        assert not metric.name.endswith("_total")
