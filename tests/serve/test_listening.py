"""The port, and how a server ends, whatever its device does: it says so, finishes what runs, and closes."""

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace

import jax
import pytest
from fake_serving import fake, on_a_port, until
from starlette.testclient import TestClient
from tiny_models import hugging_face

from meshtrain.config import ConfigError
from meshtrain.serve.app import application
from meshtrain.serve.listening import closed, is_loopback, listening, served_model, url
from meshtrain.serve.service import Service

BODY = {"model": "fake", "prompt": "abc", "max_tokens": 40, "temperature": 0}


def get(address, path="/health"):
    try:
        with urllib.request.urlopen(address + path, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def post(address, **fields):
    data = json.dumps(BODY | fields).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def later(address, **fields):
    found: list = []
    thread = threading.Thread(
        target=lambda: found.append(post(address, **fields)), daemon=True
    )
    thread.start()
    return lambda: (thread.join(30), found[0])[1]


def test_a_port_that_is_taken_is_a_sentence():
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url(taken) == f"http://127.0.0.1:{port}" and is_loopback(taken)
        with pytest.raises(
            ConfigError, match=rf"^127\.0\.0\.1:{port} .*: address already in use; "
        ):
            listening("127.0.0.1", port)


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system knows no such timeout"
)
def test_a_client_that_takes_nothing_is_given_up_after_so_many_seconds():
    with listening("127.0.0.1", 0, stalled=7) as found:
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


@pytest.mark.parametrize(
    "host", ["no.such.host.invalid", "192.0.2.1", "x" * 300, "\udcff"]
)
def test_an_address_that_is_not_this_machines_is_a_sentence(host):
    with pytest.raises(
        ConfigError, match=r"not an address of this machine|cannot be listened"
    ):
        listening(host, 0)


def test_all_addresses_are_no_loopback():
    with listening("0.0.0.0", 0) as door:
        assert not is_loopback(door)
    if socket.has_ipv6:
        with listening("::1", 0) as door:
            assert is_loopback(door) and url(door).startswith("http://[::1]:")


def test_a_server_that_is_asked_to_end_says_so_finishes_and_then_closes(capsys):
    with (
        fake(slots=2) as made,
        on_a_port(made.service, notice=0.3) as (address, server),
    ):
        made.pace.hold()
        running = later(address)
        made.until(lambda status: status.busy == 1)
        server.handle_exit(signal.SIGTERM, None)
        assert get(address)[0] == 503 and get(address)[1]["status"] == "draining"
        # the balancer has not noticed yet
        late = later(address, prompt="late")
        made.until(lambda status: status.busy + status.waiting == 2)
        until(lambda: made.service.closed)
        # and one that has asked nothing finds no connection, so that it tries another server
        with pytest.raises(urllib.error.URLError, match="refused"):
            post(address)
        made.pace.go()
        assert running()[0] == late()[0] == 200
        until(lambda: not server.server_state.connections and server.should_exit)
    assert (
        "ending: 1 request to finish; a second signal ends at once.\n"
        in capsys.readouterr().err
    )


def test_what_takes_too_long_to_finish_is_told_and_the_server_ends():
    with fake(slots=2) as made:
        with on_a_port(made.service, patience=0.2) as (address, server):
            made.pace.seconds = 0.05
            whole, streamed = later(address), later(address, stream=True)
            made.until(lambda status: status.busy == 2)
            server.handle_exit(signal.SIGINT, None)
            (code, said), (began, events) = whole(), streamed()
        assert code == 503 and json.loads(said)["error"]["code"] == "ended"
        assert (
            began == 200
            and '"code":"ended"' in events
            and events.endswith("data: [DONE]\n\n")
        )
        made.until(lambda status: status.busy == 0)


