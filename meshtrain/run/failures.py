"""What ends a run while it goes on, in one plain sentence; and an end of one process of several that waits for nobody."""

import os
import re
import sys
import traceback
from typing import NoReturn

import jax

from meshtrain.errors import say

# What the collectives (gloo, NCCL) and JAX's coordination service say when a process is gone. Between processes of one machine it
# takes a moment, else up to jax.distributed's heartbeat timeout; where the service notices first, it ends the process by SIGABRT,
# which nothing in Python can meet.
LOST = re.compile(
    r"gloo|nccl|rccl|connection (reset|closed|refused|timed out)|socket closed|heartbeat|coordination", re.I
)


class RunFailure(RuntimeError):
    """Why a run failed while it went on, in one plain sentence; the commands print it and exit with code 1."""


def explained(error: Exception, newest: int | None) -> Exception:
    """What the runtime threw as a RunFailure, where there is a sentence for it; `newest`: the last checkpoint."""
    if isinstance(error, RunFailure):
        return error
    said = (str(error).splitlines() or [""])[0][:200]
    if jax.distributed.is_initialized() and LOST.search(str(error)):
        start = "from the start" if newest is None else f"from step {newest}"
        return RunFailure(
            f"another process of this run died or cannot be reached: {said}; its own words say why, run again to go on {start}."
        )
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return RunFailure(
            f"a device has too little memory: {said}; python -m meshtrain.plan shows what fills it. "
            "More parallel.microbatches, parallel.remat and a higher parallel.zero_stage need less."
        )
    return error


def end_at_once(error: Exception, code: int) -> NoReturn:
    """Ends this process after its last words: to close what it holds, or JAX, it would wait for processes that may be gone."""
    if isinstance(error, RunFailure):
        say(error)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
