"""Files: small ones that a user names are read or refused in a sentence; what is written is complete or not there."""

import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from meshtrain.errors import ConfigError, Unreadable, nearest, refusal, short

T = TypeVar("T")

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
MIN_ROOM = 1 << 16  # bytes
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}  # anything else is a device

# What a disk, a network or a full table of open files says, and may not say a moment later.
PASSING = frozenset({
    errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS,
    errno.EBUSY, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN,
})  # fmt: skip
# What says nothing of a file that is only read.
UNREAD = PASSING | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
# What it says of a name that leads to nothing.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
PAUSES = (0.1, 0.4, 1.5, 4.0)  # seconds between two tries


class RequestRefused(OSError):
    """A store refused as often as it was asked: nobody need ask again."""


def is_address(name: str) -> bool:
    """Returns whether a name is that of a store and not of a file: s3://bucket/prefix."""
    return ADDRESS.match(name) is not None


# --- reading


def retried(read: Callable[[], T]) -> T:
    """Returns what `read` returns, which is called again after a pause while the system refuses for a reason that may
    pass.
    """
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno not in PASSING or isinstance(error, RequestRefused):
                raise
            time.sleep(pause)
    return read()


def unreadable(path: str | Path, error: OSError) -> Unreadable:
    """Returns the error of a file that may be as good as ever, and that the system does not let us read."""
    return Unreadable(f"{short(path)} cannot be read now: {refusal(error)}")


def refuse_passing(
    path: str | Path, error: OSError, passing: Collection[int] = PASSING
) -> None:
    """Raises Unreadable if what the system said may pass, and so says nothing of the file."""
    if error.errno in passing:
        raise unreadable(path, error) from None


def status(path: Path, follow: bool = True) -> os.stat_result | None:
    """Returns the status of what a path leads to; None where there is certainly nothing.

    Unreadable if the system does not tell.
    """
    try:
        return retried(lambda: os.stat(path, follow_symlinks=follow))
    except ValueError:
        # A NUL in the name, which no file has.
        return None
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise unreadable(path, error) from None


def entries(directory: Path) -> list[Path]:
    """Returns what is in a directory, in order; nothing where there is none. Unreadable if the system does not tell."""
    try:
        return sorted(retried(lambda: list(directory.iterdir())))
    except ValueError:
        # A NUL in the name, which no directory has.
        return []
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise unreadable(directory, error) from None


def read_text(
    name: str | Path,
    what: str,
    takes: str,
    suffixes: Sequence[str],
    most: int,
) -> str:
    """Returns the text of a file of at most `most` bytes, or of a shell's <(command); ConfigError says `what` it should
    be, and what `takes` it.
    """
    path, shown = Path(name), short(name)
    if not shown:
        raise ConfigError(f"the name of the {what} is empty; {takes}.")
    try:
        # Asked before it is opened: opening a device may do anything, and reading a pipe that nobody writes to never
        # ends.
        kind = stat.S_IFMT(retried(path.stat).st_mode)
        if kind != stat.S_IFREG and not (
            kind == stat.S_IFIFO and path.parts[:2] in (("/", "dev"), ("/", "proc"))
        ):
            raise ConfigError(f"{shown} is {KINDS.get(kind, 'a device')}; {takes}.")
        content = retried(lambda: _beginning(path, most + 1))
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ConfigError(
                f"{shown} is a link to {short(os.readlink(path))}, which is not there."
            ) from None
        raise ConfigError(
            f"there is no {what} {shown}{nearest_file(path, suffixes) or '.'}"
        ) from None
    except OSError as error:
        refuse_passing(path, error)
        raise ConfigError(f"{shown} cannot be read: {refusal(error)}.") from None
    except ConfigError:
        raise
    except ValueError:
        # a NUL, or half a surrogate pair
        raise ConfigError(
            f"{shown} is not a path that a file can have; {takes}."
        ) from None
    if len(content) > most:
        raise ConfigError(
            f"{shown} is larger than a {what} can be, {most // 1024} KiB; {takes}."
        )
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{shown} is UTF-16; {takes} in UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown} is not text; {takes} in UTF-8.") from None


def check_regular(path: Path) -> None:
    """ConfigError for a pipe, a socket or a device, before it is opened: that may wait for ever, or do anything.

    OSError where nothing is.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise ConfigError(
            f"{short(path)} is {KINDS.get(kind, 'a device')}; it must be a file."
        )


def _beginning(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


def nearest_file(path: Path, suffixes: Sequence[str]) -> str:
    """Returns the end of a sentence on the file beside `path` whose name is nearest to its own; nothing if none is
    near.
    """
    try:
        names = [
            beside.name
            for beside in path.parent.iterdir()
            if beside.suffix in suffixes and beside.is_file()
        ]
    except OSError:
        return ""
    return nearest(path.name, names, lambda name: short(path.parent / name))


def cache_directory() -> Path:
    """Returns $XDG_CACHE_HOME/meshtrain, or ~/.cache/meshtrain."""
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "meshtrain"
    try:
        return Path.home() / ".cache" / "meshtrain"
    except RuntimeError:
        raise ConfigError(
            "prepared text needs a cache, but this user has no home directory; set XDG_CACHE_HOME to a directory with "
            "room."
        ) from None


# --- writing


def write_atomically(path: Path, content: bytes) -> None:
    """Leaves all of the content under `path`, or what was there before, whoever else writes it and whenever the machine
    stops.

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
    """Returns whether `path` leads to the open file, and not to nothing or to another one; True where the system does
    not tell.
    """
    try:
        try:
            return os.path.samestat(path.stat(), os.fstat(file.fileno()))
        except OSError as error:
            # A server says so once of a file that is there, and again of one that is not.
            if error.errno != errno.ESTALE:
                raise
            return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def is_full(directory: Path) -> bool:
    """Returns whether there is no room for another file, as far as the system tells."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    lacks_bytes = room.f_bavail * room.f_frsize < MIN_ROOM
    lacks_files = room.f_files > 0 and room.f_favail == 0
    return lacks_bytes or lacks_files
