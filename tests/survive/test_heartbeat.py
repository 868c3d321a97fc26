"""A training process says where it is and where its seconds went, and ends itself when its supervisor is gone."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from supervised import Rank, supervised, variable

from meshtrain.config import ConfigError
from meshtrain.survive import begun
from meshtrain.survive.heartbeat import KIND_OF, KINDS, VARIABLE, Heartbeat
from meshtrain.survive.supervised import (
    ALIVE_EVERY,
    SIZE,
    SupervisedHeartbeat,
    read_settings,
)


def walk(beat: Heartbeat, steps: int) -> None:
    """The phases of a run, each of 2 ms, the wait of 10."""
    for name in ("open", "join", "init", "restore"):
        beat.phase(name)
        time.sleep(0.002)
    for step in range(steps):
        for name in ("data", "dispatch", "wait"):
            beat.phase(name)
            time.sleep(0.01 if name == "wait" else 0.002)
        beat.took(step + 1)
    beat.begin_save(steps, due=True)
    time.sleep(0.002)


def test_every_second_since_the_start_is_of_one_kind(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    beat = Heartbeat()
    for name in (
        "open",
        "compile",
        "restore",
        "data",
        "dispatch",
        "wait",
        "log",
        "eval",
        "save",
        "end",
    ):
        beat.phase(name)
    assert sum(beat.seconds.values()) == 10
    assert beat.seconds == dict.fromkeys(KINDS, 1) | {"init": 2, "step": 3}
    assert set(KIND_OF.values()) == set(KINDS) and beat.step == 0
    beat.took(1)
    assert (beat.step, beat.name) == (1, "log")


@pytest.fixture
def clock(monkeypatch):
    """One that goes only as a test says."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_a_pace_is_a_median_and_phases_are_sums_without_evaluations_saves_and_compiling(
    clock,
):
    beat = Heartbeat()
    for step in range(1, 30):
        for name, seconds in (
            ("data", 1),
            ("compile", 50),
            ("wait", 3 if step > 5 else 100),
        ):  # long ago
            beat.phase(name)
            clock.now += seconds
        beat.took(step)
        clock.now += 1
        beat.phase("save")
        clock.now += 70
    said = beat.values()
    assert said["pace"] == 5
    assert said["phases"] == {
        "data": 29,
        "dispatch": 0,
        "log": 29,
        "stopped": 0,
        "queued": 0,
        "wait": 24 * 3 + 5 * 100,
    }


def test_seconds_are_kept_as_they_were_when_the_last_due_save_began(clock):
    beat = Heartbeat()
    beat.phase("wait")
    clock.now = 5.0
    beat.begin_save(10, due=True)
    beat.phase("wait")
    clock.now = 8.0
    beat.begin_save(12, due=False)  # of a stop
    assert beat.at_save["step"] == 10 and beat.at_save["seconds"]["step"] == 5
    assert beat.seconds["step"] == 8


def work_and_wait(steps: int) -> None:
    beat = begun()
    walk(beat, steps)
    beat.start, beat.saved = 0, 3
    time.sleep(600)


@pytest.mark.thorough
def test_a_supervisor_reads_where_the_process_is(tmp_path):
    rank = Rank(supervised(tmp_path), work_and_wait, 3)
    rank.until(lambda: rank.beat.get("saved") == 3)
    found = rank.beat
    rank.until(
        lambda: rank.beat["alive"] >= found["alive"] + 2
    )  # while the main thread stands still
    later = rank.beat
    rank.kill()
    assert (tmp_path / "local-0" / "beat").stat().st_size == SIZE
    assert (later["phase"], later["step"], later["n"], later["start"]) == (
        "save",
        3,
        found["n"],
        0,
    )
    assert (
        0.014 <= later["pace"] <= sum(later["phases"].values())
        and later["phases"]["wait"] >= 0.03
    )
    assert later["at_save"]["step"] == 3
    assert (
        sum(later["seconds"].values())
        > sum(later["at_save"]["seconds"].values())
        >= 0.05
    )
    # The time of the phase that goes on counts.
    assert later["seconds"]["checkpoint"] >= ALIVE_EVERY


@pytest.mark.thorough
@pytest.mark.parametrize("in_phases", [False, True])
def test_a_process_whose_supervisor_is_gone_ends_itself(tmp_path, in_phases):
    rank = Rank(
        supervised(tmp_path, fence=1.5),
        phases_for_ever if in_phases else work_and_wait,
        1,
    )
    rank.until(lambda: rank.beat.get("alive", 0) >= 4)  # longer than the fence
    rank.renewing = False
    began = time.monotonic()
    assert rank.end() == 72
    assert time.monotonic() - began < 6
    assert (
        rank.fault["kind"] == "lock"
        and "has not been heard for" in rank.fault["sentence"]
    )


def phases_for_ever(steps: int) -> None:
    while True:
        walk(begun(), steps)


