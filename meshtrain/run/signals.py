"""Stopping on request: the first SIGTERM, SIGINT or SIGHUP asks for an end, a second one ends the process at once.

    imports (`early`), data, restoring, compiling      │ steps, evaluation, saves
    given up at once: nothing is lost                  │ the step is finished and saved

Python looks at signals between two instructions of its own: while XLA compiles there are none, and what a library calls
back may swallow an exception. A thread sees to it that a command ends all the same.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from meshtrain.errors import PREFIX
from meshtrain.run.early import SIGNALS, STOPPED, Stopped, heard, is_command

PATIENCE = 1.5  # seconds that the main thread has to meet a request
_NOTHING_LOST = (
    "{}: stopped before the first step; nothing is lost, run again to go on."
)


class StopSignals:
    """While entered, a request to stop raises Stopped, or from `finish_steps` on makes `requested` true.

    With several processes SIGTERM belongs to JAX's preemption service as soon as they have joined: `requested` becomes
    true on a cluster's notice, and other signals are passed on as SIGTERM. All processes must read it equally often,
    once a step: it is true on every one of them at the same step, whichever was asked first. In a thread there are no
    signals to hear.
    """

    def __init__(self) -> None:
        self._signalled = ""  # the first signal's name
        self._held = self._stepping = self._reached = self._watched = False
        self._asked = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._watched = is_command()
            if self._watched:
                self._watch()
            for number in self._ours() & heard():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watched:
            signal.set_wakeup_fd(-1)
            self._watched = False
        for number in self._ours() & self._previous.keys():
            signal.signal(number, self._previous[number])  # type: ignore[arg-type]

    def _ours(self) -> set[signal.Signals]:
        if jax.distributed.is_initialized():
            return SIGNALS - {signal.SIGTERM}
        return SIGNALS

    def _watch(self) -> None:
        """Has a thread hear of signals as soon as the process does."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

        def hear() -> None:
            while True:
                number = os.read(woken, 1)[0]
                time.sleep(PATIENCE)
                if number in SIGNALS:
                    self._meet_late(signal.Signals(number).name)

        report = sys.unraisablehook

        def pass_over_stopped(raised: "sys.UnraisableHookArgs") -> None:
            """Leaves to the thread a request that a finalizer or the garbage collector swallowed."""
            if not issubclass(raised.exc_type, Stopped):
                report(raised)

        sys.unraisablehook = pass_over_stopped
        threading.Thread(target=hear, name="meshtrain-signals", daemon=True).start()

    def _meet_late(self, name: str) -> None:
        """Ends the process, on the thread, for a request that the main thread had time to meet and did not; or says
        what it waits for.
        """
        if not self._watched:  # it has, and is elsewhere by now
            return
        if not (self._held or self._stepping or jax.distributed.is_initialized()):
            _say(_NOTHING_LOST.format(name))
            os._exit(STOPPED)
        if self._held or not self._signalled:
            what = (
                "the other processes" if self._held else "what is compiled or computed"
            )
            _say(f"{name}: heard; waits for {what}.")

    def finish_steps(self) -> None:
        """Notes that from here on there is something to lose."""
        self._stepping = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A request that comes meanwhile is met at the end: a process that left others while they join would take them
        down.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._signalled:
            self._meet()

    @property
    def requested(self) -> bool:
        if not jax.distributed.is_initialized():
            return bool(self._signalled)
        if not self._reached:
            self._asked += 1
            self._reached = multihost_utils.reached_preemption_sync_point(self._asked)
            if self._reached and not self._signalled:
                _say(
                    "a process of this run was asked to stop: all of them stop after this step."
                )
        return self._reached

    def _handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        _leave_if_gone(1)
        if self._signalled:
            _say(f"second {name}: stopping at once.")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signalled = name
        if not self._held:
            self._meet()

    def _meet(self) -> None:
        """Does what the first signal asks for at this moment."""
        name = self._signalled
        if jax.distributed.is_initialized():
            _say(f"{name}: stopping all processes after a step, with a checkpoint.")
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._stepping:
            _say(f"{name}: stopping after this step, with a checkpoint.")
        else:
            raise Stopped(_NOTHING_LOST.format(name))


def _say(sentence: str) -> None:
    """Writes to stderr, past Python's buffer: the signal may have come in the middle of writing to it."""
    _leave_if_gone(2)
    os.write(2, f"{PREFIX}{sentence}\n".encode())


def _leave_if_gone(descriptor: int) -> None:
    """Has words for a terminal that was closed go nowhere, rather than end the run by an error."""
    try:
        os.write(descriptor, b"")
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
