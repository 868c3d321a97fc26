"""A server from its first line to its exit code: the port is open at once, and a thread loads the model."""

import argparse
import threading
import time
from concurrent.futures import Future

import numpy as np

from meshtrain.cli import DONE, FAILED
from meshtrain.errors import ConfigError, say, short
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import open_asked
from meshtrain.generate.request import Piece, Request
from meshtrain.serve.answered import Answered
from meshtrain.serve.app import application
from meshtrain.serve.listening import CLOSING, Server, end_now, is_loopback, listening, url
from meshtrain.serve.served import Served
from meshtrain.serve.service import Service

CACHE_SECONDS = 300.0


def run(options: argparse.Namespace) -> int:
    door = listening(options.host, options.port)
    seconds = CACHE_SECONDS if options.cache_seconds is None else options.cache_seconds
    service = Service(
        options.name or str(options.path),
        options.queue,
        options.key,
        request_timeout=options.request_timeout,
        stuck_after=options.stuck_after,
        kept=Answered(options.cache, seconds) if options.cache else None,
    )
    server = Server(application(service), service, options.notice, options.drain, options.access_log)
    say(f"{short(service.name)} at {url(door)}/v1, as soon as it is loaded.")
    if options.key is None and not is_loopback(door):
        say(f"warning: whoever reaches {url(door)} may use it; give it a key (--help).")
    loading = Loading(options, service, server)
    loading.start()
    server.run(sockets=[door])
    return loading.ended()


class Loading(threading.Thread):
    """Opens the model; what goes wrong there ends the server."""

    def __init__(self, options: argparse.Namespace, service: Service, server: Server) -> None:
        super().__init__(name="meshtrain-loading", daemon=True)
        self._options, self._service, self._server = options, service, server
        self._error: BaseException | None = None

    def run(self) -> None:
        begun = time.monotonic()
        try:
            found = served(self._options)
            self._service.name = found.name
            self._service.served = found
        # of whatever kind: the main thread says it
        except BaseException as error:
            self._error = error
            self._server.should_exit = True
        else:
            say(f"{short(found.name)} is ready after {time.monotonic() - begun:.1f} s.")

    def ended(self) -> int:
        """The exit code, once the port is closed; raises what went wrong."""
        if self._error is not None:
            raise self._error
        if self._service.served is None:
            # nothing interrupts what loads
            end_now(DONE)
        elif not closed(self._service.served):
            say("the device stands still; ended without waiting for it.")
            end_now(FAILED)
        return DONE


def closed(served: Served, seconds: float = CLOSING) -> bool:
    """Ends the engine; False if it does not end, as where the device stands still."""
    closing = threading.Thread(target=served.close, daemon=True)
    closing.start()
    closing.join(seconds)
    return not closing.is_alive()


def served(options: argparse.Namespace) -> Served:
    """The model that a command line asks for, with its engine running; by default under the name of its run."""
    opened = open_asked(options, options.slots, options.length)
    engine = Engine(opened, options.slots, options.length, options.queue, keep=False).start()
    _try(engine)
    return Served(options.name or opened.name, engine)


def _try(engine: Engine) -> None:
    """Two tokens, so that what does not run here is known now, and whoever is told that the server is ready waits for no compiler."""
    last = Future[Piece]()
    shortest = Request(np.zeros(1, np.int32), 2, ignore_ends=True)
    engine.submit(shortest, lambda piece: last.set_result(piece) if piece.finish else None)
    if (piece := last.result()).finish == "error":
        engine.close()
        raise ConfigError(f"the model is loaded, but does not run here: {piece.problem}")
