"""One run in a directory at a time; the lock goes with its process, however that ends."""

import fcntl
import os
import socket
from pathlib import Path

from meshtrain.config import ConfigError


class RunLock:
    """Held from construction to `release`; ConfigError if another run has it."""

    _held: set[Path] = set()  # noqa: RUF012  (POSIX locks do not keep a process from itself)

    def __init__(self, directory: Path) -> None:
        self.path = directory.resolve() / ".lock"
        this = f"process {os.getpid()} on {socket.gethostname()}"
        if (
            self.path in self._held
        ):  # not opened again: a process that closes any handle of a file gives up its locks on it
            raise self._in_use(directory, this)
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise self._in_use(directory, owner) from None
        self._held.add(self.path)
        self._file.truncate(0)
        self._file.write(this)
        self._file.flush()

    @staticmethod
    def _in_use(directory: Path, owner: str) -> ConfigError:
        return ConfigError(
            f"run.directory {directory} is in use by {owner}; wait for it, or give another with --set run.directory=PATH."
        )

    def release(self) -> None:
        if not self._file.closed:
            self._held.discard(self.path)
            self._file.close()
