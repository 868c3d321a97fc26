"""Files that are whole or not there: written aside, synced, renamed."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """The whole content under `path`, or what was there before, whoever else writes it and whenever the machine stops."""
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise
    sync(path.parent)


def temporary_beside(path: Path) -> Path:
    """A hidden name that no other process uses, on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def sync(directory: Path) -> None:
    """Makes renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
