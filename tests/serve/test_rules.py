"""Alerts of servers (configs/serving/rules.yaml): Prometheus' own promtool takes them, and says when each fires and
when not.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshtrain.serve.metrics import METRICS, SERVE

SERVING = Path(__file__).parents[2] / "configs/serving"
RULES = SERVING / "rules.yaml"
ALERTS = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
ADAPTER = yaml.safe_load((SERVING / "prometheus-adapter.yaml").read_text())
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool: not installed (Debian: prometheus)",
)
A = 'job="serve", instance="a"'
ANSWERS = f'meshtrain_serve_requests_total{{{A}, route="/v1/completions", code="%s"}}'
FIRST = f'meshtrain_serve_first_token_seconds_bucket{{{A}, le="%s"}}'
# Series, a sample a minute: of a server that is well, and by rule what differs, with a minute at which it is still
# quiet and one at which it fires.
WELL = {
    f"meshtrain_serve_ready{{{A}}}": "1x60",
    f"meshtrain_serve_busy_slots{{{A}}}": "3x60",
    f"meshtrain_serve_tokens_total{{{A}}}": "0+600x60",
    ANSWERS % 200: "0+60x60",
    ANSWERS % 429: "0x60",
    ANSWERS % 500: "0x60",
    FIRST % "0.5": "0+60x60",
    FIRST % "10.0": "0+60x60",
    FIRST % "30.0": "0+60x60",
    FIRST % "+Inf": "0+60x60",
}
ILL: dict[str, tuple[dict[str, str], int, int]] = {
    "serve_none": ({f"meshtrain_serve_ready{{{A}}}": "1x9 0x50"}, 10, 12),
    "serve_not_ready": (
        {
            f"meshtrain_serve_ready{{{A}}}": "1x9 0x50",
            'meshtrain_serve_ready{job="serve", instance="b"}': "1x60",
        },
        23,
        26,
    ),
    "serve_stuck": (
        {f"meshtrain_serve_tokens_total{{{A}}}": "0+600x9 5400x50"},
        18,
        22,
    ),
    "serve_fails": ({ANSWERS % 500: "0+2x60"}, 4, 8),
    "serve_refuses": ({ANSWERS % 429: "0+2x60"}, 4, 8),
    "serve_slow": ({FIRST % "0.5": "0+50x60", FIRST % "10.0": "0+55x60"}, 9, 13),
}


def test_each_alert_is_tried_below():
    assert {alert["labels"]["rule"] for alert in ALERTS} == ILL.keys()


def test_rules_name_metrics_of_the_server_only():
    named = {
        name for alert in ALERTS for name in re.findall(rf"\b{SERVE}\w+", alert["expr"])
    }
    known = {metric.sample for metric in METRICS} | {
        f"{metric.sample}_bucket" for metric in METRICS if metric.bounds
    }
    assert named and named <= known
    labels = {
        label
        for metric in METRICS
        if metric.name == "requests"
        for label in metric.labels
    }
    assert labels == {"route", "code"}


def _promtool(*arguments: str) -> None:
    ended = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@NEEDS_PROMTOOL
def test_promtool_takes_them():
    _promtool("check", "rules", str(RULES))


@NEEDS_PROMTOOL
def test_each_alert_fires_when_it_must_and_no_other_does(tmp_path):
    tests = []
    for rule, (more, quiet, firing) in ILL.items():
        series = [
            {"series": name, "values": values} for name, values in (WELL | more).items()
        ]
        seen = {quiet: [], firing: [{"labels": f'{{rule="{rule}"}}', "value": 1}]}
        asked = [
            {
                "expr": 'count by (rule) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": samples,
            }
            for minute, samples in seen.items()
        ]
        tests.append(
            {
                "name": rule,
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": asked,
            }
        )
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    _promtool("test", "rules", str(path))


def _query(name: str) -> str:
    (rule,) = (
        one
        for one in ADAPTER["rules"]["custom"]
        if one["name"]["as"] == f"{SERVE}{name}"
    )
    return (
        rule["metricsQuery"]
        .replace("<<.GroupBy>>", "pod")
        .replace("<<.LabelMatchers>>", 'namespace="mine"')
    )


def _of_pods(pods: dict[str, tuple[str, str]]) -> list[dict[str, str]]:
    """Series of pods with 8 slots: a sample a minute, of their namespace and their requests."""
    return [
        {
            "series": f'{SERVE}{name}{{namespace="{namespace}", pod="{pod}"}}',
            "values": values,
        }
        for pod, (namespace, busy) in pods.items()
        for name, values in (
            ("slots", "8x60"),
            ("busy_slots", busy),
            ("waiting", "0x60"),
            ("ready", "1x60"),
        )
    ]


@NEEDS_PROMTOOL
def test_the_autoscaler_looks_five_minutes_ahead(tmp_path):
    # rising by 0.4 of 8 requests a minute: at minute 20 8 of 8 slots, and 10 five minutes later
    pods = {
        "rises": ("mine", "0+0.4x60"),
        "steady": ("mine", "4x60"),
        "falls": ("mine", "8-0.4x19 0x40"),
        "other": ("others", "0+1x60"),
    }
    series = _of_pods(pods) + [
        {**one, "values": f"_x16 {one['values']}"}
        for one in _of_pods({"new": ("mine", "0+2x60")})
    ]
    soon = [
        {"labels": f'{{pod="{pod}"}}', "value": value}
        for pod, value in (("rises", 1.25), ("steady", 0.5), ("falls", 0))
    ]
    asked = [
        {
            "expr": f"round({_query('load_soon')}, 0.05)",
            "eval_time": "20m",
            "exp_samples": soon,
        }
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": series,
                        "promql_expr_test": asked,
                    }
                ]
            }
        )
    )
    _promtool("test", "rules", str(path))


@NEEDS_PROMTOOL
def test_the_autoscalers_query_is_requests_over_slots_of_each_pod(tmp_path):
    query = _query("load")
    pods = {"a": ("mine", 8, 8, 4), "b": ("mine", 8, 2, 0), "c": ("others", 8, 8, 8)}
    series = [
        {
            "series": f'{SERVE}{name}{{namespace="{namespace}", pod="{pod}"}}',
            "values": f"{value}x5",
        }
        for pod, (namespace, *values) in pods.items()
        for name, value in zip(("slots", "busy_slots", "waiting"), values, strict=True)
    ]
    loads = [
        {"labels": f'{{pod="{pod}"}}', "value": value}
        for pod, value in (("a", 1.5), ("b", 0.25))
    ]
    asked = [{"expr": query, "eval_time": "3m", "exp_samples": loads}]
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": series,
                        "promql_expr_test": asked,
                    }
                ]
            }
        )
    )
    _promtool("test", "rules", str(path))
