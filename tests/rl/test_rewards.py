"""A reward may do what it likes: the other answers have theirs, what failed is counted, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from refusals import tells

from meshtrain.config import imports
from meshtrain.config.load import ConfigError
from meshtrain.rl import rewards as rewards_module
from meshtrain.rl.rewards import BUILT_IN, Case, Rewards

FILE = """
import ctypes, os, resource, signal, subprocess, sys, tempfile, threading, time

class Unprintable(Exception):
    def __str__(self):
        raise ValueError

class Awkward:
    def __repr__(self):
        raise ValueError

    def __float__(self):
        raise ZeroDivisionError

def start_orphan():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)

def bomb():
    for _ in range(5):
        os.fork()
    os.setsid() if os.getpid() != os.getpgrp() else None
    time.sleep(600)

def leave_files():
    for _ in range(3):
        tempfile.mkstemp()
    os._exit(0)

def hold_the_pipe():
    if os.fork():
        os._exit(4)
    time.sleep(600)

def exit_in_a_thread():
    threading.Thread(target=lambda: (time.sleep(0.05), os._exit(0))).start()

def sleep_deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)

def recurse():
    recurse()

def score(prompt, answer, record):
    value = eval(answer)
    return 1.0 if value is None else value

def give(prompt, answer, record):
    return float(answer) + record.get("more", 0)

def tell_pid(prompt, answer, record):
    return os.getpid()

def count_foreign_modules(prompt, answer, record):
    ours = {"meshtrain", "meshtrain.rl", "meshtrain.rl.keeper", "meshtrain.orphans"}
    return sum(
        name.partition(".")[0] in ("jax", "jaxlib", "flax", "numpy")
        or name.partition(".")[0] == "meshtrain" and name not in ours
        for name in sys.modules
    )

def spin(prompt, answer, record):
    resource.setrlimit(resource.RLIMIT_CPU, (1, 4))
    while True:
        pass

