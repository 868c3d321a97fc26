"""Requests to stop a command: while it still imports what it needs, which takes seconds (`hear`), and at its work
(`interrupt`).
"""

import os
import signal
from types import FrameType

STOPPED = 75  # the exit code
PAUSE = 0.05  # seconds until a request that came during an import is looked at again
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Stopped(KeyboardInterrupt):
    """A request to stop, in a sentence if it has one.

    A class of its own: `python -m` ends by SIGINT, whatever was caught, if a bare KeyboardInterrupt comes while a text
    is executed, such as the definition of a dataclass in an import.
    """


def hear() -> None:
    """Has a request end the process from here on, until something else listens; before `interrupt` nothing has begun,
    so nothing is lost.
    """
    for number in heard():
        signal.signal(number, _stop)


def interrupt() -> None:
    """Has SIGINT raise Stopped from here on, if `hear` was called: in a command of its own process."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, _raise)


def leave() -> None:
    """Has SIGINT end the process again, if `interrupt` made it raise: the command's work is done."""
    if signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, _stop)


def is_command() -> bool:
    """Returns whether `hear` was called and nothing else listens yet: the process is a command's, which may end it."""
    return signal.getsignal(signal.SIGTERM) is _stop


def heard() -> set[signal.Signals]:
    """Returns those of SIGNALS that are to be met: under nohup a closed terminal is to be ignored."""
    return SIGNALS - (
        {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    )


def _raise(number: int, frame: FrameType | None) -> None:
    """Raises Stopped; later, if a module is being imported: extension modules turn it into errors of their own."""
    if _is_importing(frame):
        # Not at the top: this module is imported before anything else.
        import threading

        again = threading.Timer(PAUSE, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    raise Stopped


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _stop(number: int, _: FrameType | None) -> None:
    try:
        name = signal.Signals(number).name
        at_work = signal.getsignal(signal.SIGINT) is _raise
        os.write(
            2,
            f"{__package__.partition('.')[0]}: {name}: "
            f"stopped{'' if at_work else '; nothing is lost, run again to go on'}.\n".encode(),
        )
    finally:
        os._exit(STOPPED)
