"""Small text files that a user names: a config, a cluster, a schedule's table. What cannot be one is refused in a sentence."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from meshtrain.errors import ConfigError, nearest, refusal, short

KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}  # anything else is a device


def read_text(name: str | Path, what: str, takes: str, suffixes: Sequence[str], most: int) -> str:
    """Returns the text of a file of at most `most` bytes, or of a shell's <(command).

    Raises ConfigError that says `what` it should be, and what `takes` it.
    """
    path, shown = Path(name), short(name)
    if not shown:
        raise ConfigError(f"the name of the {what} is empty; {takes}.")
    try:
        # Asked before it is opened: opening a device may do anything, and reading a pipe that nobody writes to never ends.
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG and not (kind == stat.S_IFIFO and path.parts[:2] in (("/", "dev"), ("/", "proc"))):
            raise ConfigError(f"{shown} is {KINDS.get(kind, 'a device')}; {takes}.")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ConfigError(f"{shown} is a link to {short(os.readlink(path))}, which is not there.") from None
        raise ConfigError(f"there is no {what} {shown}{nearest_file(path, suffixes) or '.'}") from None
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {refusal(error)}.") from None
    except ConfigError:
        raise
    except ValueError:
        # a NUL, or half a surrogate pair
        raise ConfigError(f"{shown} is no path that a file can have; {takes}.") from None
    if len(content) > most:
        raise ConfigError(f"{shown} is larger than a {what} can be, {most // 1024} KiB; {takes}.")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{shown} is UTF-16; {takes} in UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown} is not text; {takes} in UTF-8.") from None


def nearest_file(path: Path, suffixes: Sequence[str]) -> str:
    """Returns the end of a sentence on the file beside `path` whose name is nearest to its own; nothing if none is near."""
    try:
        names = [beside.name for beside in path.parent.iterdir() if beside.suffix in suffixes and beside.is_file()]
    except OSError:
        return ""
    return nearest(path.name, names, lambda name: short(path.parent / name))
