"""A training process says where it is and where its seconds went, and ends itself when its supervisor is gone."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from supervised import Rank, supervised, variable

from meshtrain.config import ConfigError
from meshtrain.survive.beat import EVERY, KIND_OF, KINDS, SIZE, VARIABLE, Beat, Supervised, begun, in_a_line


def walk(beat: Beat, steps: int) -> None:
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
    beat = Beat()
    for name in ("open", "compile", "restore", "data", "dispatch", "wait", "log", "eval", "save", "end"):
        beat.phase(name)
    assert sum(beat.seconds.values()) == 10
    assert beat.seconds == {
        "init": 2, "compile": 1, "restore": 1, "step": 3, "data": 1, "eval": 1, "checkpoint": 1,
    }  # fmt: skip
    assert set(KIND_OF.values()) == set(KINDS)


def test_a_step_is_taken_once_the_devices_have_finished_it():
    beat = Beat()
    beat.phase("wait")
    assert beat.step == 0
    beat.took(1)
    assert (beat.step, beat.name) == (1, "log")


def test_host_and_wait_are_medians_of_the_steps_without_evaluations_saves_and_compiling(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    beat = Beat()
    for step in range(1, 30):
        beat.phase("data")
        now += 1
        beat.phase("compile")
        now += 50
        beat.phase("wait")
        now += 3 if step > 5 else 100  # long ago
        beat.took(step)
        now += 1
        beat.phase("save")
        now += 70
    said = beat.said()
    assert (said["host"], said["wait"], said["pace"]) == (2, 3, 5)


def test_seconds_are_kept_as_they_were_when_the_last_due_save_began(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    beat = Beat()
    beat.phase("wait")
    now = 5.0
    beat.begin_save(10, due=True)
    beat.phase("wait")
    now = 8.0
    beat.begin_save(12, due=False)  # of a stop
    assert beat.at_save["step"] == 10 and beat.at_save["seconds"]["step"] == 5
    assert beat.seconds["step"] == 8


def work_and_wait(steps: int) -> None:
    beat = begun()
    walk(beat, steps)
    beat.start, beat.saved = 0, 3
    time.sleep(600)


def test_a_supervisor_reads_where_the_process_is(tmp_path):
    rank = Rank(supervised(tmp_path), work_and_wait, 3)
    rank.until(lambda: rank.beat.get("saved") == 3)
    found = rank.beat
    rank.until(lambda: rank.beat["alive"] >= found["alive"] + 2)  # while the main thread stands still
    later = rank.beat
    rank.kill()
    assert (tmp_path / "local-0" / "beat").stat().st_size == SIZE
    assert (later["phase"], later["step"], later["n"], later["start"]) == ("save", 3, found["n"], 0)
    assert later["pace"] == pytest.approx(later["host"] + later["wait"], rel=0.5) and later["wait"] >= 0.01
    assert later["at_save"]["step"] == 3
    assert sum(later["seconds"].values()) > sum(later["at_save"]["seconds"].values()) >= 0.05
    # The time of the phase that goes on counts.
    assert later["seconds"]["checkpoint"] >= EVERY


@pytest.mark.parametrize("in_phases", [False, True])
def test_a_process_whose_supervisor_is_gone_ends_itself(tmp_path, in_phases):
    rank = Rank(supervised(tmp_path, fence=1.5), phases_for_ever if in_phases else work_and_wait, 1)
    rank.until(lambda: rank.beat.get("alive", 0) >= 4)  # longer than the fence
    rank.renewing = False
    began = time.monotonic()
    assert rank.end() == 72
    assert time.monotonic() - began < 6
    assert rank.fault["kind"] == "lock" and "has not been heard for" in rank.fault["sentence"]


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


def test_a_process_that_wakes_after_its_supervisor_was_gone_takes_no_step(tmp_path):
    rank = Rank(supervised(tmp_path, fence=1.0), frozen_process, 0)
    rank.until(lambda: rank.beat and rank.state == "T")
    # Renewed once more while it sleeps: what it finds when it wakes is new to it, and yet too old.
    time.sleep(0.3)
    rank.renewing = False
    time.sleep(2.0)
    os.kill(rank.process.pid, signal.SIGCONT)
    assert rank.end() == 72


def test_stacks_of_all_threads_are_written_on_request(tmp_path):
    rank = Rank(supervised(tmp_path), work_and_wait, 1)
    rank.until(lambda: rank.beat.get("phase") == "save")
    os.kill(rank.process.pid, signal.SIGUSR1)
    stack = rank.told.own("stack")
    rank.until(lambda: "work_and_wait" in stack.read_text())
    rank.kill()
    assert "_live" in stack.read_text()


def fail(kind: str) -> None:
    begun().fail(kind, "it is broken.")


@pytest.mark.parametrize(("kind", "code"), [("numbers", 70), ("sick", 71), ("peer", 73), ("port", 1), ("config", 2)])
def test_what_ended_a_process_is_told_by_code_and_sentence(tmp_path, kind, code):
    rank = Rank(supervised(tmp_path), fail, kind)
    assert rank.end() == code
    assert rank.fault == {"kind": kind, "sentence": "it is broken.", "step": 0}
    assert "meshtrain: it is broken." in rank.output.read_text()


def test_ranks_to_blame_are_noted_where_they_are_known(tmp_path):
    beat = Beat()
    beat.supervised = supervised(tmp_path)
    beat.note("sick", "wrong bits.", [2])
    assert '"ranks": [2]' in beat.supervised.own("fault.json").read_text()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"local": 1}', "{" * 3000])
def test_a_variable_that_no_supervisor_has_set_is_one_sentence(text):
    with pytest.raises(ConfigError, match=f"^{VARIABLE} is .*; it is set by the supervisor only, so unset it.$"):
        Supervised.read(text)


def test_the_variable_is_read_back_as_it_was_told_and_children_have_none(tmp_path):
    told = supervised(tmp_path)
    assert Supervised.read(variable(told)) == told
    code = "from meshtrain.survive.beat import begun; import os; print(begun().supervised.rank, len([n for n in os.environ if 'SUPERVISED' in n]))"
    printed = subprocess.check_output(
        [sys.executable, "-c", code], env=os.environ | {VARIABLE: variable(told)}, text=True
    )
    assert printed == "0 0\n"


def test_nothing_of_jax_is_imported(tmp_path):
    code = "import sys, meshtrain.survive.beat, meshtrain.survive.inject; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@dataclass
class Sent:
    kind: str
    axes: tuple[str, ...]
    loops: tuple[int | None, ...]

    @property
    def axis(self) -> str:
        return "+".join(self.axes)


def test_collectives_are_counted_in_a_line_the_most_frequent_first():
    found = [Sent("all-gather", ("data",), (2, 3)), Sent("all-reduce", ("tensor",), (4, 2)), Sent("all-reduce", ("tensor",), ()), Sent("all-reduce", (), (9,))]  # fmt: skip
    assert in_a_line(found) == "9 all-reduce over tensor, 6 all-gather over data"
    many = in_a_line([Sent(f"kind-{n}", ("data", "tensor", "pipeline"), ()) for n in range(40)])
    assert len(many) <= 410 and re.fullmatch(r"(1 kind-\d+ over data\+tensor\+pipeline, )+\.\.\.", many)
