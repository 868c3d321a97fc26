"""The processes of a run: decisions that all must share, what ends one while the run goes on, and an end that waits for
nobody.

One process looks at the disk, all of them hear what it found. A failure is one plain sentence.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshtrain.errors import ConfigError, PortTaken, Unreadable, refusal, say
from meshtrain.files import PASSING
from meshtrain.run.lock import RunInUse

LEAST_ROOM = 256  # bytes of a value between processes


def is_first() -> bool:
    return jax.process_index() == 0


def gathered(value: Any) -> list[Any]:
    """Returns the (JSON) value of every process, on every process; all must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size)).reshape(-1)
    padded = multihost_utils.process_allgather(
        np.pad(text, (0, room(int(sizes.max())) - text.size))
    )
    return [
        json.loads(bytes(row[:size])) for row, size in zip(padded, sizes, strict=True)
    ]


def room(size: int) -> int:
    """Returns bytes for a value of `size`: of few sizes, since JAX compiles a program for each."""
    return max(LEAST_ROOM, 1 << (size - 1).bit_length())


def first_decides(decide: Callable[[], Any]) -> Any:
    """Returns what `decide` (JSON) returns on the first process, on every process.

    A refusal, by `decide` or by the disk, is a ConfigError on all processes; Unreadable if the disk may not refuse it
    again.
    """
    message: dict[str, Any] = {}
    if is_first():
        try:
            message = {"value": decide()}
        except ConfigError as error:
            message = {"refused": str(error), "in_use": isinstance(error, RunInUse)}
        except Unreadable as error:
            message = {"unreadable": error.what}
        except OSError as error:
            where = error.filename or "the run directory"
            reason = refusal(error)
            if error.errno in PASSING:
                message = {"unreadable": f"{where} cannot be used now: {reason}"}
            else:
                legal = "it must be a directory that can be read and written, or give another run.directory"
                message = {"refused": f"{where} cannot be used: {reason}; {legal}."}
    message = gathered(message)[0]
    if "unreadable" in message:
        raise Unreadable(message["unreadable"])
    if "refused" in message:
        raise (RunInUse if message.get("in_use") else ConfigError)(message["refused"])
    return message["value"]


# What the collectives (gloo, NCCL) and JAX's coordination service say when a process is gone. Between processes of one
# machine it takes a moment, else up to jax.distributed's heartbeat timeout; where the service notices first, it ends
# the process by SIGABRT, which nothing in Python can meet.
LOST = re.compile(
    r"gloo|nccl|rccl|connection (reset|closed|refused|timed out)|socket closed|heartbeat|coordination",
    re.I,
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


# What a supervisor is told that a failure was (survive.heartbeat.CODES), the more special ones first.
_KINDS: dict[type[Exception], str] = {
    FloatingPointError: "numbers",
    SickDevice: "sick",
    PeerLost: "peer",
    OutOfMemory: "memory",
    RunInUse: "lock",
    PortTaken: "port",
    ConfigError: "config",
}


def kind_of(failure: Exception) -> str:
    """Returns of what kind an explained failure is, in one of the words of survive.heartbeat.CODES."""
    return next(
        (kind for known, kind in _KINDS.items() if isinstance(failure, known)), "error"
    )


def explain(error: Exception, newest: int | None) -> Exception:
    """Returns what the runtime threw as a RunFailure, where there is a sentence for it; `newest`: the last
    checkpoint.
    """
    if isinstance(error, RunFailure):
        return error
    line = (str(error).splitlines() or [""])[0][:200]
    if jax.distributed.is_initialized() and LOST.search(str(error)):
        start = "from the start" if newest is None else f"from step {newest}"
        return PeerLost(
            f"another process of this run died or cannot be reached: {line}; its own words say why, run again to go "
            f"on {start}."
        )
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(
        error
    ):
        return OutOfMemory(
            f"a device has too little memory: {line}; meshtrain plan shows what fills it. "
            "More parallel.microbatches, parallel.remat and a higher parallel.zero_stage need less."
        )
    if isinstance(error, MemoryError):
        return OutOfMemory(
            "this machine has too little memory for what the process holds; fewer processes on it need less."
        )
    return error


def end_at_once(
    error: Exception, code: int, plain: tuple[type[Exception], ...] = (RunFailure,)
) -> NoReturn:
    """Ends this process after its last words: to close what it holds, or JAX, it would wait for processes that may be
    gone.

    `plain`: errors that are one sentence, without a traceback.
    """
    if isinstance(error, plain):
        say(error)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
