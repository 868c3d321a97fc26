import os
import pty
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from meshtrain.run.signals import SIGNALS, Stopped, StopSignals


@pytest.mark.parametrize("number", sorted(SIGNALS))
def test_the_first_signal_ends_what_is_under_way_and_between_steps_asks_and_is_reported(
    number, capfd
):
    with StopSignals() as stop:
        with pytest.raises(Stopped, match=f"{number.name}: .*before the first step"):
            os.kill(os.getpid(), number)
        assert stop.requested
    with StopSignals() as stop:
        stop.finish_steps()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.requested
    assert (
        capfd.readouterr().err
        == f"meshtrain: {number.name}: stopping after this step, with a checkpoint.\n"
    )


COMPILES = """
import hashlib, os, signal, sys, threading, time
from meshtrain.run import early
from meshtrain.run.signals import StopSignals
import meshtrain.run.signals as signals
early.hear()
signals.PATIENCE = 0.05
def ask():
    began = time.process_time()
    while time.process_time() - began < 0.1:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
with StopSignals() as stop:
    exec(sys.argv[1])
    threading.Thread(target=ask).start()
    # As a compiler does: without the interpreter's lock, and deaf to signals.
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
"""


def ended(program: str, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


WAITS = "SIGTERM: heard; waits for what is compiled or computed.\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "rounds", "said", "code"),
    [
        (
            "",
            10**9,
            "SIGTERM: stopped before the first step; nothing is lost, run again to go on.\n",
            75,
        ),
        pytest.param(
            "stop.finish_steps()", 3 * 10**6, WAITS, 0, marks=pytest.mark.thorough
        ),
    ],
)
def test_in_a_command_a_signal_is_met_while_the_main_thread_cannot_hear_it(
    before, rounds, said, code
):
    done = ended(COMPILES, before, str(rounds))
    assert done.stderr.startswith(f"meshtrain: {said}") and done.returncode == code, (
        done.stderr
    )


@pytest.mark.thorough
def test_in_a_command_the_main_thread_has_time_to_end_in_its_own_way():
    program = (
        "import os, signal, time; from meshtrain.run import early; from meshtrain.run.signals import StopSignals\n"
        "early.hear()\n"
        "with StopSignals():\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
        "    except early.Stopped: time.sleep(0.5); print('closed')"
    )
    done = ended(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


@pytest.mark.thorough
def test_a_request_that_was_met_does_not_end_what_the_process_does_afterwards():
    program = (
        "import os, signal, time; from meshtrain.run import early; import meshtrain.run.signals as signals\n"
        "early.hear(); signals.PATIENCE = 0.2\n"
        "try:\n"
        "    with signals.StopSignals(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
        "except early.Stopped: time.sleep(0.6)"
    )
    done = ended(program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
def test_a_request_that_the_garbage_collector_swallows_is_met_without_a_traceback():
    program = (
        "import gc, os, signal, time; from meshtrain.run import early; import meshtrain.run.signals as signals\n"
        "early.hear(); signals.PATIENCE = 0.2\n"
        "with signals.StopSignals():\n"
        "    def ask(phase, _): phase == 'stop' or os.kill(os.getpid(), signal.SIGTERM)\n"
        "    gc.callbacks.append(ask); gc.collect(); gc.callbacks.clear(); time.sleep(60)"
    )
    done = ended(program)
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert "SIGTERM: stopped before the first step" in done.stderr


def test_a_signal_that_is_held_is_met_at_the_end():
    passed = []
    with StopSignals() as stop, pytest.raises(Stopped), stop.held():
        os.kill(os.getpid(), signal.SIGTERM)
        passed.append(True)
    assert passed


def test_of_several_processes_a_signal_that_is_held_goes_to_the_service_that_informs_them_all(
    monkeypatch, capfd
):
    passed_on = []
    with StopSignals() as stop, stop.held():
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(
            os, "kill", lambda process, number: passed_on.append(number)
        )
        assert passed_on == []
    monkeypatch.undo()
    assert passed_on == [signal.SIGTERM]
    assert re.search("SIGINT: .*all processes after a step", capfd.readouterr().err)


def test_handlers_of_before_are_back_afterwards_and_of_joined_processes_the_service_keeps_its_signal(
    monkeypatch,
):
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals():
        assert [signal.getsignal(number) for number in SIGNALS] != handlers
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    # Which they are depends on what this process has run before.
    term, interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) is term
        assert signal.getsignal(signal.SIGINT) is not interrupt
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_run_under_nohup_outlives_its_terminal(capfd):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_words_for_a_terminal_that_was_closed_end_nothing():
    child, terminal = pty.fork()
    if child == 0:
        code = 1
        try:
            with StopSignals() as stop:
                stop.finish_steps()
                os.write(1, b"ready\n")
                deadline = time.monotonic() + 30
                while not stop.requested and time.monotonic() < deadline:
                    time.sleep(0.01)
                os.write(1, b"to nobody\n")
                code = 75 if stop.requested else 2
        finally:
            os._exit(code)
    assert os.read(terminal, 100) == b"ready\r\n"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75


def test_in_a_thread_there_are_no_signals_to_hear():
    def run():
        with StopSignals() as stop:
            return stop.requested

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() is False


def test_a_request_that_was_met_while_a_text_was_executed_does_not_end_the_process_by_a_signal(
    tmp_path,
):
    """As a bare KeyboardInterrupt does under `python -m`."""
    program = (
        "from meshtrain.run.early import Stopped\ntry: exec('raise Stopped')\nexcept Stopped: raise "
        "SystemExit(75)"
    )
    (tmp_path / "program.py").write_text(program)
    assert (
        subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path).returncode == 75
    )
