"""Directories that are whole or not there: filled under another name, synced, renamed. Nothing is written over.

    OUT.writing/   being filled, its .lock held; a process that was killed leaves it, and the next one to write OUT removes it
    OUT/           all of it

Runs, which are written to for weeks, have `meshtrain.checkpoint.steps` for the same.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import sync

WRITING, LOCK = ".writing", ".lock"


def refuse_taken(to: Path) -> None:
    """ConfigError if there is something of that name: asked before the work begins."""
    if os.path.lexists(to):
        raise ConfigError(f"{short(to)} is there already; nothing is written over.")


@contextlib.contextmanager
def written_aside(to: Path) -> Iterator[Path]:
    """A directory to fill, which has the name `to` once the block ends well; else it is removed.

    ConfigError, in a sentence, if `to` is there already, another process is writing it, or the system refuses.
    """
    refuse_taken(to)
    aside = to.with_name(to.name + WRITING)
    try:
        with _made(aside):
            try:
                yield aside
                (aside / LOCK).unlink()
                _sync_all(aside)
                os.rename(aside, to)
            except BaseException:
                # a full disk needs the room
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync(to.parent)
    except OSError as error:
        raise ConfigError(f"{short(to)} cannot be written: {refusal(error)}.") from None
    except Exception as error:
        # safetensors has no class of its own for what the system refuses
        if type(error).__name__ != "SafetensorError":
            raise
        said = re.sub(r" \(os error \d+\)$", "", str(error)).rpartition(": ")[2].lower()
        raise ConfigError(f"{short(to)} cannot be written: {short(said)}.") from None


@contextlib.contextmanager
def _made(aside: Path) -> Iterator[None]:
    """An empty directory, locked. What a killed process left there is removed, what anybody else has there is not."""
    if os.path.lexists(aside) and not (aside / LOCK).is_file():
        raise ConfigError(f"{short(aside)} is needed while writing; it is somebody's, so move it away.")
    aside.mkdir(parents=True, exist_ok=True)
    with open(aside / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {short(aside)}.") from None
        for left in [path for path in aside.iterdir() if path.name != LOCK]:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield


def _sync_all(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync(Path(folder))
