"""Small text files that a user names: a config, a cluster, a schedule's table. Whatever else the path names is refused in a sentence."""

import codecs
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path

from meshtrain.errors import ConfigError, nearest, refusal, short

# Anything else is a device.
KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe that nobody writes to", stat.S_IFSOCK: "a socket"}
PATIENCE = 10  # seconds that whoever writes to a pipe may think


def read_text(name: str | Path, what: str, takes: str, suffixes: Sequence[str], most: int) -> str:
    """The file's text, which has at most `most` bytes; a ConfigError that says `what` it should be, and what `takes` it."""
    path, shown = Path(name), short(name)
    if not shown:
        raise ConfigError(f"the name of the {what} is empty; {takes}.")
    try:
        kind, content = stat.S_IFMT(path.stat().st_mode), b""
        # Asked before it is opened: opening a device may do anything.
        if kind == stat.S_IFIFO:
            content = _from_pipe(path, most)
        elif kind == stat.S_IFREG:
            with path.open("rb") as file:
                content = file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ConfigError(f"{shown} is a link to {short(os.readlink(path))}, which is not there.") from None
        raise ConfigError(f"there is no {what} {shown}{nearest_file(path, suffixes) or '.'}") from None
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {refusal(error)}.") from None
    # A NUL, or half a surrogate pair.
    except ValueError:
        raise ConfigError(f"{shown} is no path that a file can have; {takes}.") from None
    if kind != stat.S_IFREG and not content:
        raise ConfigError(f"{shown} is {KINDS.get(kind, 'a device')}; {takes}.")
    if len(content) > most:
        raise ConfigError(f"{shown} is larger than a {what} can be, {most // 1024} KiB; {takes}.")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{shown} is UTF-16; {takes} in UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown} is not text; {takes} in UTF-8.") from None


def nearest_file(path: Path, suffixes: Sequence[str]) -> str:
    """How a sentence ends on the file beside `path` whose name is nearest to its own; nothing if none is near."""
    return nearest(path.name, _files(path.parent, suffixes), lambda name: short(path.parent / name))


def _from_pipe(path: Path, most: int) -> bytes:
    """What is written to a pipe, such as a shell's <(command); nothing if nobody does, or thinks too long."""
    descriptor, content = os.open(path, os.O_RDONLY | os.O_NONBLOCK), b""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(content) <= most:
            try:
                if not (more := os.read(descriptor, most)):
                    break
                content += more
            # Somebody has it open, and will write.
            except BlockingIOError:
                if not poll.poll(PATIENCE * 1000):
                    break
        return content
    finally:
        os.close(descriptor)


def _files(directory: Path, suffixes: Sequence[str]) -> list[str]:
    try:
        return [path.name for path in directory.iterdir() if path.suffix in suffixes and path.is_file()]
    except OSError:
        return []
