"""What ends a run while it goes on, in one plain sentence; and an end of one process of several that waits for nobody."""

import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import jax

from meshtrain.errors import ConfigError, say
from meshtrain.mesh import PortTaken
from meshtrain.run.lock import RunInUse

# What the collectives (gloo, NCCL) and JAX's coordination service say when a process is gone. Between processes of one machine it
# takes a moment, else up to jax.distributed's heartbeat timeout; where the service notices first, it ends the process by SIGABRT,
# which nothing in Python can meet.
LOST = re.compile(
    r"gloo|nccl|rccl|connection (reset|closed|refused|timed out)|socket closed|heartbeat|coordination", re.I
)


class RunFailure(RuntimeError):
    """Why a run failed while it went on, in one plain sentence; the commands print it and exit with code 1."""


class PeerLost(RunFailure):
    """Another process of the run is gone: an effect of what happened there."""


class OutOfMemory(RunFailure):
    """A device, or the machine, has too little memory."""


class SickDevice(RunFailure):
    """Devices computed or kept wrong bits; the processes that they belong to, if it is known which."""

    def __init__(self, sentence: str, ranks: Sequence[int] | None = None) -> None:
        super().__init__(sentence)
        self.ranks = ranks


# What a supervisor is told that a failure was (survive.beat.CODES), the more special ones first.
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (FloatingPointError, "numbers"),
    (SickDevice, "sick"),
    (PeerLost, "peer"),
    (OutOfMemory, "memory"),
    (RunInUse, "lock"),
    (PortTaken, "port"),
    (ConfigError, "config"),
)


def kind_of(failure: Exception) -> str:
    """Of what kind an explained failure is, in one of the words of survive.beat.CODES."""
    return next((kind for known, kind in _KINDS if isinstance(failure, known)), "error")


def explained(error: Exception, newest: int | None) -> Exception:
    """What the runtime threw as a RunFailure, where there is a sentence for it; `newest`: the last checkpoint."""
    if isinstance(error, RunFailure):
        return error
    said = (str(error).splitlines() or [""])[0][:200]
    if jax.distributed.is_initialized() and LOST.search(str(error)):
        start = "from the start" if newest is None else f"from step {newest}"
        return PeerLost(
            f"another process of this run died or cannot be reached: {said}; its own words say why, run again to go on {start}."
        )
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return OutOfMemory(
            f"a device has too little memory: {said}; python -m meshtrain.plan shows what fills it. "
            "More parallel.microbatches, parallel.remat and a higher parallel.zero_stage need less."
        )
    if isinstance(error, MemoryError):
        return OutOfMemory(
            "this machine has too little memory for what the process holds; fewer processes on it need less."
        )
    return error


def end_at_once(error: Exception, code: int, plain: tuple[type[Exception], ...] = (RunFailure,)) -> NoReturn:
    """Ends this process after its last words: to close what it holds, or JAX, it would wait for processes that may be gone.

    `plain`: errors that are one sentence, without a traceback.
    """
    if isinstance(error, plain):
        say(error)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
