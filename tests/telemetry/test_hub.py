"""The hub: rows reach who listens, and nothing that listens ends a run."""

import threading
import time

from meshtrain.config import Config
from meshtrain.telemetry import hub as hubs
from meshtrain.telemetry.hub import Hub


def test_every_row_reaches_every_listener_in_order_before_the_end(tmp_path):
    heard, also, closed = [], [], []

    class Listener:
        def __call__(self, row, source):
            heard.append((row["step"], source))

        def close(self):
            closed.append(len(heard))

    with Hub(Config(), tmp_path) as hub:
        hub.listen(Listener())
        hub.listen(lambda row, source: also.append(row["step"]))
        for step in range(100):
            hub.after_metrics({"step": step}, due=True)
    assert heard == [(step, "step") for step in range(100)]
    assert also == list(range(100)) and closed == [100]


def test_a_listener_that_raises_is_said_once_and_hears_no_more(tmp_path, capsys):
    calls, heard = [], []

    class Broken:
        name = "the tracker"

        def __call__(self, row, source):
            calls.append(row)
            raise RuntimeError("no\nroute")

    with Hub(Config(), tmp_path) as hub:
        hub.listen(Broken())
        hub.listen(lambda row, source: heard.append(row["step"]))
        for step in range(3):
            hub.after_metrics({"step": step}, due=True)
    assert len(calls) == 1 and heard == [0, 1, 2]
    assert capsys.readouterr().err == (
        "meshtrain: the tracker is left out of watching the run from here on: no\\nroute\n"
    )


def test_the_end_of_a_run_waits_only_so_long_for_a_listener_that_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hubs, "PATIENCE", 0.1)
    hanging = threading.Event()
    with Hub(Config(), tmp_path) as hub:
        hub.listen(lambda row, source: hanging.wait())
        hub.after_metrics({"step": 1}, due=True)
        began = time.perf_counter()
    assert time.perf_counter() - began < 5
    hanging.set()
    assert "was not done" in capsys.readouterr().err


def test_a_listener_that_is_far_behind_is_said_once_and_keeps_the_newest_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hubs, "MOST_WAITING", 10)
    held, heard = threading.Event(), []

    def slow(row, source):
        held.wait(10)
        heard.append(row["step"])

    with Hub(Config(), tmp_path) as hub:
        hub.listen(slow)
        for step in range(100):
            hub.after_metrics({"step": step}, due=True)
        held.set()
    assert heard[-10:] == list(range(90, 100)) and len(heard) <= 11
    assert capsys.readouterr().err.count("what watches the run is 10 rows behind") == 1


def test_samples_come_at_their_time_and_once_more_at_the_end_and_counters_add_up_all_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(hubs, "LATEST", 0.01)
    heard, ticks, taken = [], [], threading.Event()

    class Listener:
        def __call__(self, row, source):
            heard.append((row["k"], source))
            taken.set()

        def tick(self, now):
            ticks.append(now)

    samples = iter(range(100))
    with Hub(Config(), tmp_path) as hub:
        hub.listen(Listener())
        hub.repeat(1000.0, lambda: [{"k": next(samples)}], first=0.0)
        hub.add_up(["tokens"])
        assert taken.wait(10)
        hub.after_metrics({"k": "not due", "tokens": 5}, due=False)
        hub.after_metrics({"k": "due", "tokens": 7}, due=True)
    assert heard == [(0, "process"), ("due", "step"), (1, "process")]
    assert hub.totals["tokens"] == 12 and len(ticks) == 1 and abs(ticks[0] - time.time()) < 100


def test_what_takes_samples_and_fails_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hubs, "LATEST", 0.01)
    asked = []

    def broken():
        asked.append(1)
        raise ValueError("odd")
        yield {}

    with Hub(Config(), tmp_path) as hub:
        hub.repeat(0.0, broken, first=0.0)
        time.sleep(0.2)
    assert len(asked) == 1
    assert "is left out of watching the run from here on: odd" in capsys.readouterr().err