def hang_with_a_child(prompt, answer, record):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    open(answer, "w").close()
    if record["frozen"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(1)
"""
GOOD = Case("", "1.0", {})


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "deeds_of_rewards.py"
    path.write_text(FILE)
    imports.take([str(path)], None)
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Finds the processes that tests have started by what is in their environment, and their files."""
    mark = uuid.uuid4().hex
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHTRAIN_MARK", mark)
        patch.setenv("TMPDIR", str(temporary))
        yield mark, temporary


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """All that a test starts has ended when it has, and its files are gone."""
    mark = uuid.uuid4().hex
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("MESHTRAIN_MARK", mark)
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield mark
    until(lambda: not marked(mark))
    assert list(temporary.iterdir()) == []


@pytest.fixture(scope="module")
def pool(file, started):
    with Rewards(
        [("deeds_of_rewards:score", 1.0)], 0.3, memory=2**28, processes=1
    ) as pool:
        yield pool
    mark, temporary = started
    assert marked(mark) == []
    assert list(temporary.iterdir()) == []


def marked(mark):
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                if mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                pass
    return found


def until(condition):
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def score(pool, *answers):
    return pool.score([Case("", answer, {}) for answer in answers])


FAILURES = {
    "timeout": [
        "time.sleep(600)",
        "(lambda: [0 for _ in iter(int, 1)])()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "bomb()",
        "sleep_deaf()",
        "subprocess.run(['sleep', '600'])",
    ],
    "memory": [
        "bytearray(2**40)",
        "[bytes(2**26) for _ in range(2**12)]",
        "'a' * 2**29",
    ],
    "raised": [
        "1 / 0",
        "sys.exit(0)",
        "(_ for _ in ()).throw(KeyboardInterrupt())",
        "(_ for _ in ()).throw(Unprintable())",
        "Awkward()",
        "recurse()",
        "not Python",
        "int('a' * 10**6)",
        "exec('raise ValueError(chr(10) * 10**6)')",
        "open('/proc/self/fd/1', 'w').write('a') / 0",
    ],
    "not_finite": [
        "float('nan')",
        "-float('inf')",
        "1e31",
        "10**400",
        "(lambda: ...)() or None or 'no number'",
        "'1.0'",
        "[1.0]",
        "{}",
        "1j",
        "b'1'",
        "print",
    ],
    "died": [
        "os._exit(0)",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.abort()",
        "ctypes.string_at(0)",
        "os.closerange(3, 1000)",
        "leave_files()",
        "hold_the_pipe()",
        "os.killpg(0, signal.SIGTERM)",
        "os.kill(os.getppid(), signal.SIGTERM) or time.sleep(600)",
    ],
}


@pytest.mark.parametrize(
    ("kind", "deed"), [(k, deed) for k, deeds in FAILURES.items() for deed in deeds]
)
def test_a_call_that_fails_is_counted_by_its_kind_and_the_others_have_their_rewards(
    pool, started, kind, deed
):
    scores = score(pool, "1.0", deed, "2.0")
    assert scores.values.tolist() == [1, 0, 2]
    assert scores.values.dtype == np.float32
    assert scores.failed == {kind: 1}
    assert scores.first.keys() == {kind}
    assert "deeds_of_rewards:score" in scores.first[kind]
    mark, temporary = started
    # The keeper and its worker, and the worker's directory.
    assert len(marked(mark)) == 2
    assert [list(folder.iterdir()) for folder in temporary.iterdir()] == [[]]


@pytest.mark.parametrize(
    "deed",
    [
        "print('a' * 10**6)",
        "os.write(1, bytes(10**8)) and None",
        "sys.stderr.write('a' * 10**6) and None",
        "os.system('cat /dev/zero | head -c 100000000') or None",
        "os.fork() and None",
        "input() if sys.stdin.read(1) else None",
        "True",
        "sys.setrecursionlimit(10**4)",
    ],
)
def test_what_harms_nobody_is_no_failure(pool, capfd, deed):
    scores = score(pool, deed, "2.0")
    assert (scores.values.tolist(), scores.failed) == ([1, 2], {})
    assert capfd.readouterr() == ("", "")


def test_an_orphan_of_a_sound_call_is_ended_while_the_worker_goes_on(pool, started):
    worker = score(pool, "os.getpid()").values
    assert score(pool, "start_orphan()").failed == {}
    until(lambda: len(marked(started[0])) == 2)
    assert score(pool, "os.getpid()").values == worker


def test_a_process_that_only_returned_a_wrong_value_is_kept_and_one_in_doubt_is_not(
    pool,
):
    pid, same, same_too, other = (
        score(pool, *before, "os.getpid()").values[-1]
        for before in ([], ["1 / 0"], ["None or 'text'"], ["os._exit(0)"])
    )
    assert pid == same == same_too != other


def test_a_worker_that_ends_between_calls_costs_one_call_at_most(pool):
    score(pool, "exit_in_a_thread()")
    time.sleep(0.2)
    scores = score(pool, "1.0", "2.0")
    assert scores.values[1] == 2
    assert scores.failed.total() <= 1


def test_a_worker_whose_keeper_was_killed_ends_too(file, tmp_path, nothing_left):
    with Rewards([("deeds_of_rewards:score", 1.0)], 20, processes=1) as rewards:
        scores = score(
            rewards, "os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600)", "2.0"
        )
        assert (scores.values.tolist(), scores.failed) == ([0, 2], {"died": 1})
        until(lambda: len(marked(nothing_left)) == 2)
    # Its files are left: nobody else knows of them.
    for directory in (tmp_path / "temporary").iterdir():
        directory.rmdir()


def test_a_sentence_tells_the_exception_and_the_line_of_the_file(pool):
    sentence = score(pool, "recurse()").first["raised"]
    line = (
        next(
            n
            for n, text in enumerate(FILE.splitlines(), 1)
            if text.startswith("def recurse")
        )
        + 1
    )
    assert "RecursionError" in sentence
    assert f"line {line}" in sentence
    assert "0.3 seconds" in score(pool, "time.sleep(9)").first["timeout"]


def test_a_worker_loads_neither_jax_nor_the_trainer(file, nothing_left):
    with Rewards([("deeds_of_rewards:count_foreign_modules", 1.0)], 5) as rewards:
        scores = rewards.score([GOOD])
    assert (scores.values.tolist(), scores.failed) == ([0], {})


def test_a_worker_is_limited(pool):
    limits = {"CORE": 0, "NOFILE": 256, "FSIZE": 2**28}
    names = [f"resource.getrlimit(resource.RLIMIT_{name})[0]" for name in limits]
    assert score(pool, *names).values.tolist() == list(limits.values())
    cpu = "resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()"
    first, second = score(pool, cpu, cpu).values
    assert 1 < second <= first <= 3


def test_many_answers_have_their_own_rewards_and_rewards_are_weighted(
    file, nothing_left
):
    names = [("deeds_of_rewards:give", 1.0), ("exact", 0.5), ("number", -2.0)]
    cases = [
        Case([{"role": "user"}], str(n), {"more": n % 3, "answer": f" {n // 7 * 7} "})
        for n in range(40)
    ]
    with Rewards(names, 5, processes=2) as rewards:
        scores = rewards.score(cases)
        assert rewards.score([]).values.shape == (0,)
    by_hand = [n + n % 3 + (0.5 - 2) * (n % 7 == 0) for n in range(40)]
    assert (scores.values.tolist(), scores.failed) == (by_hand, {})


def test_a_failure_takes_its_own_part_of_a_sum_alone(file, nothing_left):
    with Rewards([("deeds_of_rewards:give", 1.0), ("exact", 2.0)], 5) as rewards:
        scores = rewards.score(
            [Case("", "no number", {"answer": "no number"}), Case("", "3", {})]
        )
    assert scores.values.tolist() == [2, 3]
    assert scores.failed == {"raised": 2}
    assert "ValueError" in scores.first["raised"]


@pytest.mark.parametrize(
    ("name", "answer", "truth", "value"),
    [
        ("exact", " 75\n", "75", 1),
        ("exact", "75", 75, 1),
        ("exact", "75.0", "75", 0),
        ("number", "17 + 58 = 75.", "75", 1),
        ("number", "So it is 75.0", 75, 1),
        ("number", "1,234 apples", "1234", 1),
        ("number", "10-3", "3", 1),
        ("number", "it is -3", -3, 1),
        ("number", "75, no: 76", "75", 0),
        ("number", "no number", "no number", 0),
        ("number", "", "1", 0),
        ("number", "9" * 10**5, "9" * 10**5, 1),
    ],
)
def test_built_in_rewards_need_no_process(name, answer, truth, value):
    with Rewards([(name, 1.0)], 1) as rewards:
        assert rewards.score([Case("", answer, {"answer": truth})]).values.tolist() == [
            value
        ]
        assert not rewards._idle


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exakt", "did you mean exact"),
        ("deeds", "exact or number"),
        ("deeds_of_rewards:skore", "did you mean score"),
        ("nowhere:score", "run.imports"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(file, name, said):
    with pytest.raises(ConfigError, match=r"rl\.reward") as refused:
        Rewards([("exact", 1.0), (name, 1.0)], 1)
    assert said in str(refused.value)
    assert set(BUILT_IN) == {"exact", "number"}


CALLED = """
def brief(answer): return 1
def eager(prompt, answer, record, more): return 1
def by_name(*, prompt, answer, record): return 1
def any_of(*_): return 1
def more(prompt, answer, record, weight=1): return 1
class Env:
    def __init__(self, record): pass
    def step(self, messages): pass
class Bare:
    def step(self, messages): pass
class Stepless:
    def __init__(self, record): pass
"""


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    path = tmp_path_factory.mktemp("called") / "called_otherwise.py"
    path.write_text(CALLED)
    imports.take([str(path)], None)


@pytest.mark.parametrize(
    ("name", "takes"),
    [("brief", "(answer)"), ("eager", "more)"), ("by_name", "(*, prompt")],
)
def test_a_reward_that_takes_other_arguments_is_refused(called, name, takes):
    with pytest.raises(ConfigError) as refused:
        Rewards([(f"called_otherwise:{name}", 1.0)], 1)
    assert tells(
        str(refused.value), "rl.reward", name, takes, "(prompt, answer, record)"
    )


@pytest.mark.parametrize(
    ("name", "said"), [("Bare", "(record)"), ("Stepless", "step"), ("any_of", "step")]
)
def test_an_environment_that_cannot_be_asked_is_refused(called, name, said):
    with pytest.raises(ConfigError) as refused:
        Rewards([("exact", 1.0)], 1, f"called_otherwise:{name}")
    assert tells(str(refused.value), "rl.environment", name, said)


def test_what_takes_the_arguments_of_a_call_among_others_is_taken(called, nothing_left):
    names = [("called_otherwise:any_of", 1.0), ("called_otherwise:more", 2.0)]
    with Rewards(names, 5, "called_otherwise:Env") as rewards:
        assert rewards.score([Case("", "", {})]).values.tolist() == [3.0]


@pytest.mark.parametrize(
    ("line", "said"), [("1 / 0", "ZeroDivisionError"), ("os._exit(5)", "code 5")]
)
def test_a_file_that_only_the_trainer_can_import_is_refused(
    tmp_path, nothing_left, line, said
):
    path = tmp_path / f"only_here_{len(line)}.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    {line}\ndef score(*_): return 1\n"
    )
    imports.take([str(path)], None)
    with pytest.raises(ConfigError, match=r"rl\.reward") as refused:
        Rewards([(f"{path.stem}:score", 1.0)], 1)
    assert said in str(refused.value)


def test_rewards_that_were_interrupted_go_on_with_the_right_ones(
    file, nothing_left, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    with Rewards([("deeds_of_rewards:score", 1.0)], 5) as rewards:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rewards_module, "wait", interrupt)
            score(rewards, "time.sleep(1)", "3.0")
        assert score(rewards, "1.0", "2.0").values.tolist() == [1, 2]


def test_a_thread_that_starts_the_children_may_end(file, nothing_left):
    opened = []
    thread = threading.Thread(
        target=lambda: opened.append(Rewards([("deeds_of_rewards:tell_pid", 1.0)], 5))
    )
    thread.start()
    thread.join()
    time.sleep(0.1)
    with opened[0] as rewards:
        assert rewards.score([GOOD, GOOD]).failed == {}


def test_a_request_to_stop_is_no_failure_of_a_built_in_reward(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(BUILT_IN, "exact", interrupt)
    with Rewards([("exact", 1.0)], 1) as rewards, pytest.raises(KeyboardInterrupt):
        rewards.score([GOOD])


OWNER = """
import sys
from meshtrain.config import imports
from meshtrain.rl.rewards import Case, Rewards
imports.take([sys.argv[1]], None)
try:
    with Rewards([("deeds_of_rewards:hang_with_a_child", 1.0)], 600) as rewards:
        rewards.score([Case("", sys.argv[2], {"frozen": sys.argv[3] == "True"})])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("number", "frozen"),
    [
        (signal.SIGKILL, False),
        (signal.SIGKILL, True),
        (signal.SIGINT, False),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.thorough),
    ],
)
def test_nothing_outlives_the_trainer_and_no_child_says_a_word(
    file, tmp_path, nothing_left, number, frozen
):
    begun = tmp_path / "begun"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(file), str(begun), str(frozen)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    until(begun.exists)
    processes = marked(nothing_left)
    os.killpg(owner.pid, number)
    assert owner.communicate(timeout=20) == (
        "interrupted\n" * (number == signal.SIGINT),
        "",
    )
    # The owner, a keeper, its worker, and what that has started.
    assert len(processes) == 4


@pytest.mark.thorough
def test_cpu_time_is_limited_by_the_kernel_too(file, nothing_left):
    with Rewards([("deeds_of_rewards:spin", 1.0)], 30) as rewards:
        scores = rewards.score([GOOD])
    assert scores.failed == {"timeout": 1}
    assert "CPU" in scores.first["timeout"]
