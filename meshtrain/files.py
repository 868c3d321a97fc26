"""Files that are whole or not there: written aside, synced, renamed."""

import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: bytes) -> None:
    """The whole content under `path`, or what was there before, whoever else writes it and whenever the machine stops.

    OSError, of `path` by name, if the system refuses.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)
        # A full disk needs the room.
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def temporary_beside(path: Path) -> Path:
    """A hidden name that no other process uses, on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def remove_temporaries(directory: Path) -> None:
    """What processes that were killed left half-written; for who knows that none is at work."""
    for path in directory.glob(".*"):
        if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
            path.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One process at a time writes in a directory, the others wait; the kernel frees the lock of a process that dies."""
    with open(directory / ".lock", "a+b", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def sync(directory: Path) -> None:
    """Makes renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def still_names(path: Path, file: IO[bytes]) -> bool:
    """Whether `path` leads to the open file, and not to nothing or to what took its place. An answer that the system refuses is a yes."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
