"""The hub: rows reach who listens, and nothing that listens ends a run."""

import threading
import time

import pytest
from refusals import tells

from meshtrain.config import Config
from meshtrain.run.hooks import Listener
from meshtrain.telemetry import hub as hubs
from meshtrain.telemetry.hub import Hub


@pytest.fixture
def hub(tmp_path):
    return Hub(Config(), tmp_path)


class Tracker(Listener):
    name = "the tracker"

    def __init__(self, key="step", error=None):
        self.key, self.error, self.heard, self.ticks, self.closed = (
            key,
            error,
            [],
            [],
            [],
        )

    def on_row(self, row, source):
        self.heard.append((row[self.key], source))
        if self.error:
            raise self.error

    def on_tick(self, now):
        self.ticks.append(now)

    def close(self):
        self.closed.append(len(self.heard))


class Calls(Listener):
    def __init__(self, function):
        self.function = function

    def on_row(self, row, source):
        self.function(row)


def take(hub, *steps):
    for step in steps:
        hub.after_metrics({"step": step}, due=True)


def test_every_row_reaches_every_listener_in_order_before_the_end(hub):
    listener, also = Tracker(), []
    with hub:
        hub.listen(listener)
        hub.listen(Calls(lambda row: also.append(row["step"])))
        take(hub, *range(100))
    assert listener.heard == [(step, "step") for step in range(100)]
    assert also == list(range(100)) and listener.closed == [100]


def test_a_listener_that_raises_is_said_once_and_hears_no_more(hub, capsys):
    broken, sound = Tracker(error=RuntimeError("no\nroute")), Tracker()
    with hub:
        hub.listen(broken)
        hub.listen(sound)
        take(hub, 0, 1, 2)
    assert len(broken.heard) == 1 and len(sound.heard) == 3
    said = "meshtrain: the tracker is left out of watching the run from here on: no\\nroute\n"
    assert capsys.readouterr().err == said


def test_the_end_of_a_run_waits_only_so_long_for_a_listener_that_hangs(
    hub, monkeypatch, capsys
):
    monkeypatch.setattr(hubs, "PATIENCE", 0.1)
    hanging = threading.Event()
    with hub:
        hub.listen(Calls(lambda row: hanging.wait()))
        take(hub, 1)
        began = time.perf_counter()
    assert time.perf_counter() - began < 5
    hanging.set()
    assert "was not done" in capsys.readouterr().err


def test_a_listener_that_is_far_behind_is_said_once_and_keeps_the_newest_rows(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(hubs, "MOST_WAITING", 10)
    held, heard = threading.Event(), []

    def slow(row):
        held.wait(10)
        heard.append(row["step"])

    with Hub(Config(), tmp_path) as hub:
        hub.listen(Calls(slow))
        take(hub, *range(100))
        held.set()
    assert heard[-10:] == list(range(90, 100)) and len(heard) <= 11
    assert capsys.readouterr().err.count("watches the run is 10 rows behind") == 1


def test_samples_come_at_their_time_and_once_more_at_the_end_and_counters_add_up_all_steps(
    hub, monkeypatch
):
    monkeypatch.setattr(hubs, "LATEST", 0.01)
    listener, taken, samples = Tracker("k"), threading.Event(), iter(range(100))
    with hub:
        hub.listen(listener)
        hub.listen(Calls(lambda row: taken.set()))
        hub.repeat(1000.0, lambda: [{"k": next(samples)}], first=0.0)
        hub.add_up(["tokens"])
        assert taken.wait(10)
        hub.after_metrics({"k": "not due", "tokens": 5}, due=False)
        hub.after_metrics({"k": "due", "tokens": 7}, due=True)
    assert listener.heard == [(0, "process"), ("due", "step"), (1, "process")]
    assert (
        hub.totals["tokens"] == 12
        and len(listener.ticks) == 1
        and abs(listener.ticks[0] - time.time()) < 100
    )


def test_what_takes_samples_and_fails_is_left_out(hub, monkeypatch, capsys):
    monkeypatch.setattr(hubs, "LATEST", 0.01)
    asked = []

    def broken():
        asked.append(1)
        raise ValueError("odd")
        yield {}

    with hub:
        hub.repeat(0.0, broken, first=0.0)
        time.sleep(0.2)
    assert len(asked) == 1
    assert tells(capsys.readouterr().err, "is left out", "from here on: odd")


def test_an_error_that_ends_the_run_is_told_to_listeners_before_the_end(hub):
    told = []

    class Told(Listener):
        def on_failure(self):
            told.append("failure")

        def close(self):
            told.append("close")

    with pytest.raises(KeyError), hub:
        hub.listen(Told())
        raise KeyError("odd")
    assert told == ["failure", "close"]
