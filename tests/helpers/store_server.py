"""A server of S3's protocol on 127.0.0.1, moto's, that a test can have refuse, drip, cut short and lose requests."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshtrain import stores

BUCKET = "bucket"
EXPIRED = (
    b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)
BUSY = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


class StoreServer:
    """What the server has been asked, and what it does with the next requests.

    fault: called with (method, path), returns none or one of busy, expired, slow, cut, hang.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.asked: list[tuple[str, str]] = []
        self.drip = 0.2  # seconds between two bytes of a slow answer
        self.url = ""

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.asked.append((method, path))
        fault = self.fault(method, path)
        if fault in ("busy", "expired"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, body = {"busy": ("503 Slow Down", BUSY), "expired": ("403 Forbidden", EXPIRED)}[
                fault
            ]
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if fault == "hang":
            time.sleep(self.drip * 50)
        answer = self.application(environ, start)
        if fault == "slow":
            return self._dripping(b"".join(answer))
        if fault == "cut":
            body = b"".join(answer)
            return [body[: len(body) // 2]]
        return answer

    def _dripping(self, body: bytes) -> Iterator[bytes]:
        for byte in body:
            time.sleep(self.drip)
            yield bytes([byte])

    def fail(self, times: int, fault: str, method: str = "", part: str = "") -> None:
        """Has the next `times` requests of a method, on a path that has `part` in it, meet a fault."""
        left = [times]

        def choose(asked: str, path: str) -> str | None:
            if left[0] and asked.startswith(method) and part in path:
                left[0] -= 1
                return fault
            return None

        self.fault = choose


@contextmanager
def store_server() -> Iterator[StoreServer]:
    """Serves a bucket from this process's memory; the environment leads this process and its children there."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *arguments: Any) -> None:
            pass

    server = StoreServer(DomainDispatcherApplication(create_backend_app))
    listening = make_server("127.0.0.1", 0, server, threaded=True, request_handler=Quiet)
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        import urllib.request

        urllib.request.urlopen(
            urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT"), timeout=20
        )
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        listening.shutdown()
        thread.join(10)


@contextmanager
def impatient(
    patch: pytest.MonkeyPatch, server: StoreServer, cache: Path, root: str, patience: float = 3.0
) -> Iterator[None]:
    """Has requests tried again at once, with a cache of a test's own; behind it the store is whole and `root` empty."""
    patch.setattr(stores, "PAUSES", (0.01, 0.02))
    patch.setattr(stores, "PATIENCE", patience)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    yield
    server.fault = lambda method, path: None
    stores.remove([f"{root}/{name}" for name in stores.listing(root)])
