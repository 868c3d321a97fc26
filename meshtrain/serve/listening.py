"""A server from its first line to its exit code: the port is open at once, a thread loads the model; at the end it says
so, finishes, closes.

    SIGTERM      /health 503, requests still taken     the port closes, what runs is finished    what still runs is told
       └──────────── notice ──────────────────────────────┴──────────── patience ───────────────────┴─► the process ends

A balancer that asks /health sends requests elsewhere by the end of `notice`; one that asks nothing finds no connection
then, and tries another server. Ctrl-C gives no notice. A second signal ends the process at once.
"""

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from starlette.types import ASGIApp

from meshtrain.adopt.extra_files import run_of
from meshtrain.cli import DONE, FAILED, STOPPED
from meshtrain.errors import ConfigError, refusal, say, short
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import Piece, Request
from meshtrain.serve.app import application
from meshtrain.serve.cache import AnswerCache
from meshtrain.serve.errors import unavailable
from meshtrain.serve.models import Models, NamedModel, ServedModel
from meshtrain.serve.service import Service

# Seconds after which the system gives up a client that takes nothing of what was written to it.
STALLED = 60
# Seconds that a connection without a request is kept: longer than balancers do, so that it is they who close it.
KEEP_ALIVE = 75
CLOSING = 5  # seconds for the last bytes, when all is told
# Seconds to wait for all programs before it is ready; the commonest are waited for as long as it takes
WARMING = 60.0


def listening(host: str, port: int, stalled: int = STALLED) -> socket.socket:
    """Returns a socket that clients can connect to; ConfigError for an address or a port that cannot be had.

    Port 0: any that is free.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        door = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = refusal(error) if isinstance(error, OSError) else "that is not a name"
        raise ConfigError(
            f"--host {host} is not an address of this machine: {why}."
        ) from None
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Taken over by every connection. Elsewhere than on Linux a stalled client keeps its connection, and nothing
        # else.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            door.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled * 1000)
        door.bind(address)
        door.listen(512)
    except OSError as error:
        door.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {refusal(error)}; --port 0 takes any that is free."
        ) from None
    return door


def url(door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(door: socket.socket) -> bool:
    return ipaddress.ip_address(door.getsockname()[0].partition("%")[0]).is_loopback


class Server(uvicorn.Server):
    """`notice`, `patience`: seconds, see above."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        notice: float,
        patience: float,
        access_log: bool,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=access_log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=CLOSING,
            )
        )
        self._service = service
        self._notice = notice
        self._patience = patience
        # What goes wrong in a request the server tells itself; that somebody speaks no HTTP is nobody's error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        if access_log:
            logging.getLogger("uvicorn.access").addHandler(
                logging.StreamHandler(sys.stderr)
            )
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
        if not service.statuses:
            self.should_exit = True
        else:
            notice = 0.0 if sig == signal.SIGINT else self._notice
            self._ending = asyncio.run_coroutine_threadsafe(
                self._end(notice), self._loop
            )

    async def _end(self, notice: float) -> None:
        service = self._service
        many = service.open_requests
        say(
            f"ending: {many} request{'' if many == 1 else 's'} to finish; a second signal ends at once."
        )
        await asyncio.sleep(notice)
        service.closed = True
        for door in self.servers:
            door.close()
        until = time.monotonic() + self._patience
        while service.open_requests and time.monotonic() < until:
            await asyncio.sleep(0.05)
        service.end(
            unavailable(
                "the server ends, and has not waited longer for this answer.", "ended"
            )
        )
        self.should_exit = True


