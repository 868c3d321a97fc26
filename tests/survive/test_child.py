"""A training process that does what it should not: deaf to SIGTERM, with children of its own, with too much to say."""

import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.survive.child import (
    MOST_SHOWN,
    TrainingProcess,
    _sweep,
    kill_left_behind,
)
from meshtrain.survive.records import Node, Rank
from tests.helpers.nodes import until

BEGIN = """
import json, os, signal, sys, time
told = json.loads(os.environ["MESHTRAIN_SUPERVISED"])
def beat(**said):
    with open(told["local"] + "/beat", "w") as file: file.write(json.dumps(said).ljust(4096))
def fault(text):
    with open(told["generation"] + "/rank-0.fault.json", "w") as file: file.write(text)
"""


@pytest.fixture
def child(tmp_path):
    started = []

    def start(script: str) -> TrainingProcess:
        command = [sys.executable, "-ISc", BEGIN + script]
        started.append(TrainingProcess(command, dict(os.environ), tmp_path, 3, 0, 60.0))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.process.wait()
        one.close()


def test_what_killed_supervisors_have_left_in_memory_is_removed_and_nothing_else(
    tmp_path,
):
    for name in ("meshtrain-left", "meshtrain-held", "meshtrain-new", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lease").touch()
        if name != "meshtrain-new":
            os.utime(tmp_path / name / "lease", (0, 0))
    (tmp_path / "meshtrain-theirs").write_text("a file")
    with open(tmp_path / "meshtrain-held" / "lease") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        _sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"meshtrain-held", "meshtrain-new", "meshtrain-theirs", "others"}


