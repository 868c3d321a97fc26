"""A real Prometheus and a real Alertmanager read what a run shows: `tests/telemetry/test_monitoring.py` holds them to it.

    two endpoints ◄── scrape ── Prometheus ── alerts ──► Alertmanager ──► a webhook of ours
    (rows are made up here)      │  rules, all durations a sixtieth
                                 └── every query of the dashboard

Two processes of a run that is made up are healthy, then ill in many ways at once, healthy again, then stand still with
a loss that is NaN. Needs Debian's packages prometheus and prometheus-alertmanager (promtool is in the first); takes
less than two minutes.
"""

import contextlib
import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from experiments import bench
from experiments.watch.made_up import Run
from meshtrain.survive.supervisor import free_port
from meshtrain.telemetry import dashboard
from meshtrain.telemetry.catalogue import BY_NAME
from meshtrain.telemetry.exposition import PLAIN
from meshtrain.telemetry.thresholds import prometheus_rules

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")
SCALE = 1 / 60  # of the rules' durations
SCRAPE = "500ms"
HEALTHY, ILL, WELL, STILL = 37.0, 16.0, 9.0, 17.0  # seconds of the four parts
LATE = 15.0  # seconds that an alert may take to arrive
EXACT = 0.01  # relative error that a rate may have
# What fires in which part.
ILLS = (
    "loss_spike",
    "throughput_drop",
    "slow_rank",
    "device_memory",
    "memory_limit",
    "machine_memory",
    "disk_space",
    "disk_filling",
)
STILLS = ("loss_not_finite", "stalled")


class Check(NamedTuple):
    what: str
    good: bool
    seen: str


class Inbox:
    """The webhook that Alertmanager is told of: when it first heard that an alert fires, and that it is over."""

    def __init__(self) -> None:
        self.heard: dict[tuple[str, str], float] = {}
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in body["alerts"]:
                    inbox.heard.setdefault(
                        (alert["labels"]["rule"], alert["status"]), time.time()
                    )
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing: the table says what came."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def has(self, rules: tuple[str, ...], state: str) -> bool:
        return all((rule, state) in self.heard for rule in rules)


