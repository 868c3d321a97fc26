"""Requests to stop a command: while it still imports what it needs, which takes seconds (`hear`), and at its work (`interrupt`)."""

import os
import signal
from types import FrameType

from meshtrain.errors import PREFIX

STOPPED = 75  # the exit code
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


# What was raised since `interrupt`: an import that is under way may make an error of its own of it.
raised: list["Stopped"] = []


class Stopped(KeyboardInterrupt):
    """A request to stop, in a sentence if it has one.

    A class of its own: `python -m` ends by SIGINT, whatever was caught, if a bare KeyboardInterrupt comes while a text is executed,
    such as the definition of a dataclass in an import.
    """


def hear() -> None:
    """Has a request end the process from here on, until something else listens; before `interrupt` nothing has begun, so nothing is lost."""
    for number in heard():
        signal.signal(number, _stop)


def interrupt() -> None:
    """Has SIGINT raise Stopped from here on, if `hear` was called: in a command of its own process."""
    raised.clear()
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, _raise)


def is_command() -> bool:
    """Returns whether `hear` was called and nothing else listens yet: the process is a command's, which may end it."""
    return signal.getsignal(signal.SIGTERM) is _stop


def heard() -> set[signal.Signals]:
    """Returns those of SIGNALS that are to be met: under nohup a closed terminal is to be ignored."""
    return SIGNALS - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())


def _raise(*_: object) -> None:
    request = Stopped()
    raised.append(request)
    raise request


def _stop(number: int, _: FrameType | None) -> None:
    try:
        name = signal.Signals(number).name
        at_work = signal.getsignal(signal.SIGINT) is _raise
        os.write(2, f"{PREFIX}{name}: stopped{'' if at_work else '; nothing is lost, run again to go on'}.\n".encode())
    finally:
        os._exit(STOPPED)
