"""python -m meshtrain.telemetry catalogue|dashboard|rules: what is measured, a dashboard for Grafana, alert rules for
Prometheus.

Each is printed; copies of the last two stand in configs/monitoring/.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import yaml

from meshtrain.cli import DONE, Parser, command
from meshtrain.draw.picture import columns
from meshtrain.telemetry import dashboard
from meshtrain.telemetry.catalogue import METRICS
from meshtrain.telemetry.thresholds import THRESHOLDS, prometheus_rules

HEAD = "# Alert rules for Prometheus, from meshtrain/telemetry/thresholds.py: python -m meshtrain.telemetry rules\n"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    text, _ = PRINTED[options.command]
    print(catalogue_json() if getattr(options, "json", False) else text(), end="")
    return DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.telemetry",
        description="Prints what Prometheus and Grafana need to watch runs.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, meaning) in PRINTED.items():
        printed = commands.add_parser(name, help=meaning, description=meaning)
        if name == "catalogue":
            printed.add_argument(
                "--json", action="store_true", help="prints JSON, for programs"
            )
    return parser


def catalogue() -> str:
    """The metrics, and the alerts with their thresholds, as tables."""
    metrics = [["metric", "of a", "kind", "labels", "meaning"]]
    metrics += [
        [m.sample, m.source, m.kind, ", ".join(m.labels) or "-", m.meaning]
        for m in METRICS
    ]
    alerts = [
        ["alert", "severity", "fires", "clears", "seconds", "what counts, and why"]
    ]
    alerts += [
        [
            t.rule,
            t.severity,
            f"{t.fires:g}",
            f"{t.clears:g}",
            f"{t.seconds:g}",
            f"{t.counts}: {t.reason}",
        ]
        for t in THRESHOLDS
    ]
    return f"{columns(metrics)}\n\n{columns(alerts)}\n"


def catalogue_json() -> str:
    metrics = [asdict(metric) | {"sample": metric.sample} for metric in METRICS]
    alerts = [
        {name: value for name, value in vars(t).items() if not callable(value)}
        for t in THRESHOLDS
    ]
    return json.dumps({"metrics": metrics, "alerts": alerts}, indent=2) + "\n"


def dashboard_text() -> str:
    return json.dumps(dashboard.document(), indent=1) + "\n"


def rules_text() -> str:
    return HEAD + yaml.safe_dump(
        prometheus_rules(), sort_keys=False, width=120, allow_unicode=True
    )


PRINTED = {
    "catalogue": (
        catalogue,
        "every metric with its kind, labels and meaning; every alert with its thresholds",
    ),
    "dashboard": (dashboard_text, "a dashboard for Grafana, as JSON to import"),
    "rules": (rules_text, "alert rules for Prometheus, as YAML for rule_files"),
}


if __name__ == "__main__":
    sys.exit(main())
