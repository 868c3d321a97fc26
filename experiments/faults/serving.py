"""meshtrain.serve: bodies, fields and bytes that no client should send, to a real server over a model without a device
(tests/helpers).
"""

import contextlib
import functools
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from experiments.faults.harness import (
    REPOSITORY,
    Crash,
    Hang,
    Place,
    Silent,
    Unclear,
    contains,
    fault,
    kind,
)

ROOM = "serving"
PATIENCE = 60.0  # seconds for an answer
QUIET = 1.0  # seconds after one in which another would come
STALLED = 2  # seconds after which a client that says no more is left
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": "fake", "prompt": "abc", "max_tokens": 2},
    CHAT: {"model": "fake", "messages": HELLO, "max_tokens": 2},
}


@contextlib.contextmanager
def serving() -> Iterator[Any]:
    """The server, and behind the context a proof that it still answers."""
    sys.path.insert(0, str(REPOSITORY / "tests/helpers"))
    from fake_serving import fake

    with fake() as found:
        yield found
        if (status := found.completion().status_code) != 200:
            raise Crash(f"the next request gets {status}")


def refused(answer: Any, *words: str) -> None:
    """A 4xx with one sentence."""
    if answer.status_code < 400:
        raise Silent(f"{answer.status_code}: {answer.text[:200]}")
    if answer.status_code >= 500:
        raise Crash(f"{answer.status_code}: {answer.text[:200]}")
    try:
        sentence = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        raise Unclear(f"no error of OpenAI's form: {answer.text[:200]}") from None
    if len(sentence.splitlines()) != 1 or len(sentence) > 700 or not sentence.isprintable():
        raise Unclear(f"no one sentence: {sentence[:200]!r}")
    contains(sentence, *words)


def posted(paths: tuple[str, ...], content: Callable[[str], bytes]) -> None:
    with serving() as server:
        for path in paths:
            refused(
                server.client.post(
                    path, content=content(path), headers={"content-type": "application/json"}
                )
            )


kind(
    "request-body",
    "serve/test_malformed.py::test_a_malformed_request_gets_its_own_4xx_and_the_server_goes_on",
    "serve/test_malformed.py::test_a_body_that_is_not_said_to_be_json_is_refused",
    "serve/test_adversity.py::test_a_body_that_asks_for_nothing_is_refused_in_a_short_sentence",
)
for name, content in {
    "nothing": b"",
    "a bracket": b"{",
    "a list": b"[1]",
    "null": b"null",
    "a number": b"3",
    "a text": b'"a"',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "zeros": bytes(64),
    "nested 60,000 deep": b"[" * 60_000,
    "nested 10,000 deep in objects": b'{"a":' * 10_000,
    "with NaN": b'{"temperature": NaN}',
    "with a number of 5,000 digits": b'{"seed": ' + b"1" * 5000 + b"}",
    "70,000 blanks": b" " * 70_000,
    "gzip": b"\x1f\x8b\x08\x00" + bytes(40),
    "a form": b"model=fake&prompt=a",
}.items():

    @fault(ROOM, f"a body that is {name}")
    def _(p: Place, content: bytes = content) -> None:
        posted((COMPLETION, CHAT), lambda path: content)


kind(
    "request-field",
    "serve/test_malformed.py::test_a_malformed_request_gets_its_own_4xx_and_the_server_goes_on",
)


def field(key: str, shown: str, value: Any, *paths: str) -> None:
    @fault(ROOM, f"a field {key} that is {shown}")
    def _(p: Place) -> None:
        posted(
            paths or (COMPLETION, CHAT),
            lambda path: json.dumps({**GOOD[path], key: value}).encode(),
        )


WRONG: dict[str, Any] = {
    "a text": "x" * 3000,
    "a list": [[1]],
    "an object": {"a": 1},
    "below zero": -1,
    "a fraction": 1.5,
    "beyond 64 bits": 2**70,
}
for key, legal in {
    "max_tokens": (),
    "temperature": ("a fraction",),
    "top_p": (),
    "top_k": (),
    "n": (),
    "stop": (),
    "stream": (),
    "ignore_eos": (),
    "frequency_penalty": (),
    "logit_bias": (),
    "stream_options": (),
    "no_such_field": (),
    "\u202efield": (),
}.items():
    for shown, value in WRONG.items():
        if shown not in legal:
            field(key, shown, value)
for shown, value in {
    "no list": "hello",
    "empty": [],
    "of numbers": [1],
    "of a role that there is not": [{"role": "wizard", "content": "a"}],
    "without content": [{"role": "user"}],
    "with content of numbers": [{"role": "user", "content": 3}],
    "with an image": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ],
    "with half of a surrogate pair": [{"role": "user", "content": "\ud800"}],
    "with a field more": [{"role": "user", "content": "a", "colour": 1}],
    "that the template refuses": [{"role": "user", "content": "refuse me"}],
    "of 3,000 characters": [{"role": "user", "content": "x" * 3000}],
}.items():
    field("messages", shown, value, CHAT)

# --- bytes, past any client

kind("request-bytes")


