"""Two servers behind a balancer, one of them killed, drained, stuck: `tests/serve/test_balancers.py` holds them to it.

    8 clients, streams and whole answers by turns ──► haproxy | nginx ──┬──► a   kill -9; SIGTERM; SIGSTOP, SIGCONT
                                                                        └──► b   nothing happens to it

What must hold: a request is lost on a alone, and only where a was killed; a is used again. And of a server that says it
is well, takes
requests and cuts each off, all are lost: what was sent to one server is sent to no other. Needs Debian's packages
haproxy and nginx.
"""

import http.client
import json
import re
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from experiments.serving import balancers
from experiments.serving.servers import Server

CLIENTS = 8
TOKENS = 24
# Seconds that a stands still: more than a balancer that asks needs to see it
STILL = 8.0
PATIENCE = 60.0  # seconds that a client waits for the next byte


class Answer(NamedTuple):
    """Of one request: when it began and ended, which server it was on ("" if on none), the longest wait between two
    bytes of its stream.
    """

    began: float
    ended: float
    server: str
    streamed: bool
    problem: str
    pause: float


class Clients:
    """Threads that ask as fast as they are answered, until they are stopped."""

    def __init__(self, port: int, model: str) -> None:
        self.answers: list[Answer] = []
        self._port, self._model, self._over = port, model, threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(index,), daemon=True)
            for index in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Answer]:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
        return self.answers

    def _ask(self, index: int) -> None:
        while not self._over.is_set():
            index += 1
            self.answers.append(ask(self._port, self._model, streamed=bool(index % 2)))


def ask(port: int, model: str, *, streamed: bool) -> Answer:
    began, server, pause = time.monotonic(), "", 0.0
    body = {
        "model": model,
        "prompt": "So it is",
        "max_tokens": TOKENS,
        "stream": streamed,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        server = re.split(", | : ", answer.getheader("x-served-by", ""))[-1]
        said, last = b"", time.monotonic()
        while line := answer.readline():
            said += line
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
        if answer.status != 200:
            problem = f"{answer.status} {said.decode()}"
        elif streamed:
            problem = (
                ""
                if said.count(b"data: [DONE]") == 1
                and said.rstrip().endswith(b"[DONE]")
                else "cut off"
            )
        else:
            problem = "" if json.loads(said)["choices"] else "empty"
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = repr(error)
    finally:
        connection.close()
    return Answer(
        began, time.monotonic(), server, streamed, problem, pause if streamed else 0.0
    )


class Row(NamedTuple):
    """What came of one thing that happened to a."""

    balancer: str
    happened: str
    answers: int
    refused: int  # by a with 503, which says to come again: nothing has run
    lost_on_a: int
    lost_elsewhere: int
    pause: float  # seconds between two bytes of a stream of b, at most
    back: float  # seconds from a's being healthy to its first answer; NaN: none
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        lost = self.lost_on_a if self.happened != "killed" else 0
        return (
            not (lost or self.refused or self.lost_elsewhere) and self.back == self.back
        )


def _killed(a: Server) -> None:
    a.end(signal.SIGKILL)
    a.start()
    a.ready()


def _drained(a: Server) -> None:
    code = a.end(signal.SIGTERM)
    if code:
        raise RuntimeError(f"a server that was drained ended with exit code {code}")
    a.start()
    a.ready()


def _stuck(a: Server) -> None:
    a.send(signal.SIGSTOP)
    time.sleep(STILL)
    a.send(signal.SIGCONT)
    a.ready()


HAPPENS: dict[str, Callable[[Server], None]] = {
    "killed": _killed,
    "drained": _drained,
    "stuck": _stuck,
}


def measure(
    balancer: str,
    happens: str,
    a: Server,
    b: Server,
    work: Path,
    before: float = 3.0,
    after: float = 5.0,
) -> Row:
    """`before`, `after`: seconds of load before it happens, and after a is back."""
    for server in (a, b):
        ask(server.port, server.model(), streamed=False)  # compiles
    with balancers.balancer(balancer, [a.port, b.port], work) as port:
        time.sleep(1)
        clients = Clients(port, b.model())
        try:
            time.sleep(before)
            HAPPENS[happens](a)
            healthy = time.monotonic()
            time.sleep(after)
        finally:
            answers = clients.stop()
        names = {
            "a": "a",
            "b": "b",
            f"127.0.0.1:{a.port}": "a",
            f"127.0.0.1:{b.port}": "b",
        }
        on = [names.get(answer.server, "") for answer in answers]
        lost = [
            server for server, answer in zip(on, answers, strict=True) if answer.problem
        ]
        of_a = [
            answer for server, answer in zip(on, answers, strict=True) if server == "a"
        ]
        refused = sum(answer.problem.startswith("503") for answer in of_a)
        again = [answer.ended for answer in of_a if answer.began > healthy]
        return Row(
            balancer,
            happens,
            len(answers),
            refused,
            lost.count("a") - refused,
            len(lost) - lost.count("a"),
            max(
                (
                    one.pause
                    for server, one in zip(on, answers, strict=True)
                    if server == "b"
                ),
                default=0.0,
            ),
            min(again, default=float("nan")) - healthy,
            tuple({answer.problem for answer in answers} - {""}),
        )


class Sent(NamedTuple):
    """Of requests to a balancer over a server that answers none and one that answers: how many came to each of them."""

    balancer: str
    requests: int
    answered: int
    to_a: int
    to_b: int

    @property
    def good(self) -> bool:
        return (
            0 < self.to_a == self.requests - self.answered
            and self.to_b == self.answered
        )


class _Counting(ThreadingHTTPServer):
    """A server that is well; of the requests that it takes it cuts each off, or answers each with this status."""

    daemon_threads = True

    def __init__(self, status: int | None) -> None:
        self.status, self.taken = status, 0
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._say(b"{}")

    def do_POST(self) -> None:
        assert isinstance(self.server, _Counting)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken += 1
        if self.server.status is None:
            self.close_connection = True
        else:
            self._say(b'{"choices": [{}]}', self.server.status)

    def _say(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: they are counted."""


def sent(
    balancer: str, work: Path, status: int | None = None, requests: int = 20
) -> Sent:
    """`status`: what a answers; None: nothing, it cuts each request off."""
    with _Counting(status) as a, _Counting(200) as b:
        with balancers.balancer(balancer, [a.server_port, b.server_port], work) as port:
            answers = [ask(port, "", streamed=False) for _ in range(requests)]
        a.shutdown()
        b.shutdown()
    return Sent(
        balancer,
        requests,
        sum(not answer.problem for answer in answers),
        a.taken,
        b.taken,
    )
