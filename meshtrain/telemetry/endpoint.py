"""A page of metrics, /metrics at telemetry.bind and telemetry.endpoint, for Prometheus to read; each process has one of
its own.

Each process serves its own values. The first one also serves the step's metrics, which are the same for all. It adds
the least, the median and the greatest value of each process metric, with the rank of its process: a few hundred series,
however many processes there are.

It has no password: it listens on 127.0.0.1 unless telemetry.bind says otherwise. Whatever happens to it, training goes
on.
"""

import math
import socket
import socketserver
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshtrain.errors import refusal, say
from meshtrain.run.hooks import Listener
from meshtrain.telemetry.catalogue import (
    METRICS,
    PREFIX,
    PROCESSES_RANK,
    RECENT_ROWS,
    Metric,
    Source,
    recent_mfu,
)
from meshtrain.telemetry.exposition import (
    OPENMETRICS,
    PLAIN,
    Labels,
    MetricFamily,
    flat,
    render,
    wants_openmetrics,
)

Row = Mapping[str, Any]
FEW = 64  # processes, of which each scrape has the newest
# Looks at the samples of a process until it is left out, if there is no new one
MOST_SILENT = 3.0
PATH = "/metrics"
PATIENCE = 10.0  # seconds that a reader may take over its request


class Board:
    """The content of the page.

    `totals`: the hub's. `every`: seconds between two looks at the samples of other processes.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        run: str,
        totals: Mapping[str, float],
        every: float,
    ) -> None:
        self._rank = rank
        self._totals = totals
        self._every = every
        self._info: Labels = (("run", run), ("rank", str(rank)), ("host", host))
        self._step: dict[str, Any] = {}
        self._mfu: deque[float] = deque(maxlen=RECENT_ROWS)
        self._own: Row = {}
        self._sums: dict[str, dict[Labels, float]] = {}
        self._all: dict[int, tuple[float, Row]] = {}
        self._of_all: list[MetricFamily] = []
        self._next = 0.0  # time to look at all, by time.monotonic
        self._lock = threading.Lock()

    def __call__(self, row: Row, source: Source) -> None:
        with self._lock:
            if source == "step":
                # What this row does not know, such as the loss of the last evaluation, is what it was.
                self._step |= row
                self._mfu.append(row.get("mfu", math.nan))
                self._step["mfu"] = recent_mfu(self._mfu)
                return
            self._all[row["rank"]] = time.monotonic(), row
            if row["rank"] == self._rank:
                self._own = row
                for metric in counters("process"):
                    sums = self._sums.setdefault(metric.name, {})
                    for labels, value in flat(row.get(metric.name), metric.labels):
                        sums[labels] = sums.get(labels, 0.0) + value

    def tick(self) -> None:
        """Looks at many processes beside the scrapes, and as often as they are read: thousands take longer than a
        scrape may.
        """
        if len(self._all) > FEW and time.monotonic() >= self._next:
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self._next = now + self._every
        with self._lock:
            rows = {
                rank: row
                for rank, (at, row) in self._all.items()
                if at >= now - MOST_SILENT * self._every
            }
        self._of_all = list(_summarise_processes(rows)) if len(rows) > 1 else []

    def families(self) -> Iterator[MetricFamily]:
        """Yields what is known by now."""
        if len(self._all) <= FEW:
            self._look()
        with self._lock:
            step = dict(self._step)
            own = self._own
            totals = dict(self._totals)
            sums = {name: dict(by_labels) for name, by_labels in self._sums.items()}
            of_all = self._of_all
        yield MetricFamily(
            PREFIX + "process",
            "info",
            "what this process is",
            samples=[(self._info, 1)],
        )
        for metric in METRICS:
            if metric.source == "step" and self._rank:
                continue
            family = MetricFamily(
                metric.exposed, metric.kind, metric.meaning, metric.unit
            )
            if metric.kind == "gauge":
                value = (own if metric.source == "process" else step).get(metric.name)
                family.samples = list(flat(value, metric.labels))
            elif metric.source == "step":
                family.samples = (
                    [((), totals[metric.name])] if metric.name in step else []
                )
            else:
                family.samples = list(sums.get(metric.name, {}).items())
            yield family
        yield from of_all


def _summarise_processes(rows: Mapping[int, Row]) -> Iterator[MetricFamily]:
    about = "the process that a value over all processes is of, by metric and over"
    ranks = MetricFamily(PROCESSES_RANK, "gauge", about)
    for metric in (metric for metric in METRICS if metric.source == "process"):
        by_labels: dict[Labels, list[tuple[float, int]]] = {}
        for rank, row in rows.items():
            for labels, value in flat(row.get(metric.name), metric.labels):
                shared = tuple(label for label in labels if label[0] != "device")
                by_labels.setdefault(shared, []).append((value, rank))
        family = MetricFamily(
            metric.processes_name,
            "gauge",
            f"over all processes: {metric.meaning}",
            metric.unit,
        )
        for labels, values in by_labels.items():
            for over, pick in (
                ("min", min),
                ("median", statistics.median_low),
                ("max", max),
            ):
                value, rank = pick(values)
                family.samples.append(((*labels, ("over", over)), value))
                ranks.samples.append(
                    ((("metric", metric.name), *labels, ("over", over)), rank)
                )
        yield family
    yield ranks


def counters(source: Source) -> list[Metric]:
    return [
        metric
        for metric in METRICS
        if metric.source == source and metric.kind == "counter"
    ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Another program's port is not shared, one that the process before has just left is taken.
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], families: Callable[[], Iterable[MetricFamily]]
    ) -> None:
        self.families = families
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # An HTTPServer would ask the name service for its own name, which may take seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is nobody's error."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version = "meshtrain"
    sys_version = ""

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        if self.path.split("?")[0] not in (PATH, "/"):
            self.send_error(404, f"metrics are at {PATH}")
            return
        openmetrics = wants_openmetrics(self.headers.get("Accept"))
        body = render(self.server.families(), openmetrics=openmetrics).encode()
        self.send_response(200)
        self.send_header("Content-Type", OPENMETRICS if openmetrics else PLAIN)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody wants a line for each request."""


class Endpoint(Listener):
    """Serves what `board` knows until it is closed. Port 0: any that is free.

    A port that cannot be had is reported: then there is no `url`.
    """

    name = "the endpoint"

    def __init__(self, bind: str, port: int, board: Board) -> None:
        self._board = board
        self.url = ""
        self._server: _Server | None = None
        try:
            self._server = _Server((bind, port), board.families)
        # An overflow: the last ports of a machine with many processes.
        except (OSError, OverflowError) as error:
            why = refusal(error) if isinstance(error, OSError) else "ports end at 65535"
            say(
                f"metrics cannot be served on {bind}:{port}: {why}; training goes on without."
            )
            return
        self.url = f"http://{bind}:{self._server.server_address[1]}{PATH}"
        threading.Thread(
            target=self._server.serve_forever, name="meshtrain-endpoint", daemon=True
        ).start()

    def on_row(self, row: Row, source: Source) -> None:
        self._board(row, source)

    def on_tick(self, now: float) -> None:
        self._board.tick()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
