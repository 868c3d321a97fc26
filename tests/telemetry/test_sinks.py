"""Alerts arrive where they are sent; what hangs, refuses or fails is said once and holds nothing up."""

import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from refusals import tells

from meshtrain.config.telemetry import alert_target
from meshtrain.run.directory import ALERTS
from meshtrain.telemetry.sinks import (
    MOST_WAITING,
    Delivery,
    Undelivered,
    post,
    run,
    sink,
)

ALERT = {
    "time": 1.0,
    "step": 3,
    "rule": "loss_spike",
    "state": "firing",
    "severity": "warning",
    "value": 7.5,
    "limit": 6,
    "sentence": "up.",
}


@contextmanager
def receiver(*answers):
    """A server that answers so, one after the other, the last one for ever; what it was posted."""
    got, left = [], list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", got
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silent():
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def send(to, *alerts, seconds=20.0):
    for alert in alerts or (ALERT,):
        to.send(alert)
    to.close(time.monotonic() + seconds)


def webhook(url, **options):
    return Delivery(
        "webhook to here",
        lambda alert: post(url, alert, "mine", **options),
        pauses=(0.01, 0.01),
    )


def test_a_webhook_gets_the_alert_with_the_run_and_a_text(tmp_path):
    with receiver(200) as (url, got):
        send(sink(alert_target(f"webhook:{url}"), tmp_path / "mine"))
    assert got == [ALERT | {"run": "mine", "text": "mine: firing, loss_spike: up."}]


def test_what_a_webhook_refuses_for_now_is_sent_again(capsys):
    with receiver(503, 429, 200) as (url, got):
        send(webhook(url))
    assert len(got) == 3 and capsys.readouterr().err == ""


@pytest.mark.parametrize("answer", [301, 404])
def test_what_a_webhook_refuses_for_good_is_sent_once_and_said_once(answer, capsys):
    with receiver(answer) as (url, got):
        send(webhook(url), ALERT, ALERT, ALERT)
    assert len(got) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert tells(
        said, "not delivered by webhook to here", str(answer), "training goes on."
    )


def test_a_webhook_that_hangs_holds_up_neither_the_loop_nor_the_end(capsys):
    with silent() as url:
        began = time.monotonic()
        send(webhook(url, limit=30), *[ALERT] * 2 * MOST_WAITING, seconds=0.2)
        assert time.monotonic() - began < 1.5
    assert capsys.readouterr().err.count("\n") == 1


def test_a_webhook_that_nobody_answers_or_that_hangs_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Undelivered, match="connection refused"):
        post(f"http://127.0.0.1:{port}/", ALERT, "mine")
    with silent() as url, pytest.raises(Undelivered, match="timed out"):
        post(url, ALERT, "mine", limit=0.1)


def test_what_arrives_again_may_fail_again_and_is_said_again(capsys):
    works = iter([False, False, True, False])

    def deliver(alert):
        if not next(works):
            raise Undelivered("no", final=True)

    send(Delivery("it", deliver), *[ALERT] * 4)
    assert capsys.readouterr().err.count("it: no") == 2


def test_a_webhook_is_named_without_what_may_be_secret(tmp_path, capsys):
    send(
        sink(alert_target("webhook:http://user:password@127.0.0.1:1/token"), tmp_path),
        seconds=0.3,
    )
    said = capsys.readouterr().err
    assert "127.0.0.1" in said and "password" not in said and "token" not in said


def test_a_command_finds_the_alert_on_its_standard_input(tmp_path):
    program = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    send(
        sink(
            alert_target(f'command:{sys.executable} -c "{program}" {tmp_path}/got'),
            tmp_path,
        )
    )
    assert json.loads((tmp_path / "got").read_text()) == ALERT


@pytest.mark.thorough
def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    with pytest.raises(Undelivered, match="longer than"):
        run(["sh", "-c", f"(sleep 1; touch {tmp_path}/late) & wait"], ALERT, limit=0.3)
    time.sleep(1.2)
    assert not (tmp_path / "late").exists()


def test_a_command_that_fails_or_is_not_there_says_why_and_one_that_reads_nothing_is_no_failure():
    with pytest.raises(Undelivered, match="ended with 3"):
        run(["sh", "-c", "exit 3"], ALERT)
    with pytest.raises(Undelivered, match="no such file"):
        run(["not-a-program-of-this-machine"], ALERT)
    run(["true"], ALERT | {"sentence": "x" * 200_000})


def test_the_file_has_a_line_an_alert_and_the_log_a_sentence(tmp_path, capsys):
    for kind in ("file", "log"):
        send(sink(alert_target(kind), tmp_path), ALERT, ALERT | {"state": "resolved"})
    lines = [
        json.loads(line)["state"]
        for line in (tmp_path / ALERTS).read_text().splitlines()
    ]
    assert lines == ["firing", "resolved"]
    assert (
        capsys.readouterr().err
        == "meshtrain: alert (loss_spike): up.\nmeshtrain: over (loss_spike): up.\n"
    )
