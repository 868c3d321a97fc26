"""Delivers alerts.

    log    stderr          file    RUN/alerts.jsonl         at once
    webhook, command ──► a queue ──► a thread: three times, each with a time limit

Each sink takes an alert as a dict and returns at once; what hangs or refuses costs an alert, never the run.
"""

import contextlib
import functools
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from meshtrain.config.telemetry import VARIABLE, AlertTarget, is_url
from meshtrain.errors import refusal, say, short
from meshtrain.run.directory import ALERTS
from meshtrain.run.rows import MetricsFile

LIMIT = {"webhook": 5.0, "command": 10.0}  # seconds of one try
PAUSES = (1.0, 4.0)  # seconds before the second and third try
MOST_WAITING = 100  # alerts; of more, whoever reads them has no need
# Seconds that the end of a run waits for all threads: an alert may be why it ended
PATIENCE = 8.0

Sent = Mapping[str, Any]


class Sink(Protocol):
    def send(self, alert: Sent) -> None: ...
    def close(self, deadline: float) -> None: ...


def sink(target: AlertTarget, directory: Path) -> Sink:
    """Returns the sink of a target of `telemetry.alerts`."""
    if target.kind == "log":
        return Log()
    if target.kind == "file":
        return File(directory / ALERTS)
    if target.kind == "webhook" and (variable := VARIABLE.fullmatch(target.address)):
        address = functools.partial(address_in, variable[1])
        if variable[1] not in os.environ:
            say(
                f"alerts are not delivered by webhook:{target.address} until that variable of the environment holds "
                "its address."
            )
        return Delivery(
            f"webhook:{target.address}",
            lambda alert: post(address(), alert, directory.name),
        )
    if target.kind == "webhook":
        # A URL may hold a password or a token: the host is enough to know it by.
        name = f"webhook to {urlsplit(target.address).hostname}"
        return Delivery(name, lambda alert: post(target.address, alert, directory.name))
    return Delivery(
        f"{target.kind}:{target.address}",
        lambda alert: run(shlex.split(target.address), alert),
    )


def address_in(variable: str) -> str:
    """Returns the URL that a variable of the environment holds; Undelivered, without a word of it, if it holds none."""
    if not is_url(url := os.environ.get(variable, "").strip()):
        raise Undelivered(
            "the variable holds no address such as https://host/path", final=True
        )
    return url


class Log:
    """A sentence on stderr."""

    def send(self, alert: Sent) -> None:
        state = "alert" if alert["state"] == "firing" else "over"
        with contextlib.suppress(ValueError):
            say(f"{state} ({alert['rule']}): {alert['sentence']}")

    def close(self, deadline: float) -> None:
        pass


class File:
    """Lines of alerts.jsonl; those that a full disk refuses wait until it takes them."""

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)

    def send(self, alert: Sent) -> None:
        self._file.write(dict(alert))

    def close(self, deadline: float) -> None:
        self._file.close()


class Undelivered(Exception):
    """Why an alert did not get there, as it stands in a sentence; `final`: another try would end the same."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Delivery:
    """Hands alerts on one after the other, on a daemon thread; reports once that they do not arrive, until one does
    again.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[Sent], None],
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self._name = name
        self._deliver = deliver
        self._pauses = pauses
        self._waiting: queue.Queue[Sent | None] = queue.Queue(MOST_WAITING)
        self._ending = threading.Event()
        self._failing = False
        self._thread = threading.Thread(
            target=self._run, name="meshtrain-alerts", daemon=True
        )
        self._thread.start()

    def send(self, alert: Sent) -> None:
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self._fail(f"{MOST_WAITING} are waiting")

    def close(self, deadline: float) -> None:
        """Waits for what is on its way, until `deadline` of time.monotonic at most."""
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail("the run is over before they could be")

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None:
            for pause in (*self._pauses, None):
                try:
                    self._deliver(alert)
                    self._failing = False
                    break
                # Whatever it is: a run does not end for an alert.
                except Exception as error:
                    if pause is None or getattr(error, "final", False):
                        self._fail(str(error) or type(error).__name__)
                        break
                    # The end of a run cuts a pause short: what was refused once is tried again at once.
                    self._ending.wait(pause)

    def _fail(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            with contextlib.suppress(ValueError):
                say(
                    f"alerts are not delivered by {short(self._name)}: {short(why)}; training goes on."
                )


class _Refuse(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without its body, which nobody means."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, alert: Sent, run_name: str, limit: float = LIMIT["webhook"]) -> None:
    """Posts the alert as JSON, with `run` and with its sentence as `text`, which Slack, Mattermost and others show.

    Undelivered if it is not taken.
    """
    state = "firing" if alert["state"] == "firing" else "resolved"
    body = {
        **alert,
        "run": run_name,
        "text": f"{run_name}: {state}, {alert['rule']}: {alert['sentence']}",
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), headers, method="POST"
    )
    try:
        urllib.request.build_opener(_Refuse).open(request, timeout=limit).close()
    except urllib.error.HTTPError as error:
        error.close()
        # Of the client's errors only "too many requests" and a timeout get better by waiting.
        raise Undelivered(
            f"it answers {error.code}",
            final=error.code < 500 and error.code not in (408, 429),
        ) from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Undelivered(
            refusal(reason) if isinstance(reason, OSError) else str(reason)
        ) from None


def run(words: list[str], alert: Sent, limit: float = LIMIT["command"]) -> None:
    """Runs the command with the alert as JSON on its standard input; Undelivered if it fails or takes longer than its
    time.
    """
    null = subprocess.DEVNULL
    try:
        # A session of its own, so that what it starts is ended with it.
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=null,
            stderr=null,
            start_new_session=True,
        )
    except OSError as error:
        raise Undelivered(refusal(error), final=True) from None
    try:
        process.communicate(json.dumps(dict(alert)).encode() + b"\n", timeout=limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise Undelivered(f"it took longer than {limit:g} s", final=True) from None
    if process.returncode:
        raise Undelivered(f"it ended with {process.returncode}")
