"""What a supervisor prints, by a thread of its own: a terminal that stands still, or a pipe that nobody reads, may not hold it up.

Who is held up no longer renews the lease, and its process ends. Words for a terminal that was closed go nowhere.
"""

import contextlib
import os
import queue
import threading
import time

from meshtrain.errors import PREFIX

MOST = 10_000  # pieces that wait for a reader; what comes then is left out, it stands in the run directory
GLOO = b"connected peer ranks"  # of each of its lines, which threads write over one another
PATIENCE = 2.0  # seconds for the last words

_pieces: queue.Queue[tuple[int, bytes]] = queue.Queue(MOST)


def say(sentence: object) -> None:
    """To whoever started the supervisor, on stderr."""
    _put(2, f"{PREFIX}{sentence}\n".encode(errors="backslashreplace"))


def echo(text: bytes) -> None:
    """What rank 0 prints is what a person wants to see; not the words of gloo, which has many."""
    if lines := b"".join(line for line in text.splitlines(keepends=True) if GLOO not in line):
        _put(1, lines)


def finish() -> None:
    """Returns when all is printed, or nobody reads."""
    ends = time.monotonic() + PATIENCE
    while _pieces.unfinished_tasks and time.monotonic() < ends:
        time.sleep(0.01)


def _put(descriptor: int, text: bytes) -> None:
    with contextlib.suppress(queue.Full):
        _pieces.put_nowait((descriptor, text))


def _print() -> None:
    while True:
        descriptor, text = _pieces.get()
        with contextlib.suppress(OSError):
            while text:
                text = text[os.write(descriptor, text) :]
        _pieces.task_done()


def begin() -> None:
    """Once a process."""
    threading.Thread(target=_print, name="meshtrain-words", daemon=True).start()