def test_what_a_supervisor_leaves_that_was_just_killed_is_removed_at_once(tmp_path):
    script = f"""
import os, signal, sys
from pathlib import Path
from meshtrain.survive.child import TrainingProcess
child = TrainingProcess([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), Path({str(tmp_path)!r}), 1, 0, 60.0)
print(child.local, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    local = Path(killed.stdout.strip())
    assert killed.returncode == -9 and (local / "lease").is_file()
    until(lambda: _swept(local), "the directory to be removed")


def test_a_supervisor_that_starts_a_process_removes_what_killed_ones_have_left(
    child, tmp_path, monkeypatch
):
    # A memory of its own: no other test's supervisor removes it.
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "meshtrain-left"
    left.mkdir()
    (left / "lease").write_text("1")
    assert child("time.sleep(60)").local.parent == tmp_path
    assert not left.exists()


def _swept(local):
    _sweep(local.parent)
    return not local.exists()


def test_a_lease_is_held_as_long_as_its_supervisor_lives(child):
    with (
        open(child("time.sleep(60)").local / "lease") as lease,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_process_of_a_silent_node_is_ended_if_it_is_the_one_of_its_record(
    child, tmp_path
):
    one = child("os.kill(os.getpid(), signal.SIGSTOP)")
    until(lambda: one.look().proc == "T", "its stop")
    left = Node("n1", generation=3, rank=one.rank)
    assert not kill_left_behind(replace(left, generation=4), tmp_path.parent), (
        "a later one has its number"
    )
    assert not kill_left_behind(
        replace(left, rank=Rank(1, one.process.pid)), tmp_path.parent
    )
    assert not kill_left_behind(left, tmp_path), "of another run"
    assert not kill_left_behind(
        replace(left, rank=Rank(0, os.getpid())), tmp_path.parent
    ), "no training process"
    assert not kill_left_behind(replace(left, rank=None), tmp_path.parent)
    assert one.ended() is None
    assert kill_left_behind(left, tmp_path.parent)
    assert end_of(one).exit == -9
    assert not kill_left_behind(left, tmp_path.parent)


def end_of(child: TrainingProcess):
    until(lambda: child.process.poll() is not None, "its end")
    return child.ended()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_who_ignores_sigterm_dies_with_all_that_it_has_started(child, tmp_path):
    one = child(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n        os.fork()\n        time.sleep(1000)\n"
        "beat(n=0, alive=0)\ntime.sleep(1000)"
    )
    until(lambda: len(group(one.process.pid)) == 5, "five processes")
    one.stop()
    time.sleep(0.1)
    assert one.ended() is None
    one.kill()
    assert end_of(one).kind == "ended_by_us"
    until(
        lambda: not any(is_alive(pid) for pid in group(one.process.pid)),
        "the end of its children",
    )


def group(number: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(words[2]) == number and words[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def test_children_of_one_that_ended_by_itself_are_ended_and_nobody_else_under_its_number(
    child, monkeypatch
):
    one = child("if os.fork() == 0:\n    time.sleep(1000)\nsys.exit(0)")
    assert end_of(one).kind == "ok"
    assert len(group(one.process.pid)) == 1
    one.kill()
    until(lambda: not group(one.process.pid), "the end of its child")
    monkeypatch.setattr(
        os, "killpg", lambda *_: pytest.fail("its number may be another's")
    )
    one.kill()
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("script", "kind", "exit", "word"),
    [
        ("sys.exit(0)", "ok", 0, "ended"),
        ("sys.exit(75)", "stopped", 75, "ended"),
        (
            "beat(n=1, alive=1, step=7, phase='wait'); os.kill(os.getpid(), 9)",
            "signal",
            -9,
            "SIGKILL in the phase wait, after step 7",
        ),
        ("os.kill(os.getpid(), 11)", "signal", -11, "SIGSEGV"),
        ("os.kill(os.getpid(), 35)", "signal", -35, "signal 35"),
        ("os.abort()", "signal", -6, "SIGABRT"),
        (
            "print('The coordination service is gone', flush=True); os.abort()",
            "peer",
            -6,
            "SIGABRT",
        ),
        ("print('one\\ntwo\\n\\n'); sys.exit(1)", "error", 1, "two"),
        ("sys.exit(1)", "error", 1, "it said nothing"),
        ("sys.exit(70)", "numbers", 70, ""),
        (
            "fault(json.dumps({'kind': 'memory', 'sentence': 'a\\nb'})); sys.exit(1)",
            "memory",
            1,
            "a b",
        ),
        (
            "fault(json.dumps({'kind': 'sick', 'sentence': 'x' * 50000, 'ranks': [1]})); sys.exit(71)",
            "sick",
            71,
            "xxx",
        ),
        ("fault('[' * 60000); sys.exit(1)", "error", 1, "it said nothing"),
        ('fault(\'{"kind": "mem\'); sys.exit(1)', "error", 1, "it said nothing"),
        (
            "fault(json.dumps({'ranks': 'all', 'kind': [], 'sentence': None})); sys.exit(1)",
            "error",
            1,
            "",
        ),
        ("fault('5'); sys.exit(1)", "error", 1, ""),
    ],
)
def test_how_it_ended_is_told_whatever_it_left(child, script, kind, exit, word):
    end = end_of(child(script))
    assert (end.exit, end.kind) == (exit, kind) and word in end.sentence
    assert len(end.sentence) < 1100 and "\n" not in end.sentence


def test_a_beat_that_is_none_changes_nothing(child):
    one = child("beat(n=1, alive=1, step=5, phase='wait', start=0)\ntime.sleep(1000)")
    until(lambda: one.look().step == 5, "a beat")
    for wrong in (b"", b"{", b"[1]", b"\xff", b"[" * 4096, b"null"):
        (one.local / "beat").write_bytes(wrong)
        assert (one.look().step, one.rank.phase) == (5, "wait")
    (one.local / "beat").unlink()
    assert one.look().step == 5


def test_much_output_and_lines_without_end_are_shown_as_they_come(child):
    one = child(
        "os.write(1, b'a line\\nhalf')\nsys.stdin.read()\nwhile not os.path.exists(told['local'] + '/go'): "
        "time.sleep(0.01)\n"
        "os.write(1, b' a line\\n' + b'x' * 200_000)\nfor _ in range(30): os.write(1, b'%099d\\n' % 7 * "
        "1000)\nos.write(1, b'the end')"
    )
    until(lambda: one.new_output() == b"a line\n", "a line")
    assert one.new_output() == b""
    (one.local / "go").touch()
    end_of(one)
    shown = b""
    while text := one.new_output(to_the_end=True):
        assert len(text) <= 1 << 16
        shown += text
    assert shown.endswith(b"the end") and len(shown) == MOST_SHOWN


def test_a_line_without_end_does_not_stop_what_is_shown(child):
    one = child("os.write(1, b'x' * 150_000 + b'\\nafter')")
    end_of(one)
    assert [len(one.new_output()) for _ in range(3)] == [
        65536,
        65536,
        150_001 - 131_072,
    ]
    assert one.new_output(to_the_end=True) == b"after"


def test_the_run_directory_may_go_meanwhile(child, tmp_path):
    one = child(
        "print('here', flush=True)\nwhile not os.path.exists(told['local'] + '/go'): time.sleep(0.01)\nsys.exit(1)"
    )
    until(lambda: one.new_output(), "its output")
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    one.look()
    assert one.new_output() == b""
    (one.local / "go").touch()
    end = end_of(one)
    tmp_path.with_name("elsewhere").rename(tmp_path)
    assert (end.kind, end.exit) == ("error", 1) and "here" in end.sentence


def test_what_cannot_be_started_leaves_nothing(tmp_path):
    before, descriptors = (
        set(Path("/dev/shm").iterdir()),
        len(os.listdir("/proc/self/fd")),
    )
    for command, files in (
        (["/no/such/program"], tmp_path),
        ([sys.executable], tmp_path / "missing"),
    ):
        with pytest.raises(OSError):
            TrainingProcess(command, {}, files, 1, 0, 60.0)
    assert set(Path("/dev/shm").iterdir()) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_dies_with_its_supervisor_even_if_that_went_first(tmp_path, monkeypatch):
    """The moment between fork and the kernel's promise: played by a parent of another number."""
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    one = TrainingProcess(
        [sys.executable, "-ISc", "import time; time.sleep(1000)"],
        {},
        tmp_path,
        1,
        0,
        60.0,
    )
    monkeypatch.undo()
    assert one.process.wait() == 1
    one.close()
