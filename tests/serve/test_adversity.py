"""A server among enemies: bytes that are no HTTP, bodies that are no JSON, clients that crawl, vanish or come in
crowds, signals at any moment.

Whatever comes, it is answered with a 4xx or a closed door, and the next request as if nothing had been.
"""

import contextlib
import re
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_process import QUEUE, SLOTS, asked, fake_process, post, rest

pytestmark = pytest.mark.thorough
STEP = 0.02


@pytest.fixture(scope="module")
def server():
    with fake_process(step=STEP) as found:
        yield found


@pytest.fixture(autouse=True)
def still_serves(request):
    """After each test the server has nothing left of it, and answers."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.until(server.idle)
        assert answered(server.said(post(asked(3))))


def code(said: bytes) -> int:
    return int(match[1]) if (match := re.match(rb"HTTP/1\.1 (\d{3})", said)) else 0


def answered(said: bytes) -> bool:
    return code(said) == 200 and b'"finish_reason":"length"' in said


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
NO_HTTP = {
    "garbage": bytes(range(256)) * 40,
    "hello of TLS": bytes.fromhex("1603010200010001fc0303") + b"\x00" * 500,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "a hundred thousand headers": b"GET /health HTTP/1.1\r\nHost: a\r\n"
    + b"".join(b"X-%d: y\r\n" % i for i in range(100_000))
    + b"\r\n",
    "a header of a megabyte": b"GET /health HTTP/1.1\r\nHost: a\r\nX: "
    + b"y" * 2**20
    + b"\r\n\r\n",
    "a path of a megabyte": b"GET /" + b"y" * 2**20 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n{}",
    "a length that is not a number": HEAD + b"Content-Length: ten\r\n\r\n{}",
    "a length beyond all": HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "a chunk without end": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n{",
    "a chunk that is not a number": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a header that is not text": b"GET /health HTTP/1.1\r\nHost: a\r\n\xff\xfe: \x00\r\n\r\n",
    "a null in the path": b"GET /hea\x00lth HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a version of a word": b"GET /health HTTP/nine\r\nHost: a\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    "a method that there is not": b"BREW /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "a path upwards": b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    "a path of bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    "an encoding that there is not": HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "half a body": HEAD + b"Content-Length: 5000\r\n\r\n{",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_refused(server, name):
    said = server.said(NO_HTTP[name], patience=0.5)
    assert code(said) in (0, *range(400, 500)), said[:200]


NO_JSON = {
    "a number of a million digits": b'{"model": "fake", "prompt": "a", "max_tokens": '
    + b"9" * 10**6
    + b"}",
    "nested deep": b'{"model": "fake", "prompt": ' + b"[" * 10**6 + b"]" * 10**6 + b"}",
    "objects nested deep": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "text behind it": b'{"model": "fake", "prompt": "a"} and more',
    "a list of a million": b'{"model": "fake", "prompt": [' + b"0," * 10**6 + b"0]}",
    "a million keys": b'{"model": "fake", "prompt": "a", '
    + b",".join(b'"%d": 1' % i for i in range(300_000))
    + b"}",
    "a prompt of megabytes": b'{"model": "fake", "prompt": "'
    + b"a" * (4 << 20)
    + b'"}',
    "more than is read": b'{"model": "fake", "prompt": "' + b"a" * (16 << 20) + b'"}',
}


@pytest.mark.parametrize("name", NO_JSON)
def test_a_body_that_asks_for_nothing_is_refused_in_a_short_sentence(server, name):
    began = time.monotonic()
    said = server.said(post(NO_JSON[name]))
    assert 400 <= code(said) < 500 and b'"error"' in said and len(said) < 1500, said[
        :300
    ]
    assert time.monotonic() - began < 10


def test_a_body_in_chunks_is_refused_before_its_end(server):
    with server.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(16):
            connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        # and no end, ever
        assert code(connection.recv(100)) == 413


def test_two_requests_in_one_packet_are_answered_in_their_order(server):
    said = server.said(post(asked(2), close=False) + post(asked(4)))
    assert [int(n) for n in re.findall(rb'"completion_tokens":(\d+)', said)] == [2, 4]


@pytest.fixture
def crowd(server):
    """Connections, as many as a test asks for, closed at its end."""
    with contextlib.ExitStack() as stack:
        yield lambda many: [stack.enter_context(server.connect()) for _ in range(many)]


def test_a_head_that_crawls_keeps_nobody_waiting(server, crowd):
    crawling = crowd(200)
    for part in (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ", *[b"y"] * 5):
        for connection in crawling:
            connection.sendall(part)
        began = time.monotonic()
        assert answered(server.said(post(asked(2))))
        assert time.monotonic() - began < 2


def test_clients_that_are_killed_in_their_streams_free_their_slots(server):
    for _ in range(3):
        clients = [server.connect() for _ in range(SLOTS)]
        for client in clients:
            client.sendall(post(asked(250, stream=True)))
        assert all(client.recv(100) for client in clients)
        server.until(lambda: server.health()["busy"] == SLOTS)
        for client in clients:
            # as the system does for a process that is killed with something unread
            client.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            client.close()
        server.until(server.idle, 250 * STEP / 2)


def test_clients_that_leave_the_queue_are_not_answered(server, crowd):
    clients = crowd(SLOTS + QUEUE)
    for client in clients:
        client.sendall(post(asked(200)))
    server.until(lambda: server.health()["waiting"] == QUEUE)
    assert code(server.said(post(asked(1)))) == 429
    for client in clients:
        client.close()
    server.until(server.idle, 200 * STEP / 2)


def test_a_crowd_of_connections_is_answered(crowd):
    clients = crowd(500)
    for client in clients:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    with ThreadPoolExecutor(8) as pool:
        assert [code(said) for said in pool.map(rest, clients)] == [200] * 500


def test_a_process_that_was_stopped_goes_on_where_it_was(server):
    with server.connect() as client:
        client.sendall(post(asked(40, stream=True)))
        assert client.recv(100)
        server.signal(signal.SIGSTOP)
        time.sleep(1.5)
        server.signal(signal.SIGCONT)
        said = rest(client)
        assert said.count(b"data: [DONE]") == 1 and b'"finish_reason":"length"' in said


def test_sigterm_lets_streams_end_and_takes_requests_until_balancers_know():
    with fake_process(step=0.05, notice=1.0) as server:
        with server.connect() as stream, server.connect() as late:
            stream.sendall(post(asked(60, stream=True)))
            assert stream.recv(100)
            server.signal(signal.SIGTERM)
            server.until(lambda: server.health()["status"] == "draining")
            late.sendall(post(asked(3)))
            assert answered(rest(late))
            said = rest(stream)
            assert (
                said.count(b"data: [DONE]") == 1 and b'"finish_reason":"length"' in said
            )
        assert server.exit_code() == 0


def test_a_second_signal_ends_it_at_once():
    with fake_process(step=0.2, notice=10) as server, server.connect() as stream:
        stream.sendall(post(asked(200, stream=True)))
        assert stream.recv(100)
        server.signal(signal.SIGTERM)
        server.until(lambda: server.health()["status"] == "draining")
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 75
