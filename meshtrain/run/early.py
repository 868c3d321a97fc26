"""Requests to stop while a command still imports what it needs, which takes seconds. Nothing has begun, so nothing is lost."""

import os
import signal
from types import FrameType

from meshtrain.errors import PREFIX

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Stopped(KeyboardInterrupt):
    """A request to stop, in a sentence if it has one.

    A class of its own: `python -m` ends by SIGINT, whatever was caught, if a bare KeyboardInterrupt comes while a text is executed,
    such as the definition of a dataclass in an import.
    """


def hear() -> None:
    """From here on a request ends the process, until something else listens: `StopSignals`."""
    for number in heard():
        signal.signal(number, _stop)


def heard() -> set[signal.Signals]:
    """Those of SIGNALS that are to be met: under nohup a closed terminal is to be ignored."""
    return SIGNALS - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())


def _stop(number: int, _: FrameType | None) -> None:
    try:
        name = signal.Signals(number).name
        os.write(2, f"{PREFIX}{name}: stopped; nothing is lost, run again to go on.\n".encode())
    finally:
        os._exit(75)
