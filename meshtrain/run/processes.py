"""Decisions that every process of a run must share: one of them looks at the disk, all of them hear what it found."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshtrain.errors import ConfigError, refusal
from meshtrain.run.lock import RunInUse

LEAST_ROOM = 256  # bytes of a value between processes


def is_first() -> bool:
    return jax.process_index() == 0


def gathered(value: Any) -> list[Any]:
    """The (JSON) value of every process, on every process; all must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size)).reshape(-1)
    padded = multihost_utils.process_allgather(np.pad(text, (0, room(int(sizes.max())) - text.size)))
    return [json.loads(bytes(row[:size])) for row, size in zip(padded, sizes, strict=True)]


def room(size: int) -> int:
    """Bytes for a value of `size`: of few sizes, since JAX compiles a program for each."""
    return max(LEAST_ROOM, 1 << (size - 1).bit_length())


def first_decides(decide: Callable[[], Any]) -> Any:
    """What `decide` (JSON) says on the first process, on every process; what it refuses, or the disk to it, is a ConfigError on all."""
    message: dict[str, Any] = {}
    if is_first():
        try:
            message = {"value": decide()}
        except ConfigError as error:
            message = {"refused": str(error), "in_use": isinstance(error, RunInUse)}
        except OSError as error:
            message = {
                "refused": f"{error.filename or 'the run directory'} cannot be used: {refusal(error)}; "
                "it must be a directory that can be read and written, or give another run.directory."
            }
    message = gathered(message)[0]
    if "refused" in message:
        raise (RunInUse if message.get("in_use") else ConfigError)(message["refused"])
    return message["value"]
