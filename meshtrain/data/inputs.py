"""Finding the files of an input: what there is to read, in an order that is the same everywhere, and what is left out."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshtrain.data.formats import JSON_LINES, PARQUET, compression, is_text, require_libraries, suffix
from meshtrain.data.manifest import is_preparation
from meshtrain.errors import ConfigError, refusal, short

LINKS, SPECIAL, TWICE = "links that lead nowhere", "neither files nor directories", "reached twice"
PREPARED = "directories of prepared shards"
NAMED = 3  # of what is left out, in a sentence


@dataclass(frozen=True)
class File:
    """A file of the input: where it is, and what its documents are called wherever the input lies."""

    path: str
    name: str
    size: int
    modified: int  # nanoseconds

    @property
    def compression(self) -> str:
        return compression(self.name)

    @property
    def json_lines(self) -> bool:
        return suffix(self.name) in JSON_LINES

    @property
    def parquet(self) -> bool:
        return self.name.lower().endswith(PARQUET)


@dataclass
class Found:
    """The files of an input in their order, and what folders held beside them: files of other kinds by suffix, the rest by reason."""

    files: list[File] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, reason: str, name: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def describe_ignored(self) -> str:
        """5 .png, 1 without a suffix."""
        return ", ".join(
            f"{count} {short(ending) or 'without a suffix'}" for ending, count in self.ignored.most_common(5)
        )

    def describe_left_out(self) -> str:
        """links that lead nowhere: 1 (docs/c); reached twice: 2 (docs/a, docs/b)."""
        return "; ".join(
            f"{reason}: {len(names)} ({', '.join(map(short, sorted(names)[:NAMED]))}{', ...' if len(names) > NAMED else ''})"
            for reason, names in sorted(self.left_out.items())
        )


def find(
    inputs: Sequence[str], wanted: Callable[[str], bool] = is_text, without: Sequence[str] = (), what: str = "text"
) -> Found:
    """The files under the inputs, in the order given and sorted by name within each; a file named itself is always taken.

    Links are followed; what is reached again is read once, under the name without a link if it has one. Hidden files and folders,
    `__pycache__`, prepared shards and the folders named in `without` are left out. ConfigError: nothing there, or nothing to read (`what`).
    """
    search = _Search(wanted, {*without, "__pycache__"})
    for given in inputs:
        search.add(given)
    found = search.found
    if not found.files:
        left_out = found.describe_left_out()
        if found.ignored:
            left_out = f"files of other kinds ({found.describe_ignored()})" + (f"; {left_out}" if left_out else "")
            left_out += "; name a file itself to have it read as text" if what == "text" else ""
        raise ConfigError(f"{short(' '.join(inputs))} holds no {what}: {left_out or 'no file at all'}.")
    return found


@dataclass(frozen=True)
class _Place:
    """A file, folder or link on the way: its path, its name in the input, and where it is without the links on the way."""

    path: str
    name: str
    real: str

    @property
    def base(self) -> str:
        return os.path.basename(self.name)


class _Search:
    """Walks the folders of the inputs; takes each real file and folder once."""

    def __init__(self, wanted: Callable[[str], bool], without: set[str]) -> None:
        self.wanted, self.without = wanted, without
        self.found = Found()
        self.seen: set[str] = set()  # real paths
        self.taken: list[File] = []  # of one input

    def add(self, given: str) -> None:
        if not given:
            raise ConfigError("the name of a file or directory to read text from is empty.")
        mode, real = _mode(given), os.path.realpath(given)
        if stat.S_ISREG(mode):
            self._file(_Place(given, os.path.basename(given), real))
        elif stat.S_ISDIR(mode):
            if _is_prepared(given):
                raise ConfigError(f"{short(given)} holds prepared shards, no text.")
            self._folders(_Place(given, os.path.basename(real), real))
        else:
            raise ConfigError(
                f"{short(given)} is neither a file nor a directory but {_special(mode)}; write the text to a file first."
            )
        self.found.files += sorted(self.taken, key=lambda file: file.name)
        self.taken = []

    def _folders(self, root: _Place) -> None:
        """All that is there without a link first, then what links lead to, and so on; every round sees something new or is the last."""
        links = self._tree(root)
        while links:
            later: list[_Place] = []
            for link in sorted(links, key=lambda link: link.name):
                place = _Place(link.path, link.name, os.path.realpath(link.path))
                try:
                    mode = os.stat(link.path).st_mode
                except OSError:
                    self.found.leave_out(LINKS, link.name)
                    continue
                if stat.S_ISDIR(mode):
                    later += [] if link.base in self.without else self._tree(place)
                elif stat.S_ISREG(mode):
                    self._file_of_folder(place)
                else:
                    self.found.leave_out(SPECIAL, link.name)
            links = later

    def _tree(self, top: _Place) -> list[_Place]:
        """Takes the files of a folder and of those in it; the links that they hold."""
        links, waiting = [], [top]
        while waiting:
            folder = waiting.pop()
            if not self._first_time(folder):
                continue
            if _is_prepared(folder.path):
                self.found.leave_out(PREPARED, folder.name)
                continue
            for entry in _entries(folder.path):
                here = _Place(entry.path, f"{folder.name}/{entry.name}", f"{folder.real}/{entry.name}")
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    links.append(here)
                elif entry.is_dir(follow_symlinks=False):
                    waiting += [] if entry.name in self.without else [here]
                elif entry.is_file(follow_symlinks=False):
                    self._file_of_folder(here)
                else:
                    self.found.leave_out(SPECIAL, here.name)
        return links

    def _file_of_folder(self, place: _Place) -> None:
        if self.wanted(place.base):
            self._file(place)
        else:
            self.found.ignored[os.path.splitext(place.base)[1].lower()] += 1

    def _file(self, place: _Place) -> None:
        if not self._first_time(place):
            return
        require_libraries(place.path)
        with _readable(place.path):
            status = os.stat(place.path)
        self.taken.append(File(place.path, place.name, status.st_size, status.st_mtime_ns))

    def _first_time(self, place: _Place) -> bool:
        if place.real in self.seen:
            self.found.leave_out(TWICE, place.name)
            return False
        self.seen.add(place.real)
        return True


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with _readable(folder), os.scandir(folder) as entries:
        return list(entries)


def _is_prepared(folder: str) -> bool:
    with _readable(folder):
        return is_preparation(Path(folder))


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """What the system refuses, as a sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{short(path)} cannot be read: {refusal(error)}.") from None


def _mode(given: str) -> int:
    """What kind of thing an input is; ConfigError if it is not there."""
    try:
        return os.stat(given).st_mode
    # ValueError: a NUL in the name.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if os.path.lexists(given):
            raise ConfigError(f"{short(given)} is a link that leads nowhere ({short(os.readlink(given))}).") from None
        raise ConfigError(f"there is no file or directory {short(given)} to read text from.") from None
    except OSError as error:
        raise ConfigError(f"{short(given)} cannot be read: {refusal(error)}.") from None


def _special(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"))
    return next((what for is_one, what in kinds if is_one(mode)), "a block device")
