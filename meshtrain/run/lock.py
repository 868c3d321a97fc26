"""One run in a directory at a time; the lock goes with its process, however that ends."""

import contextlib
import fcntl
import io
import os
import socket
import stat
import struct
import sys
from pathlib import Path

from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import refuse_passing, still_names

LOCK = ".lock"


class RunInUse(ConfigError):
    """Another run has the directory; it may be over soon, or its process has ended on a machine that is gone."""


class RunLock:
    """Held from construction to `release`; RunInUse if another run has it, ConfigError if the file cannot be a lock."""

    _held: set[Path] = set()  # noqa: RUF012  (POSIX locks do not keep a process from itself)

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._take()

    def is_there(self) -> bool:
        """Returns whether another run would meet this lock; not if the directory was removed or renamed."""
        return not self._file.closed and still_names(self._directory / LOCK, self._file)

    def take_again(self) -> None:
        """Takes the lock of a directory that was removed, or no longer is the same; RunInUse if another run has begun
        there since.
        """
        if os.path.lexists(self._directory / LOCK):
            raise RunInUse(
                f"{_owner(self._directory / LOCK)} has begun another run in {self._directory}; give one of them "
                "another run.directory."
            )
        self.release()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._take()

    def _take(self) -> None:
        self.path = self._directory.resolve() / LOCK
        this = f"process {os.getpid()} on {socket.gethostname()}"
        # A file that is held is not opened again: a process that closes any handle of a file gives up its locks on it.
        if self.path in self._held:
            raise self._refusal(this)
        self._file = self._open()
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._file.close()
            raise self._refusal(_owner(self.path)) from None
        except OSError as error:
            self._file.close()
            refuse_passing(self.path, error)
            raise self._unusable(refusal(error)) from None
        self._held.add(self.path)
        try:
            self._file.truncate(0)
            self._file.write(this.encode())
        except BaseException:
            self.release()
            raise

    def _open(self) -> io.FileIO:
        """Opens the lock file, and makes it if need be; ConfigError if something else stands there.

        The target of a link is not ours to write, and the other end of a pipe is not to be waited for.
        """
        if self.path.is_symlink():
            raise self._unusable("is a link")
        try:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
        except OSError as error:
            refuse_passing(self.path, error)
            if not os.path.lexists(self.path):
                raise
            raise self._unusable(refusal(error)) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._unusable("is not a file")
        # Unbuffered, or what a full disk refuses would be tried again at the end.
        return io.FileIO(descriptor, "r+")

    def _refusal(self, owner: str) -> RunInUse:
        return RunInUse(
            f"run.directory {self._directory} is in use by {owner}; wait for it, or give another with --set "
            "run.directory=PATH."
        )

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be the run's lock: {why}; mend that, or give another with --set run.directory=PATH."
        )

    def release(self) -> None:
        if not self._file.closed:
            self._held.discard(self.path)
            self._file.close()


def _owner(path: Path) -> str:
    """Returns what the process that holds a lock has said of itself.

    Not for a lock of this process, which closing the file would give up.
    """
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        if words := file.read(200).split():
            return short(" ".join(words))
    return "another process"


def holder(directory: Path) -> str:
    """Returns who holds the lock of a directory; nothing if nobody does, or the system cannot say."""
    path = directory.resolve() / LOCK
    if path in RunLock._held:
        return "this process"
    return _owner(path) if in_use(directory) else ""


def in_use(directory: Path) -> bool | None:
    """Returns whether a run holds the lock of a directory, asked without taking it; None where the system cannot
    say.
    """
    path = directory.resolve() / LOCK
    # Opened and closed here, this process's own lock would be gone.
    if path in RunLock._held:
        return True
    if sys.platform != "linux":
        return None
    try:
        with open(
            os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"
        ) as file:
            # struct flock: type, whence, start, length, process; the kernel answers with who is in the way.
            asked = struct.pack("hhlli", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            return (
                struct.unpack("hhlli", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
                != fcntl.F_UNLCK
            )
    except FileNotFoundError:
        return False
    except OSError:
        return None
