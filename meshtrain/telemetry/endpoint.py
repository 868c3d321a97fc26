"""A page of metrics, /metrics at telemetry.bind and telemetry.endpoint, for Prometheus to read; a process of its own has one of its own.

It has no password: it listens on 127.0.0.1 unless telemetry.bind says otherwise. Whatever happens to it, training goes on.
"""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshtrain.errors import refusal, say
from meshtrain.telemetry.board import Board, Row
from meshtrain.telemetry.catalogue import Source
from meshtrain.telemetry.exposition import OPENMETRICS, PLAIN, Family, render, wants_openmetrics

PATH = "/metrics"
PATIENCE = 10.0  # seconds that a reader may take over its request


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Another program's port is not shared, one that the process before has just left is taken.
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], families: Callable[[], Iterable[Family]]) -> None:
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
    server_version, sys_version = "meshtrain", ""

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


class Endpoint:
    """A listener of the hub, which serves what `board` knows until it is closed. A port that cannot be had is said: then there is no `url`.

    Port 0: any that is free.
    """

    name = "the endpoint"

    def __init__(self, bind: str, port: int, board: Board) -> None:
        self._board, self.url = board, ""
        self._server: _Server | None = None
        try:
            self._server = _Server((bind, port), board.families)
        # An overflow: the last ports of a machine with many processes.
        except (OSError, OverflowError) as error:
            why = refusal(error) if isinstance(error, OSError) else "ports end at 65535"
            say(f"metrics cannot be served on {bind}:{port}: {why}; training goes on without.")
            return
        self.url = f"http://{bind}:{self._server.server_address[1]}{PATH}"
        threading.Thread(target=self._server.serve_forever, name="meshtrain-endpoint", daemon=True).start()

    def __call__(self, row: Row, source: Source) -> None:
        self._board(row, source)

    def tick(self, now: float) -> None:
        self._board.tick(now)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
