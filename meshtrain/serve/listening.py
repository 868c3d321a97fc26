"""The port, and how the server ends: first it says so, then it finishes, then it closes.

    SIGTERM      /health 503, requests still taken      the port closes, what runs is finished     what still runs is told
       └──────────── notice ───────────────────────────────┴──────────── patience ────────────────────┴──► the process ends

A balancer that asks /health sends requests elsewhere by the end of `notice`; one that asks nothing finds no connection then, and tries
another server. Ctrl-C gives no notice. A second signal ends the process at once.
"""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshtrain.cli import STOPPED
from meshtrain.errors import ConfigError, refusal, say
from meshtrain.serve.errors import unavailable
from meshtrain.serve.service import Service

# Seconds after which the system gives up a client that takes nothing of what was written to it.
STALLED = 60
# Seconds that a connection without a request is kept: longer than balancers do, so that it is they who close it.
KEEP_ALIVE = 75
CLOSING = 5  # seconds for the last bytes, when all is told


def listening(host: str, port: int, stalled: int = STALLED) -> socket.socket:
    """A socket that clients can connect to; ConfigError for an address or a port that cannot be had. Port 0: any that is free."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # fmt: skip
        found = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = refusal(error) if isinstance(error, OSError) else "that is no name"
        raise ConfigError(f"--host {host} is no address of this machine: {why}.") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Taken over by every connection. Elsewhere than on Linux a stalled client keeps its connection, and nothing else.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled * 1000)
        found.bind(address)
        found.listen(512)
    except OSError as error:
        found.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {refusal(error)}; --port 0 takes any that is free.") from None  # fmt: skip
    return found


def url(found: socket.socket) -> str:
    host, port = found.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(found: socket.socket) -> bool:
    return ipaddress.ip_address(found.getsockname()[0].partition("%")[0]).is_loopback


class Connection(H11Protocol):
    """Of uvicorn, but for a client that is given so long for a whole head, not for each byte of it: many that crawl would take every connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # without what stops the clock
        self.conn.receive_data(data)
        self.handle_events()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()


class Server(uvicorn.Server):
    """`notice`, `patience`: seconds, see above."""

    def __init__(self, app: ASGIApp, service: Service, notice: float, patience: float, access_log: bool) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=Connection, ws="none", lifespan="off", log_config=None, access_log=access_log, server_header=False,
                timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=CLOSING,
            )
        )  # fmt: skip
        self._service, self._notice, self._patience = service, notice, patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task | None = None
        # What goes wrong in a request the server tells itself; that somebody speaks no HTTP is nobody's error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        if access_log:
            logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler(sys.stderr))
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signals that end a server."""
        service = self._service
        if service.draining:
            say("ended at once.")
            end_now(STOPPED)
        service.draining = True
        if service.served is None or self._loop is None:
            self.should_exit = True
            return
        notice = 0.0 if sig == signal.SIGINT else self._notice
        self._loop.call_soon_threadsafe(self._begin_to_end, notice)

    def _begin_to_end(self, notice: float) -> None:
        self._ending = asyncio.create_task(self._end(notice))

    async def _end(self, notice: float) -> None:
        service = self._service
        many = service.open_requests
        say(f"ending: {many} request{'' if many == 1 else 's'} to finish; a second signal ends at once.")
        await asyncio.sleep(notice)
        service.closed = True
        for door in self.servers:
            door.close()
        until = time.monotonic() + self._patience
        while service.open_requests and time.monotonic() < until:
            await asyncio.sleep(0.05)
        service.end(unavailable("the server ends, and has not waited longer for this answer.", "ended"))
        self.should_exit = True


def end_now(code: int) -> None:
    """Ends the process with threads that cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
