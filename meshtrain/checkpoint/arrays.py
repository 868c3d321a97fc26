"""Orbax, and nowhere else: named arrays to files and back. Everything around them (commit, digests, manifest) is ours.

Without compression: float32 noise shrinks by 8%, for four times the time and a core taken from the data loader.
"""

import ctypes
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from meshtrain.errors import ConfigError
from meshtrain.files import ABSENT, retried, unreadable
from meshtrain.mesh import part_bytes

CHUNK = (
    32 << 20
    # Bytes of a stored chunk at most: what another mesh's device must read to get a part of it
)
READ_AHEAD = (
    32 << 20
)  # bytes on their way from disk to devices at a time, or one shard where that is more
# ADAPTED: where glibc's own adapting ends up
M_MMAP_THRESHOLD = -3
SMALL = 1 << 20
ADAPTED = 32 << 20


def write(directory: Path, arrays: Mapping[str, jax.Array]) -> ocp.AsyncResponse[None]:
    """Starts writing; returns when the arrays' values are safe from what the caller does next.

    All processes call it.
    """
    context = ocp.Context()
    context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    context.array.saving.use_compression = False
    # one process would slice replicas, only to write them all
    context.array.saving.use_replica_parallel = jax.process_count() > 1
    context.array.saving.storage_options.chunk_byte_size = CHUNK
    with context:
        return ocp.save_async(directory, dict(arrays))


def own_files() -> str:
    """Returns a pattern for the files, below a step, to which this process appends what it writes."""
    return f"*/*/ocdbt.process_{jax.process_index()}/d/*"


def read(
    directory: Path, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Returns the arrays that `targets` names, placed by its shardings.

    Shapes and dtypes must be those on disk: Orbax would cast silently.

    ConfigError if Orbax cannot make them of what is there: it was written by another version, or by hand. Unreadable if
    the system refuses to read what is there.
    """
    if not targets:
        return {}  # Orbax refuses to read nothing
    # All processes begin to read together: one alone may not try again.
    attempt = retried if jax.process_count() == 1 else lambda load: load()
    try:
        arrays = attempt(lambda: _load(directory, targets))
    except OSError as error:
        raise unreadable(error.filename or directory, error) from error
    # Orbax returns the target itself of an array that is not there.
    if absent := [name for name, x in arrays.items() if not isinstance(x, jax.Array)]:
        raise ConfigError(f"{directory} has no array {absent[0]}.")
    return arrays


def _load(
    directory: Path, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Has Orbax read; OSError where the system refuses to, ConfigError for anything else."""
    context = ocp.Context()
    context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    context.pytree.loading.partial_load = True
    shards = map(part_bytes, targets.values())
    # Orbax refuses a shard as large as its limit
    context.memory.read_concurrent_bytes = max(READ_AHEAD, 1 + max(shards, default=0))
    try:
        with context:
            return dict(ocp.load(directory, dict(targets)))
    except (ValueError, KeyError, TypeError, OSError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        number = cause.errno if isinstance(cause, OSError) else _number_in(str(cause))
        if number is not None and number not in ABSENT:
            raise OSError(number, os.strerror(number), str(directory)) from error
        reason = type(cause).__name__
        if str(cause):
            reason = str(cause).splitlines()[0].split(". ")[0].rstrip(".")
        version = metadata.version("orbax-checkpoint")
        raise ConfigError(
            f"{directory} cannot be read by Orbax {version}: {reason}."
        ) from error


def _number_in(text: str) -> int | None:
    """Returns the system's error number that TensorStore reports at the end of its sentence."""
    number = re.search(r"os_error_code='([0-9]+)'", text)
    return int(number[1]) if number else None


@contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Gives large blocks that are freed back to the system at once, while entered.

    glibc learns to keep freed blocks of up to 32 MB for itself, in an arena a thread; what is read and rearranged in
    many parts then peaks at up to twice its size (experiments/bench_checkpoint.py). No effect with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    mallopt(M_MMAP_THRESHOLD, SMALL)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, ADAPTED)


unraisable_hook = sys.unraisablehook  # the one before ours


def drop_tracebacks() -> None:
    """Keeps Orbax and its threads from printing tracebacks of a save that failed, which is reported in one sentence
    anyway.
    """
    logging.getLogger("absl").addFilter(
        lambda record: not (record.exc_info and "orbax" in record.pathname)
    )
    # The garbage collector meets them whenever it comes by.
    warnings.filterwarnings(
        "ignore", r"coroutine 'OrbaxLayout\..*' was never awaited", RuntimeWarning
    )
    if sys.unraisablehook is not _report:
        global unraisable_hook
        unraisable_hook = sys.unraisablehook
        sys.unraisablehook = _report


def _report(unraisable: "sys.UnraisableHookArgs") -> None:
    # TensorStore reports each write to the loop that Orbax closed when the first one failed.
    if not (
        unraisable.exc_type is RuntimeError
        and str(unraisable.exc_value) == "Event loop is closed"
    ):
        unraisable_hook(unraisable)


drop_tracebacks()
