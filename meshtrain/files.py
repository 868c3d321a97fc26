"""Writes of files that are complete or not there: under a temporary name, synced, renamed."""

import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MIN_ROOM = 1 << 16  # bytes


def write_atomically(path: Path, content: bytes) -> None:
    """Leaves all of the content under `path`, or what was there before, whoever else writes it and whenever the machine stops.

    Raises OSError with `path` as its file name.
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
    """Returns a hidden name that no other process uses, on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def remove_temporaries(directory: Path) -> None:
    """Removes what killed processes left half-written; no other process may be writing."""
    for path in directory.glob(".*"):
        if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
            path.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a directory for one process at a time; the kernel frees the lock of a process that dies."""
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
    """Returns whether `path` leads to the open file, and not to nothing or to another one; True where the system does not tell."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def is_full(directory: Path) -> bool:
    """Returns whether there is no room for another file, as far as the system tells."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < MIN_ROOM or (room.f_files > 0 and room.f_favail == 0)