def end_now(code: int) -> None:
    """Ends the process with threads that cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


# --- from the command line to the exit code


def run(options: argparse.Namespace) -> int:
    door = listening(options.host, options.port)
    models = separate(options)
    service = Service(
        ", ".join(one.name or str(one.path) for one in models),
        options.queue,
        options.key,
        frozenset({options.host.lower()}) if options.key is None else None,
        request_timeout=options.request_timeout,
        stuck_after=options.stuck_after,
        cache=AnswerCache(options.cache << 20, options.cache_seconds),
    )
    server = Server(
        application(service), service, options.notice, options.drain, options.access_log
    )
    say(f"{short(service.name)} at {url(door)}/v1, as soon as it is loaded.")
    if options.key is None and not is_loopback(door):
        say(f"warning: whoever reaches {url(door)} may use it; give it a key (--help).")
    loading = Future[None]()

    def load() -> None:
        begun = time.monotonic()
        try:
            if len(models) == 1:
                service.served = served_model(models[0])
                service.name = service.served.name
            else:
                service.models = several_models(models, options.resident, options.queue)
                service.name = ", ".join(service.models.by_name)
            ready = ", ".join(short(served.name) for served in service.loaded)
            say(
                f"{ready} {'are' if len(service.loaded) > 1 else 'is'} ready after {time.monotonic() - begun:.1f} s."
            )
        # of whatever kind: it ends the server, and the main thread says it
        except BaseException as error:
            loading.set_exception(error)
            server.should_exit = True

    threading.Thread(target=load, name="meshtrain-loading", daemon=True).start()
    server.run(sockets=[door])
    if loading.done():
        loading.result()
    return ended(service)


def ended(service: Service) -> int:
    """Frees the devices; returns the exit code, or ends the process with what nothing interrupts."""
    if not service.statuses or (
        service.models is not None and service.models.is_changing
    ):
        # nothing interrupts what loads
        end_now(DONE)
    for served in service.loaded:
        if not closed(served):
            if served.engine.warming:
                # nor what compiles
                end_now(DONE)
            say("the device stands still; ended without waiting for it.")
            end_now(FAILED)
    return DONE


def separate(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Returns the options of each model that a command line names."""
    paths = [options.path, *options.others]
    names = options.name or [None] * len(paths)
    return [
        argparse.Namespace(**vars(options) | {"path": p, "name": n})
        for p, n in zip(paths, names, strict=True)
    ]


def several_models(
    options: Sequence[argparse.Namespace], resident: int, queue: int
) -> Models:
    """Returns the models of a command line, as many of them loaded as may be; ConfigError for two of one name."""
    names = [
        one.name or run_of(Path(os.path.realpath(one.path.expanduser()))).name
        for one in options
    ]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"two models are called {short(twice)}; give each a --name of its own."
        )
    models = [
        NamedModel(
            name,
            partial(served_model, argparse.Namespace(**vars(one) | {"name": name}), {}),
        )
        for name, one in zip(names, options, strict=True)
    ]
    for model in models[:resident]:
        model.served = model.load()
    return Models(models, resident, queue)


def closed(served: ServedModel, seconds: float = CLOSING) -> bool:
    """Ends the engine; returns False if it does not end, as where the device stands still."""
    closing = threading.Thread(target=served.close, daemon=True)
    closing.start()
    closing.join(seconds)
    return not closing.is_alive()


def served_model(
    options: argparse.Namespace, kept: dict[Any, Any] | None = None
) -> ServedModel:
    """Returns the model that a command line asks for, with its engine running; by default under the name of its run.

    `kept`: programs that were compiled when it was loaded before.
    """
    # the port is open before JAX is imported
    from meshtrain.generate.opened import open_asked

    opened = open_asked(options, options.slots, options.length)
    for sentence in opened.asks:
        say(sentence)
    engine = Engine(
        opened, options.slots, options.length, options.queue, keep=False
    ).start()
    if kept is not None:
        engine.reuse(kept)
    if engine.note:
        say(engine.note)
    if left := engine.warm(WARMING):
        say(
            f"{left} programs, for the longest prompts, are compiled while it answers; who needs one of them waits "
            "for it."
        )
    # Two tokens, so that what does not run here is known now.
    last = Future[Piece]()
    shortest = Request(np.zeros(1, np.int32), 2, ignore_ends=True)
    engine.submit(
        shortest, lambda piece: last.set_result(piece) if piece.finish else None
    )
    if (piece := last.result()).finish == "error":
        engine.close()
        engine.free()
        raise ConfigError(
            f"the model is loaded, but does not run here: {piece.problem}"
        )
    return ServedModel(options.name or opened.name, engine)
