"""Finds the files of an input: what there is to read, in an order that is the same everywhere, and what is left out."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshtrain import stores
from meshtrain.data.formats import (
    JSON_LINES,
    PARQUET,
    compression,
    is_text,
    require_libraries,
    suffix,
)
from meshtrain.data.manifest import are_prepared, is_preparation
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import UNREAD, is_address, refuse_passing

LINKS = "links that lead nowhere"
SPECIAL = "neither files nor directories"
TWICE = "reached twice"
PREPARED = "directories of prepared shards"
NAMED = 3  # of what is left out, in a sentence


@dataclass(frozen=True)
class InputFile:
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
class InputFiles:
    """The files of an input in their order, and what folders held beside them: files of other kinds by suffix, the rest
    by reason.
    """

    files: list[InputFile] = field(default_factory=list)
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
            f"{count} {short(ending) or 'without a suffix'}"
            for ending, count in self.ignored.most_common(5)
        )

    def describe_left_out(self) -> str:
        """links that lead nowhere: 1 (docs/c); reached twice: 2 (docs/a, docs/b)."""
        return "; ".join(
            f"{reason}: {len(names)} "
            f"({', '.join(map(short, sorted(names)[:NAMED]))}{', ...' if len(names) > NAMED else ''})"
            for reason, names in sorted(self.left_out.items())
        )


def find(
    inputs: Sequence[str],
    wanted: Callable[[str], bool] = is_text,
    without: Sequence[str] = (),
    what: str = "text",
) -> InputFiles:
    """Returns the files under the inputs, in the order given and sorted by name within each; a file named itself is
    always taken.

    Links are followed; what is reached again is read once, under the name without a link if it has one. Hidden files
    and folders, `__pycache__`, prepared shards and the folders named in `without` are left out. ConfigError: nothing
    there, or nothing to read (`what`).
    """
    search = _Search(wanted, {*without, "__pycache__"})
    try:
        for path in inputs:
            search.add(path)
    except OSError as error:
        refuse_passing(error.filename, error)
        raise ConfigError(
            f"{short(error.filename)} cannot be read: {refusal(error)}."
        ) from None
    result = search.result
    if not result.files:
        left_out = result.describe_left_out()
        if result.ignored:
            left_out = f"files of other kinds ({result.describe_ignored()})" + (
                f"; {left_out}" if left_out else ""
            )
            left_out += (
                "; name a file itself to have it read as text" if what == "text" else ""
            )
        raise ConfigError(
            f"{short(' '.join(inputs))} contains no {what}: {left_out or 'it has no files'}."
        )
    return result


class _Search:
    """Walks the folders of the inputs; takes each real file and folder once."""

    def __init__(self, wanted: Callable[[str], bool], without: set[str]) -> None:
        self.wanted = wanted
        self.without = without
        self.result = InputFiles()
        self.seen: set[str] = set()  # real paths
        self.files: list[InputFile] = []  # of one input
        self.links: list[tuple[str, str]] = []  # (name, path) of those still to follow

    def add(self, path: str) -> None:
        if not path:
            raise ConfigError(
                "the name of a file or directory to read text from is empty."
            )
        if is_address(path):
            self._objects(path)
            return
        try:
            mode = os.stat(path).st_mode
            real = os.path.realpath(path)
        # ValueError: a NUL in the name.
        except (FileNotFoundError, NotADirectoryError, ValueError):
            if os.path.lexists(path):
                raise ConfigError(
                    f"{short(path)} is a link that leads nowhere ({short(os.readlink(path))})."
                ) from None
            raise ConfigError(
                f"there is no file or directory {short(path)} to read text from."
            ) from None
        if stat.S_ISREG(mode):
            self._file(path, os.path.basename(path), real)
        elif stat.S_ISDIR(mode):
            if _is_prepared(path):
                raise ConfigError(f"{short(path)} holds prepared shards, no text.")
            self._folder(path, os.path.basename(real), real)
        else:
            raise ConfigError(
                f"{short(path)} is neither a file nor a directory; write the text to a file first."
            )
        # All that is there without a link is taken before what links lead to.
        while self.links:
            links = sorted(self.links)
            self.links = []
            for name, link in links:
                try:
                    mode = os.stat(link).st_mode
                except OSError as error:
                    refuse_passing(link, error, UNREAD)
                    self.result.leave_out(LINKS, name)
                else:
                    self._entry(link, name, os.path.realpath(link), mode)
        self.result.files += sorted(self.files, key=lambda file: file.name)
        self.files = []

    def _objects(self, address: str) -> None:
        for file in _objects_under(address):
            base = os.path.basename(file.name)
            if file.path != address and not self.wanted(base):
                self.result.ignored[os.path.splitext(base)[1].lower()] += 1
            elif self._first_time(file.name, file.path):
                require_libraries(file.path)
                self.result.files.append(file)

    def _folder(self, path: str, name: str, real: str) -> None:
        if not self._first_time(name, real):
            return
        if _is_prepared(path):
            self.result.leave_out(PREPARED, name)
            return
        with os.scandir(path) as entries:
            for entry in list(entries):
                own = f"{name}/{entry.name}"
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    self.links.append((own, entry.path))
                else:
                    self._entry(
                        entry.path,
                        own,
                        f"{real}/{entry.name}",
                        entry.stat(follow_symlinks=False).st_mode,
                    )

    def _entry(self, path: str, name: str, real: str, mode: int) -> None:
        base = os.path.basename(name)
        if stat.S_ISDIR(mode):
            if base not in self.without:
                self._folder(path, name, real)
        elif not stat.S_ISREG(mode):
            self.result.leave_out(SPECIAL, name)
        elif self.wanted(base):
            self._file(path, name, real)
        else:
            self.result.ignored[os.path.splitext(base)[1].lower()] += 1

    def _file(self, path: str, name: str, real: str) -> None:
        if self._first_time(name, real):
            require_libraries(path)
            status = os.stat(path)
            self.files.append(InputFile(path, name, status.st_size, status.st_mtime_ns))

    def _first_time(self, name: str, real: str) -> bool:
        if real in self.seen:
            self.result.leave_out(TWICE, name)
            return False
        self.seen.add(real)
        return True


def _is_prepared(folder: str) -> bool:
    try:
        return is_preparation(Path(folder))
    except OSError as error:
        error.filename = folder
        raise


def _objects_under(address: str) -> list[InputFile]:
    """Returns the objects under an address but hidden ones, named as files under a folder are.

    ConfigError if there are none, or prepared shards.
    """
    root = address.rstrip("/")
    base = root.rpartition("/")[2]
    entries = stores.listing(root)
    if not entries:
        raise ConfigError(
            f"there is no object under {short(address)} to read text from."
        )
    if are_prepared(entries):
        raise ConfigError(f"{short(address)} holds prepared shards, no text.")
    return [
        InputFile(
            f"{root}/{name}".rstrip("/"),
            f"{base}/{name}".rstrip("/"),
            entry.size,
            entry.modified,
        )
        for name, entry in entries.items()
        if not any(
            part.startswith(".") or part == "__pycache__" for part in name.split("/")
        )
    ]