def request(**fields) -> bytes:
    body = json.dumps(BODY | fields)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def connected(address: str, sent: bytes) -> socket.socket:
    """A client that has sent something, and reads little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    client.sendall(sent)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_connection_frees_its_slot(stream):
    with fake() as made, on_a_port(made.service) as (address, _):
        made.pace.seconds = 0.01
        with connected(address, request(stream=stream, max_tokens=60)):
            made.until(lambda status: status.busy == 1)
            before = made.engine.status.tokens
        made.until(lambda status: status.busy == 0)
        assert made.engine.status.tokens < before + 40, "it was not let finish"


def test_what_is_no_http_is_nobodys_error(capfd):
    negative = b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"
    with fake() as made, on_a_port(made.service) as (address, _):
        for junk in (b"\x16\x03\x01\x02\x00" * 20, b"hello\r\n\r\n", negative):
            with connected(address, junk) as client:
                assert client.recv(100).startswith(b"HTTP/1.1 400")
        assert get(address)[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read(path):
    first = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    behind = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with fake() as made, on_a_port(made.service) as (address, _):
        with connected(address, (first + behind).encode()) as client:
            answer = b"".join(iter(lambda: client.recv(4096), b"")).decode()
        assert (
            answer.startswith("HTTP/1.1 400")
            and answer.count("HTTP/1.1") == 1
            and '"code":"two_lengths"' in answer
        )
        assert get(address)[0] == 200


@pytest.mark.thorough
def test_a_client_that_reads_nothing_is_given_up_and_holds_nothing_for_ever():
    # enough that no buffer between here and there takes it
    with (
        fake(slots=1, length=40_000) as made,
        on_a_port(made.service, stalled=1) as (address, server),
    ):
        with connected(address, request(stream=True, max_tokens=39_000, logprobs=20)):
            made.until(lambda status: status.busy == 1)
            began = time.monotonic()
            assert post(address, max_tokens=2)[0] == 200, (
                "others are answered beside it"
            )
            until(lambda: not made.service.running, 60)
            assert (
                time.monotonic() - began < 60
                and made.service.counted.requests["/v1/completions", 499] == 1
            )
        until(lambda: not server.server_state.connections)


def test_an_engine_that_works_is_closed_and_what_it_had_ends():
    with fake() as server:
        server.pace.seconds = 0.005
        answer = server.later(max_tokens=60)
        server.until(lambda status: status.busy == 1)
        assert closed(server.service.served)
        assert (
            answer().status_code == 503
            and answer().json()["error"]["code"] == "cancelled"
        )


def test_a_device_that_stands_still_keeps_no_server_from_ending():
    with fake() as server:
        server.pace.hold()
        answer = server.later()
        server.until(lambda status: status.busy == 1)
        began = time.monotonic()
        assert not closed(server.service.served, 0.1) and time.monotonic() - began < 5
        server.pace.go()
        assert answer().status_code in (200, 503)


@pytest.fixture
def compilations():
    """Grows by one with each program that XLA compiles."""
    found: list[str] = []

    def heard(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ASKED = [
    *(
        {"prompt": [7] * tokens, "ignore_eos": True} | more
        for tokens, more in (
            (3, {}),
            (20, {}),
            (35, {}),
            (4, {"logprobs": 2}),
            (5, {"temperature": 0}),
            (6, {"n": 2, "stream": True}),
        )
    ),
    HELLO,
    HELLO | {"logprobs": True, "top_logprobs": 3},
    HELLO | {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 3},
]


@pytest.mark.thorough
def test_whoever_asks_a_server_that_is_ready_waits_for_no_compiler(
    tmp_path, compilations
):
    options = Namespace(
        path=hugging_face(tmp_path / "tiny"),
        name=None,
        mesh=None,
        precision=None,
        step="newest",
        adapter=None,
        slots=2,
        length=40,
        queue=4,
        weights=None,
    )
    service = Service("tiny", 4, served=served_model(options))
    assert (compiled := len(compilations)) >= 5
    client = TestClient(application(service))
    try:
        for body in ASKED:
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            assert (
                client.post(
                    path, json={"model": "tiny", "max_tokens": 3, **body}
                ).status_code
                == 200
            )
    finally:
        service.served.close()
    assert len(compilations) == compiled
