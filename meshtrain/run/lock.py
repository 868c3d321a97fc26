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
        # A file that is held is not opened again: a process that closes any handle of a file gives up its locks on it.
        if self.path in self._held:
            raise self._in_use(directory, this)
        self._file = self.path.open("a+b", buffering=0)  # or what a full disk refuses would be tried again at the end
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.seek(0)
            owner = self._file.read().decode(errors="replace").strip() or "another process"
            self._file.close()
            raise self._in_use(directory, owner) from None
        self._held.add(self.path)
        try:
            self._file.truncate(0)
            self._file.write(this.encode())
        except OSError:
            self.release()
            raise

    @staticmethod
    def _in_use(directory: Path, owner: str) -> ConfigError:
        return ConfigError(
            f"run.directory {directory} is in use by {owner}; wait for it, or give another with --set run.directory=PATH."
        )

    def release(self) -> None:
        if not self._file.closed:
            self._held.discard(self.path)
            self._file.close()
