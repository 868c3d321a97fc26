"""A dashboard for Grafana with a panel for each metric of the catalogue: python -m meshtrain.telemetry dashboard

    a run         numbers of now; each metric of its steps, and its alerts
    processes     each process metric by rank; over many ranks its least, median and greatest value

Panels of what a machine does not tell (GPUs on one without) say that there is no data. The JSON is that of Grafana's
dashboard model (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model); `$run`
and `$rank` are chosen above it.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from meshtrain.telemetry.catalogue import BY_NAME, METRICS, PREFIX, Metric
from meshtrain.telemetry.thresholds import goodput_queries

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
INFO = f'{PREFIX}process_info{{run=~"$run",rank=~"$rank"}}'
# What a series is of: its run and rank come from the one series that has them.
OF_RUN = f"* on (instance, job) group_left (run, rank, host) {INFO}"
# Of what the first process alone tells: whatever ranks are chosen.
OF_FIRST = f'* on (instance, job) group_left (run) {PREFIX}process_info{{run=~"$run"}}'
UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "watts": "watt",
    "celsius": "celsius",
}
GOODPUT = "share of the time, starts left out, in which a process dispatches steps, waits for them and logs them"

Panel = dict[str, Any]


def document() -> dict[str, Any]:
    """Returns the dashboard, as Grafana imports it."""
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        _variable("run", f"label_values({PREFIX}process_info, run)"),
        _variable("rank", f'label_values({PREFIX}process_info{{run=~"$run"}}, rank)'),
    ]
    return {
        "title": "meshtrain",
        "uid": "meshtrain",
        "tags": ["meshtrain"],
        "schemaVersion": 38,
        "editable": True,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": variables},
        "panels": _numbered(_placed(), count(1)),
    }


def _numbered(panels: Iterable[Panel], numbers: Iterator[int]) -> list[Panel]:
    """Returns panels with an id each, those within rows too."""
    return [
        {"id": next(numbers), **panel}
        | ({"panels": _numbered(panel["panels"], numbers)} if "panels" in panel else {})
        for panel in panels
    ]


def panels() -> Iterator[Panel]:
    """Yields each panel of the dashboard, and the rows that hold them."""
    for panel in document()["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> list[tuple[str, str]]:
    """Returns (title of the panel, query) of each query, as the dashboard has it."""
    return [
        (panel["title"], target["expr"])
        for panel in panels()
        for target in panel.get("targets", ())
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
    }


def _placed() -> Iterator[Panel]:
    """Yields each group's title, and its panels below: those of now open, those of any other group within its collapsed
    row.
    """
    below = 0
    for number, (title, panels) in enumerate(_groups().items()):
        row = {
            "type": "row",
            "title": title,
            "gridPos": {"x": 0, "y": below, "w": 24, "h": 1},
            "collapsed": number > 0,
        }
        below += 1
        placed, height = _side_by_side(panels, below)
        # Grafana queries nothing for what is collapsed.
        yield row | {"panels": placed if number else []}
        if not number:
            yield from placed
            below += height


def _side_by_side(panels: list[Panel], below: int) -> tuple[list[Panel], int]:
    """Returns panels from a line on, as many side by side as 24 columns hold, and their height."""
    placed = []
    across = 0
    first = below
    for panel in panels:
        size = panel["gridPos"]
        if across + size["w"] > 24:
            across = 0
            below = below + size["h"]
        placed.append(panel | {"gridPos": size | {"x": across, "y": below}})
        across += size["w"]
    return placed, below - first + panels[-1]["gridPos"]["h"]


def _groups() -> dict[str, list[Panel]]:
    steps = [
        metric
        for metric in METRICS
        if metric.source == "step" and metric.name != "step"
    ]
    process = [metric for metric in METRICS if metric.source == "process"]
    return {
        "The run now": list(_now()),
        "Its steps": [
            _series(
                m, f"{_value(m)} {OF_FIRST}", " ".join(map(_label, ("run", *m.labels)))
            )
            for m in steps
        ],
        "Its processes": [_goodput(), *(_process_panel(metric) for metric in process)],
        "Over all processes, from the first one": [
            _processes_panel(metric) for metric in process if metric.kind == "gauge"
        ],
    }


def _now() -> Iterator[Panel]:
    numbers = {
        name.replace("_", " "): (
            f"{BY_NAME[name].sample} {OF_FIRST}",
            unit(BY_NAME[name]),
        )
        for name in ("step", "loss", "tokens_per_second", "mfu")
    }
    numbers["alerts"] = (
        'count(ALERTS{alertname=~"Meshtrain.*",alertstate="firing"}) or vector(0)',
        "short",
    )
    for title, (query, of) in numbers.items():
        yield _panel("stat", title, query, "{{run}}", of) | {
            "gridPos": {"w": 4, "h": 4}
        }


def _process_panel(metric: Metric) -> Panel:
    return _series(
        metric,
        f"{_value(metric)} {OF_RUN}",
        " ".join(map(_label, ("run", "rank", *metric.labels))),
    )


def _processes_panel(metric: Metric) -> Panel:
    labels = ("run", "over", *(label for label in metric.labels if label != "device"))
    query = f"{metric.processes_name} {OF_FIRST}"
    return _series(
        metric,
        query,
        " ".join(map(_label, labels)),
        title=f"{_title(metric)}, least to greatest",
    )


def _goodput() -> Panel:
    steps, seconds = goodput_queries("$__rate_interval", "rate")
    query = f"{steps} / {seconds} {OF_RUN}"
    return _panel(
        "timeseries", "goodput", query, "{{run}} {{rank}}", "percentunit", GOODPUT
    )


def _series(metric: Metric, query: str, legend: str, title: str = "") -> Panel:
    return _panel(
        "timeseries",
        title or _title(metric),
        query,
        legend,
        unit(metric),
        metric.meaning,
    )


def _label(name: str) -> str:
    return f"{{{{{name}}}}}"


def _value(metric: Metric) -> str:
    """Returns the query that draws a metric: the rate a second if it is a counter."""
    if metric.kind == "counter":
        return f"rate({metric.sample}[$__rate_interval])"
    return metric.sample


def _title(metric: Metric) -> str:
    return metric.name.replace("_", " ") + (
        " a second" if metric.kind == "counter" else ""
    )


def unit(metric: Metric) -> str:
    """Returns Grafana's name for it."""
    if metric.kind == "counter":
        # Seconds a second are a share.
        return "percentunit" if metric.unit == "seconds" else "short"
    if metric.name.endswith("bytes_per_second"):
        return "Bps"
    return "percentunit" if metric.name == "mfu" else UNITS.get(metric.unit, "short")


def _panel(
    kind: str,
    title: str,
    query: str,
    legend: str,
    unit: str,
    meaning: str = "",
) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": meaning,
        "datasource": SOURCE,
        "gridPos": {"w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": "A", "datasource": SOURCE, "expr": query, "legendFormat": legend}
        ],
    }
