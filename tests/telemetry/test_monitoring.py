"""Dashboard and alert rules follow from catalogue and thresholds, and their copies in configs/monitoring/ are those of
now.

A real Prometheus and a real Alertmanager try them, where they are installed: see experiments/watch/servers.py.
"""

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from experiments.watch import servers
from meshtrain.telemetry import dashboard
from meshtrain.telemetry.__main__ import main
from meshtrain.telemetry.catalogue import BY_NAME, METRICS, PREFIX
from meshtrain.telemetry.thresholds import THRESHOLDS, Span, prometheus_rules

COPIES = Path(__file__).parents[2] / "configs/monitoring"
RULES = prometheus_rules()["groups"][0]["rules"]
ALERTS = [rule for rule in RULES if "alert" in rule]
SAMPLES = {metric.sample for metric in METRICS} | {f"{PREFIX}process_info"}
OVER = {metric.processes_name for metric in METRICS if metric.source == "process"}


def test_names_stand_once_and_are_what_prometheus_takes_and_end_on_their_unit():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.exposed)
        assert metric.unit in (
            "",
            "seconds",
            "bytes",
            "ratio",
            "tokens",
            "watts",
            "celsius",
        )
        assert not metric.unit or metric.name.endswith(metric.unit), metric
        assert not metric.name.endswith("_total")


@pytest.mark.parametrize(
    "name, file, content",
    [
        ("dashboard", "grafana-dashboard.json", dashboard.document()),
        ("rules", "prometheus-rules.yaml", prometheus_rules()),
    ],
)
def test_copies_are_those_of_now(name, file, content, capsys):
    assert main([name]) == 0
    printed = capsys.readouterr().out
    assert (COPIES / file).read_text() == printed, (
        f"python -m meshtrain.telemetry {name} > configs/monitoring/{file}"
    )
    assert yaml.safe_load(printed) == content


def test_the_catalogue_names_every_metric_and_every_alert(capsys):
    assert main(["catalogue"]) == 0
    words = capsys.readouterr().out.split()
    assert {
        *(metric.sample for metric in METRICS),
        *(threshold.rule for threshold in THRESHOLDS),
    } <= set(words)
    assert main(["catalogue", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [metric["name"] for metric in content["metrics"]] == list(BY_NAME)
    assert len(content["alerts"]) == len(THRESHOLDS)


def test_each_threshold_has_a_rule_with_its_limit():
    assert [rule["labels"]["rule"] for rule in ALERTS] == [
        threshold.rule for threshold in THRESHOLDS
    ]
    for rule, threshold in zip(ALERTS, THRESHOLDS, strict=True):
        assert rule["labels"]["severity"] == threshold.severity
        if threshold.rule in (
            "loss_spike",
            "throughput_drop",
            "slow_rank",
            "device_memory",
            "memory_limit",
            "machine_memory",
            "goodput_low",
        ):
            assert re.search(rf"[<>] {threshold.fires:g}\b", rule["expr"]), rule["expr"]


def test_queries_name_metrics_of_the_catalogue_only_and_the_dashboard_shows_them_all():
    def named(queries):
        return {
            name for query in queries for name in re.findall(rf"\b{PREFIX}\w+", query)
        }

    shown = named(query for _, query in dashboard.queries())
    assert (
        shown | named(rule["expr"] for rule in RULES) <= SAMPLES | OVER
        and shown >= SAMPLES
    )


def test_no_panel_lies_on_another_or_beside_the_page():
    beside = dashboard.document()["panels"]
    # Grafana moves what is below a row when that is opened, by the height of what the row holds.
    for panels in (
        beside,
        *([row, *row["panels"]] for row in beside if row["type"] == "row"),
    ):
        places = [panel["gridPos"] for panel in panels]
        assert all(
            place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places
        )
        for a, b in combinations(places, 2):
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


def test_numbers_of_now_are_open_and_every_other_row_is_collapsed():
    rows = [panel for panel in dashboard.document()["panels"] if panel["type"] == "row"]
    assert [row["collapsed"] for row in rows] == [False, *[True] * (len(rows) - 1)]
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows)
    # What stands beside the rows is seen at once, and is not much.
    assert len(dashboard.document()["panels"]) - len(rows) < 10
    ids = [panel["id"] for panel in dashboard.panels()]
    assert sorted(ids) == list(range(1, len(ids) + 1))


def test_durations_are_written_as_prometheus_reads_them():
    assert [Span().window(s) for s in (0.2, 1, 20, 60, 90, 600, 3600, 5400)] == [
        "1s",
        "1s",
        "20s",
        "1m",
        "90s",
        "10m",
        "1h",
        "90m",
    ]


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not there (Debian: prometheus)",
)
@pytest.mark.parametrize("scale", [1.0, 1 / 60])
def test_promtool_takes_the_rules(scale, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(prometheus_rules(scale)))
    checked = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


MISSING = [program for program in servers.PROGRAMS if shutil.which(program) is None]


@pytest.mark.thorough
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed")
def test_rules_fire_and_clear_through_real_servers_and_every_query_has_data(tmp_path):
    assert [check for check in servers.measure(tmp_path) if not check.good] == []