class Prometheus:
    """The server's answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, query: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        ) as answer:
            return json.load(answer)["data"]["result"]

    def ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/-/ready").status == 200
        except OSError:
            return False


def measure(work: Path) -> list[Check]:
    """All checks, one after the other; servers end with it."""
    checks: list[Check] = []
    rules = work / "rules.yml"
    rules.write_text(yaml.safe_dump(prometheus_rules(SCALE)))
    checks.append(_promtool("promtool check rules", ["check", "rules", str(rules)]))
    inbox, ports = Inbox(), [free_port("127.0.0.1"), free_port("127.0.0.1")]
    with Run() as run, _servers(work, rules, run, inbox, *ports):
        prometheus = Prometheus(ports[0])
        bench.until(prometheus.ready, LATE)
        began = time.time()
        tokens = run.totals["tokens"], time.time()
        time.sleep(HEALTHY)
        for openmetrics in (False, True):
            checks.append(_page(run.endpoints[0].url, openmetrics))
        up = [result["value"][1] for result in prometheus.query("up")]
        checks.append(
            Check("both endpoints scraped", up == ["1", "1"], f"up {', '.join(up)}")
        )
        checks.append(_dashboard(prometheus))
        truth = (run.totals["tokens"] - tokens[0]) / (time.time() - tokens[1])
        rate = float(
            prometheus.query(f"rate({BY_NAME['tokens'].sample}[20s])")[0]["value"][1]
        )
        error = abs(rate / truth - 1)
        checks.append(
            Check(
                "rate(tokens_total)",
                error < EXACT,
                f"{rate:.1f} of {truth:.1f} a second, error {error:.2%}",
            )
        )
        early = sorted({rule for rule, _ in inbox.heard})
        checks.append(
            Check(
                f"healthy for {time.time() - began:.0f} s",
                not early,
                ", ".join(early) or "no alert",
            )
        )
        for name, seconds, expected in (("ill", ILL, ILLS), ("still", STILL, STILLS)):
            checks += _episode(run, inbox, name, seconds, expected)
            time.sleep(WELL if name == "ill" else 0.0)
        other = sorted({rule for rule, _ in inbox.heard} - {*ILLS, *STILLS})
        checks.append(
            Check("nothing else fired", not other, ", ".join(other) or "nothing")
        )
    return checks


def _episode(
    run: Run, inbox: Inbox, name: str, seconds: float, expected: tuple[str, ...]
) -> Iterator[Check]:
    """The run is ill, or stands still, until all that is expected has arrived; and then until all of it is over."""
    begin = time.time()
    setattr(run, name, True)
    bench.until(lambda: inbox.has(expected, "firing"), seconds + LATE)
    end = time.time()
    setattr(run, name, False)
    bench.until(lambda: inbox.has(expected, "resolved"), seconds + 2 * LATE)
    for rule in expected:
        fired, over = (
            inbox.heard.get((rule, "firing")),
            inbox.heard.get((rule, "resolved")),
        )
        good = fired is not None and over is not None and begin <= fired and end <= over
        parts = [f"arrived after {fired - begin:.1f} s" if fired else "never arrived"]
        parts.append(
            f"over {over - end:.1f} s after its cause" if over else "never over"
        )
        yield Check(f"{rule}: Alertmanager to webhook", good, ", ".join(parts))


def _dashboard(prometheus: Prometheus) -> Check:
    empty = []
    asked = dashboard.queries()
    for title, query in asked:
        for variable, value in (
            ("$__rate_interval", "5s"),
            ("$run", ".*"),
            ("$rank", ".*"),
        ):
            query = query.replace(variable, value)
        if not prometheus.query(query):
            empty.append(title)
    return Check(
        "queries of the dashboard",
        not empty,
        f"{len(asked) - len(empty)} of {len(asked)} have data {empty or ''}",
    )


def _page(url: str, openmetrics: bool) -> Check:
    """The page as text is promtool's to judge; as OpenMetrics it ends as it must, which Prometheus itself insists
    on.
    """
    accept = "application/openmetrics-text" if openmetrics else PLAIN
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Accept": accept})
    ) as answer:
        text = answer.read().decode()
    if openmetrics:
        return Check(
            "OpenMetrics", text.endswith("# EOF\n"), f"{text.count(chr(10)):,} lines"
        )
    return _promtool("promtool check metrics", ["check", "metrics"], text)


def _promtool(what: str, words: list[str], text: str = "") -> Check:
    found = subprocess.run(
        ["promtool", *words], input=text, capture_output=True, text=True
    )
    said = " ".join((found.stderr + found.stdout).split())
    return Check(what, found.returncode == 0, said[-200:] or "clean")


@contextlib.contextmanager
def _servers(
    work: Path, rules: Path, run: Run, inbox: Inbox, port: int, alertmanager: int
) -> Iterator[None]:
    targets = [endpoint.url.split("/")[2] for endpoint in run.endpoints]
    webhook = f"http://127.0.0.1:{inbox.server.server_port}/"
    configs = {
        "prometheus": f"""
global: {{scrape_interval: {SCRAPE}, scrape_timeout: {SCRAPE}, evaluation_interval: {SCRAPE}}}
rule_files: ["{rules}"]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{alertmanager}"]}}]}}]}}
scrape_configs: [{{job_name: meshtrain, static_configs: [{{targets: {json.dumps(targets)}}}]}}]
""",
        "prometheus-alertmanager": f"""
route: {{receiver: us, group_by: [rule], group_wait: 1s, group_interval: 1s}}
receivers: [{{name: us, webhook_configs: [{{url: "{webhook}"}}]}}]
""",
    }
    flags = {
        "prometheus": [
            f"--storage.tsdb.path={work}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        "prometheus-alertmanager": [
            f"--storage.path={work}/alertmanager",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        ],
    }
    with contextlib.ExitStack() as started:
        for program, config in configs.items():
            path = work / f"{program}.yml"
            path.write_text(config)
            log = started.enter_context((work / f"{program}.log").open("w"))
            words = [
                program,
                f"--config.file={path}",
                "--log.level=warn",
                *flags[program],
            ]
            process = subprocess.Popen(words, stdout=log, stderr=log)
            started.callback(process.wait)
            started.callback(process.terminate)
        yield
