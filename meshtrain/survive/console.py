"""Prints for a supervisor, by a thread of its own: a terminal that stands still, or a pipe that nobody reads, may not
hold it up.

A supervisor that is held up no longer renews the lease, and its process ends. Output for a terminal that was closed
goes nowhere.
"""

import contextlib
import os
import queue
import threading
import time

from meshtrain.errors import LINES, PREFIX, printable

# Lines that wait for a reader; what comes then is left out, it stands in the run directory
MOST = 10_000
# Of each of its lines, which threads write over one another
GLOO = b"connected peer ranks"
PATIENCE = 2.0  # seconds for the last lines

_waiting: queue.Queue[tuple[int, bytes]] = queue.Queue(MOST)


def report(sentence: object) -> None:
    """Prints to stderr, for whoever started the supervisor."""
    _put(
        2,
        f"{PREFIX}{printable(str(sentence), LINES)}\n".encode(
            errors="backslashreplace"
        ),
    )


def echo(text: bytes) -> None:
    """Prints the output of rank 0, but for the lines of gloo, which has many."""
    if lines := b"".join(
        line for line in text.splitlines(keepends=True) if GLOO not in line
    ):
        _put(1, lines)


def _put(descriptor: int, text: bytes) -> None:
    with contextlib.suppress(queue.Full):
        _waiting.put_nowait((descriptor, text))


def begin() -> None:
    """Once a process."""
    threading.Thread(target=_print, name="meshtrain-console", daemon=True).start()


def _print() -> None:
    while True:
        descriptor, text = _waiting.get()
        with contextlib.suppress(OSError):
            while text:
                text = text[os.write(descriptor, text) :]
        _waiting.task_done()


def finish() -> None:
    """Returns when all is printed, or nobody reads."""
    ends = time.monotonic() + PATIENCE
    while _waiting.unfinished_tasks and time.monotonic() < ends:
        time.sleep(0.01)
