"""A server of a model without a device (fake_serving) in a process of its own, and what comes back of raw bytes."""

import contextlib
import json
import multiprocessing
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from free_port import free_port

SLOTS, QUEUE, LENGTH = 4, 8, 256
# Forked from one process that has imported what takes long.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["meshtrain.serve.app", "meshtrain.serve.listening", "starlette.testclient"]
)


class FakeProcess:
    """`step`: seconds that a step of decoding takes; `loading`: until the model is there."""

    def __init__(
        self,
        step: float = 0.0,
        notice: float = 0.5,
        drain: float = 20.0,
        loading: float = 0.0,
    ) -> None:
        self.port = free_port()
        settings = step, notice, drain, loading
        self.process = FORKED.Process(
            target=_serve, args=(self.port, *settings), daemon=True
        )
        self.process.start()
        self.until(
            lambda: self.health()["status"] == ("loading" if loading else "ready"), 60
        )

    def health(self) -> dict:
        """What /health says; without a server {"status": ""}."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=5
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)
        except OSError:
            return {"status": ""}

    def until(self, holds: Callable[[], bool], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert self.process.is_alive(), "the server has ended"
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.05)

    def idle(self) -> bool:
        found = self.health()
        return found["status"] == "ready" and not found["busy"] and not found["waiting"]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def said(self, request: bytes, patience: float = 20.0) -> bytes:
        """All that comes back of some bytes until the server closes, or says nothing for so many seconds."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
            return rest(connection, patience)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def exit_code(self, within: float = 10.0) -> int | None:
        """None: it has not ended."""
        self.process.join(within)
        return self.process.exitcode

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def rest(connection: socket.socket, patience: float = 20.0) -> bytes:
    """What a connection still says."""
    found = b""
    connection.settimeout(patience)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while more := connection.recv(65536):
            found += more
    return found


def post(body: object, path: str = "/v1/completions", close: bool = True) -> bytes:
    """A whole request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return (
        head + ("Connection: close\r\n" if close else "") + "\r\n"
    ).encode() + content


def asked(most: int, stream: bool = False, **more: object) -> dict:
    return {
        "model": "fake",
        "prompt": "abc",
        "max_tokens": most,
        "stream": stream,
        **more,
    }


@contextlib.contextmanager
def fake_process(**settings: float) -> Iterator[FakeProcess]:
    server = FakeProcess(**settings)
    try:
        yield server
    finally:
        server.end()


def _serve(port: int, step: float, notice: float, drain: float, loading: float) -> None:
    from fake_serving import fake

    from meshtrain.serve import listening
    from meshtrain.serve.app import application

    with fake(slots=SLOTS, length=LENGTH, waiting=QUEUE) as made:
        made.pace.seconds = step
        service, served = made.service, made.service.served
        if loading:
            service.served = None
            loaded = threading.Timer(
                loading, lambda: setattr(service, "served", served)
            )
            loaded.daemon = True
            loaded.start()
        door = listening.listening("127.0.0.1", port)
        listening.Server(
            application(service), service, notice, drain, access_log=False
        ).run(sockets=[door])
        service.served = served
