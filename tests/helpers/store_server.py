"""Servers on 127.0.0.1 that a test can have refuse, drip, cut short and lose requests.

S3's protocol is moto's, Google's that of gcp-storage-emulator. The emulator knows no conditional writes: they are added.
"""

import io
import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from meshtrain import stores

BUCKET = "bucket"
NEEDS = {"s3": "moto", "gs": "gcp_storage_emulator"}
# for parametrize: skipped where its library is not installed
SERVERS = [
    pytest.param(
        scheme,
        marks=pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}"),
    )
    for scheme, library in NEEDS.items()
]
EXPIRED = (
    b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)
REFUSALS = {
    "busy": (HTTPStatus.SERVICE_UNAVAILABLE, "Please reduce your request rate."),
    "expired": (HTTPStatus.UNAUTHORIZED, "The provided token has expired."),
}
BUSY = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


class StoreServer:
    """What the server has been asked, and what it does with the next requests.

    fault: called with (method, path), returns none or one of busy, expired, slow, cut, hang.
    """

    def __init__(self) -> None:
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.asked: list[tuple[str, str]] = []
        self.answered: list[tuple[str, str]] = []
        self.drip = 0.2  # seconds between two bytes of a slow answer
        self.url = ""

    def meet(self, method: str, path: str) -> str | None:
        """Notes a request; returns its fault."""
        self.asked.append((method, path))
        return self.fault(method, path)

    def dripping(self, body: bytes) -> Iterator[bytes]:
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


class S3Server(StoreServer):
    """Moto's application behind the faults."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        super().__init__()
        self.application = application

    def __call__(
        self, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        fault = self.meet(method, path)
        if fault in ("busy", "expired"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, body = {
                "busy": ("503 Slow Down", BUSY),
                "expired": ("403 Forbidden", EXPIRED),
            }[fault]
            start(
                status,
                [
                    ("Content-Type", "application/xml"),
                    ("Content-Length", str(len(body))),
                ],
            )
            return [body]
        if fault == "hang":
            time.sleep(self.drip * 50)
        answer = self.application(environ, start)
        self.answered.append((method, path))
        if fault == "slow":
            return self.dripping(b"".join(answer))
        if fault == "cut":
            body = b"".join(answer)
            return [body[: len(body) // 2]]
        return answer


@contextmanager
def _s3_server() -> Iterator[StoreServer]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *arguments: Any) -> None:
            pass

    server = S3Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server(
        "127.0.0.1", 0, server, threaded=True, request_handler=Quiet
    )
    server.url = f"http://127.0.0.1:{listening.server_port}"
    environment = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with _serving(listening, environment):
        bucket = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(bucket, timeout=20)
        yield server


@contextmanager
def _gs_server() -> Iterator[StoreServer]:
    from gcp_storage_emulator import exceptions as emulator_errors
    from gcp_storage_emulator import server as emulator
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.storage import Storage

    server = StoreServer()
    one_at_a_time = threading.Lock()  # the emulator's storage is not made for threads

    class Handler(emulator.RequestHandler):  # type: ignore[misc]
        def do(self, method: str) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = self._as_with_s3(method, sent)
            fault = server.meet(*asked)
            if fault in ("busy", "expired"):
                self._refuse(*REFUSALS[fault])
                return
            if fault == "hang":
                time.sleep(server.drip * 50)
            requests, connection = self.rfile, self.wfile
            self.rfile, self.wfile = io.BytesIO(sent), io.BytesIO()
            with one_at_a_time:
                if self._may_not_be_there(sent):
                    self._refuse(HTTPStatus.PRECONDITION_FAILED, "conditionNotMet")
                else:
                    getattr(emulator.RequestHandler, f"do_{method}")(self)
            server.answered.append(asked)
            head, _, body = self.wfile.getvalue().partition(b"\r\n\r\n")
            connection.write(head + b"\r\n\r\n")
            pieces = server.dripping(body) if fault == "slow" else [body]
            for piece in pieces:
                connection.write(piece[: len(piece) // 2] if fault == "cut" else piece)
            self.close_connection = fault == "cut" or self.close_connection
            self.rfile, self.wfile = requests, connection

        def _as_with_s3(self, method: str, sent: bytes) -> tuple[str, str]:
            """Returns the method and the path that the same request has in S3's protocol."""
            if name := _uploaded(sent):
                return "PUT", f"/{BUCKET}/{name}"
            return method, re.sub(r"^.*/b/(\w+)/o/", r"/\1/", unquote(self.path))

        def _may_not_be_there(self, sent: bytes) -> bool:
            """Returns whether an upload is for a new object alone, and there is one."""
            if "ifGenerationMatch=0" not in self.path:
                return False
            try:
                self.storage.get_file_obj(BUCKET, _uploaded(sent))
            except emulator_errors.NotFound:
                return False
            return True

        def _refuse(self, status: HTTPStatus, reason: str) -> None:
            answer = {"error": {"code": int(status), "message": reason}}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = partialmethod(do, "GET")
        do_POST = partialmethod(do, "POST")
        do_PUT = partialmethod(do, "PUT")
        do_DELETE = partialmethod(do, "DELETE")

    storage = Storage(use_memory_fs=True)
    create_bucket(BUCKET, storage)
    listening = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, storage))
    server.url = f"http://127.0.0.1:{listening.server_port}"
    environment = {
        "STORAGE_EMULATOR_HOST": server.url,
        "GOOGLE_CLOUD_PROJECT": "testing",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    with _serving(listening, environment):
        yield server


def _uploaded(sent: bytes) -> str:
    """Returns the name of the object that a multipart upload begins with; else nothing."""
    name = re.search(rb'"name": "([^"]+)"', sent[:1000])
    return name[1].decode() if name else ""


@contextmanager
def _serving(listening: Any, environment: dict[str, str]) -> Iterator[None]:
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    before = dict(os.environ)
    os.environ |= environment
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        listening.shutdown()
        thread.join(10)


@contextmanager
def store_server(scheme: str = "s3") -> Iterator[StoreServer]:
    """Serves a bucket of s3:// or gs:// from this process's memory, and leads this process and its children there."""
    stores.forget()
    with {"s3": _s3_server, "gs": _gs_server}[scheme]() as server:
        yield server
    stores.forget()


@contextmanager
def impatient(
    patch: pytest.MonkeyPatch,
    server: StoreServer,
    cache: Path,
    root: str,
    patience: float = 3.0,
) -> Iterator[None]:
    """Has requests tried again at once, with a cache of a test's own; behind it the store is whole and `root` empty."""
    patch.setattr(stores, "PAUSES", (0.01, 0.02))
    patch.setattr(stores, "PATIENCE", patience)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    yield
    server.fault = lambda method, path: None
    stores.remove([f"{root}/{name}" for name in stores.listing(root)])