def frozen_process(_: int) -> None:
    beat = begun()
    beat.phase("wait")
    os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(1000):
        beat.phase("wait")
    os._exit(0)


@pytest.mark.thorough
def test_a_process_that_wakes_after_its_supervisor_was_gone_takes_no_step(tmp_path):
    rank = Rank(supervised(tmp_path, fence=1.0), frozen_process, 0)
    rank.until(lambda: rank.beat and rank.state == "T")
    # Renewed once more while it sleeps: what it finds when it wakes is new to it, and yet too old.
    time.sleep(0.3)
    rank.renewing = False
    time.sleep(2.0)
    os.kill(rank.process.pid, signal.SIGCONT)
    assert rank.end() == 72


@pytest.mark.thorough
def test_stacks_of_all_threads_are_written_on_request(tmp_path):
    rank = Rank(supervised(tmp_path), work_and_wait, 1)
    rank.until(lambda: rank.beat.get("phase") == "save")
    os.kill(rank.process.pid, signal.SIGUSR1)
    stack = rank.told.own("stack")
    rank.until(lambda: "work_and_wait" in stack.read_text())
    rank.kill()
    assert "in watch" in stack.read_text()


def fail(kind: str) -> None:
    begun().fail(kind, "it is broken.")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "code"),
    [("numbers", 70), ("sick", 71), ("peer", 73), ("port", 1), ("config", 2)],
)
def test_what_ended_a_process_is_told_by_code_and_sentence(tmp_path, kind, code):
    rank = Rank(supervised(tmp_path), fail, kind)
    assert rank.end() == code
    assert rank.fault == {"kind": kind, "sentence": "it is broken.", "step": 0}
    assert "meshtrain: it is broken." in rank.output.read_text()


def test_ranks_to_blame_are_noted_where_they_are_known(tmp_path):
    # Files and a thread are not needed
    beat = SupervisedHeartbeat.__new__(SupervisedHeartbeat)
    beat.supervised, beat.step = supervised(tmp_path), 0
    beat.note("sick", "wrong bits.", [2])
    assert '"ranks": [2]' in beat.supervised.own("fault.json").read_text()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"local": 1}', "{" * 3000])
def test_a_variable_that_no_supervisor_has_set_is_one_sentence(text):
    with pytest.raises(
        ConfigError, match=f"^{VARIABLE} is .*supervisor only, so unset it.$"
    ):
        read_settings(text)


def test_the_variable_is_read_back_as_it_was_told_and_children_have_none(tmp_path):
    told = supervised(tmp_path)
    assert read_settings(variable(told)) == told
    code = (
        "from meshtrain.survive import begun; import os; "
        "print(begun().supervised.rank, sum('SUPERVISED' in name for name in os.environ))"
    )
    environment = os.environ | {VARIABLE: variable(told)}
    assert (
        subprocess.check_output(
            [sys.executable, "-c", code], env=environment, text=True
        )
        == "0 0\n"
    )


def test_a_pause_is_taken_from_the_waiting_in_which_it_fell_and_from_nothing_else(
    clock,
):
    beat = Heartbeat()
    for name in ("data", "wait"):
        beat.phase(name)
        clock.now += 5
        beat.pause({"stopped": 3.0, "queued": 1.0})
    # The main thread went on before the other one could say so.
    clock.now += 2
    beat.took(1)
    clock.now += 0.5
    beat.pause({"stopped": 2.0, "queued": 0.0})
    assert beat.values()["phases"] == {
        "data": 5,
        "dispatch": 0,
        "log": 0.5,
        "stopped": 5,
        "queued": 1,
        "wait": 1,
    }
    assert sum(beat.phases().values()) == 12.5 and beat.seconds["step"] == 7


def own_thread_alone(_: int) -> None:
    beat = begun()
    beat.phase("wait")
    time.sleep(600)


@pytest.mark.thorough
def test_time_in_which_the_process_is_stopped_is_no_waiting_for_others(tmp_path):
    rank = Rank(supervised(tmp_path), own_thread_alone, 0)
    rank.until(lambda: rank.beat.get("alive", 0) >= 1)
    before = rank.beat["phases"]
    for _ in range(5):
        os.kill(rank.process.pid, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(rank.process.pid, signal.SIGCONT)
        time.sleep(0.1)
    rank.until(lambda: rank.beat["phases"]["stopped"] - before["stopped"] >= 1.5)
    rank.kill()


def busy_interpreter(_: int) -> None:
    beat = begun()
    beat.phase("wait")
    for _ in iter(int, 1):  # holds the interpreter's lock, and gives it up every 5 ms
        pass


@pytest.mark.thorough
def test_a_process_that_waits_for_its_own_interpreter_is_not_stopped(tmp_path):
    rank = Rank(supervised(tmp_path), busy_interpreter, 0)
    rank.until(lambda: rank.beat.get("phases", {}).get("wait", 0) >= 1.5)
    phases = rank.beat["phases"]
    rank.kill()
    assert phases["stopped"] < 0.1 * phases["wait"]