@contextlib.contextmanager
def on_a_port() -> Iterator[Callable[..., bytes]]:
    """Sends bytes to a port and gives what comes back until the server closes; then a proof that it still answers."""
    with serving() as server:
        from fake_serving import on_a_port as opened

        server.service.hosts = frozenset(
            {"testserver"}
        )  # as of a server without a key; the client's own
        with opened(server.service, stalled=STALLED) as (address, _):
            host, port = address.removeprefix("http://").split(":")
            yield functools.partial(sent, host, int(port))
            if not sent(
                host,
                int(port),
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            ).startswith(b"HTTP/1.1 200"):
                raise Crash("the next connection is not answered")


def sent(host: str, port: int, content: bytes, ends: bool = False) -> bytes:
    """What comes back until the connection is closed, or nothing more does; `ends`: nothing more is sent."""
    with socket.create_connection((host, port), PATIENCE) as connection:
        found = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(content)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            try:
                while part := connection.recv(65536):
                    found += part
                    connection.settimeout(QUIET)
            except TimeoutError:
                if not found:
                    raise Hang("neither an answer nor an end") from None
        return found


def codes(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]


def raw(name: str, content: bytes, ends: bool = False) -> None:
    """At most one answer, and no 2xx or 5xx."""

    @fault(ROOM, f"bytes: {name}")
    def _(p: Place) -> None:
        with on_a_port() as send:
            found = codes(send(content, ends))
        if len(found) > 1 or any(code < 300 for code in found):
            raise Silent(f"answered with {found}")
        if any(code >= 500 and code != 501 and code != 505 for code in found):
            raise Crash(f"answered with {found}")


def post(
    *headers: str, content: bytes = b"{}", path: str = COMPLETION, host: str = "localhost"
) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


WHOLE = json.dumps(GOOD[COMPLETION]).encode()
SECOND = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
raw("nothing that is HTTP", b"hello\r\n\r\n")
raw("a TLS hello", bytes.fromhex("160301020001000001fc0303") + bytes(500))
raw("zeros", bytes(1000))
raw("a request line of 100,000 characters", b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")
raw(
    "a header of 1,000,000 characters",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n",
)
raw("100,000 headers", b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 100_000 + b"\r\n")
raw("a header without a name", b"GET /health HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n")
raw("a header with a NUL", b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n")
raw("no host", b"GET /health HTTP/1.1\r\n\r\n")
raw("two hosts", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
raw("HTTP/nine", b"GET /health HTTP/nine\r\nHost: a\r\n\r\n")
raw(
    "a method that there is not",
    b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
)
raw(
    "a path that is not there",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
)
raw("a path of bytes", b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
raw("a length below zero", post("Content-Length: -5"))
raw("a length that is a word", post("Content-Length: many"))
raw("two lengths", post("Content-Length: 2", "Content-Length: 200"))
raw("a length of 10^15", post("Content-Length: 1000000000000000", "Connection: close"))
raw("half a body, then the end", post("Content-Length: 5000", content=WHOLE[:10]), ends=True)
raw(
    "a chunk of a size that is no number",
    post("Transfer-Encoding: chunked", content=b"zz\r\n{}\r\n0\r\n\r\n"),
)
raw(
    "a chunk of a size of 5,000 digits",
    post("Transfer-Encoding: chunked", content=b"f" * 5000 + b"\r\n{}\r\n0\r\n\r\n"),
)
raw("an encoding that there is not", post("Transfer-Encoding: gzip", content=WHOLE))
raw(
    "a length beside chunks, with a second request behind",
    post(
        f"Content-Length: {len(WHOLE)}", "Transfer-Encoding: chunked", content=b"0\r\n\r\n" + SECOND
    ),
)
raw(
    "a length beside chunks",
    post(
        "Content-Length: 4",
        "Transfer-Encoding: chunked",
        "Connection: close",
        content=b"%x\r\n%s\r\n0\r\n\r\n" % (len(WHOLE), WHOLE),
    ),
)
raw(
    "another's host without a key, as a page that rebinds its name",
    post(f"Content-Length: {len(WHOLE)}", "Connection: close", content=WHOLE, host="evil.example"),
)
raw(
    "a text and no JSON by its type",
    post(f"Content-Length: {len(WHOLE)}", "Connection: close", content=WHOLE).replace(
        b"application/json", b"text/plain"
    ),
)


@fault(ROOM, "bytes: forty connections that say nothing, and one that asks")
def silent_clients(p: Place) -> None:
    with serving() as server:
        from fake_serving import on_a_port as opened

        with opened(server.service) as (address, _), contextlib.ExitStack() as held:
            host, port = address.removeprefix("http://").split(":")
            for _ in range(40):
                held.enter_context(socket.create_connection((host, int(port))))
            if 200 not in codes(
                sent(host, int(port), SECOND.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            ):
                raise Silent("nobody is answered any more")


for accept in ("*/*", "", "text/plain"):

    @fault(
        ROOM, f"/metrics asked with Accept {accept!r}: the classic text, which every scraper parses"
    )
    def _(p: Place, accept: str = accept) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        with serving() as server:
            answer = server.client.get("/metrics", headers={"accept": accept})
            if not answer.headers["content-type"].startswith("text/plain"):
                raise Silent(f"its type is {answer.headers['content-type']}")
            families = list(text_string_to_metric_families(answer.text))
            if any(family.type in ("unknown", "untyped") for family in families) or not any(
                f.samples for f in families if f.type == "counter"
            ):
                raise Silent(
                    f"{[family.name for family in families if family.type == 'unknown'][:3]} have no type, or "
                    "counters are empty"
                )
