"""Finding and reading documents: text, Markdown, source trees, JSON Lines, each also gzipped.

A file is one document; in JSON Lines a line is one. Work is cut into units that follow from the input alone, so that what
comes out does not depend on how many workers share them.
"""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from meshtrain.config import ConfigError

JSON_LINES = (".jsonl", ".ndjson")
TEXT = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml", ".csv", ".tsv",
    ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".java", ".kt", ".scala",
    ".go", ".rs", ".swift", ".js", ".jsx", ".ts", ".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m", ".hs",
    ".ml", ".clj", ".ex", ".exs", ".erl", ".sh", ".bash", ".sql", ".proto", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg",
)  # fmt: skip
GZIP_RATIO = 4  # gzipped text is about this much larger once unpacked; only used to size the units
UNITS = 256  # about as many as this, so that the shards of a large corpus stay few
LEAST_UNIT, MOST_UNIT = 4 << 20, 1 << 30  # bytes of input


@dataclass(frozen=True)
class File:
    """A file of the input: where it is, and what its documents are called wherever the input lies."""

    path: str
    name: str
    size: int
    modified: int  # nanoseconds

    @property
    def gzipped(self) -> bool:
        return self.name.endswith(".gz")

    @property
    def json_lines(self) -> bool:
        return self.name.removesuffix(".gz").endswith(JSON_LINES)


@dataclass(frozen=True)
class Part:
    """A file, or the lines of it that begin in the bytes [begin, end)."""

    file: File
    begin: int
    end: int


@dataclass(frozen=True)
class Document:
    """A document, or why it is none: the kind of problem, and what exactly (then `text` is empty)."""

    name: str
    text: str
    kind: str = ""
    detail: str = ""

    @property
    def problem(self) -> str:
        return " ".join(filter(None, (self.kind, self.detail)))


@dataclass
class Found:
    """The files of an input in their order, and how many of other kinds a folder held, by suffix."""

    files: list[File] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def is_text(name: str) -> bool:
    """Whether a file of a folder is taken: a known kind of text or JSON Lines, also gzipped."""
    return PurePosixPath(name.removesuffix(".gz")).suffix.lower() in TEXT + JSON_LINES


def find(inputs: Sequence[str], wanted: Callable[[str], bool] = is_text, without: Sequence[str] = ()) -> Found:
    """The files under the inputs, in the order given and sorted by name within each; a file named itself is always taken.

    Hidden files and folders, `__pycache__` and the folders named in `without` are left out. ConfigError: nothing there, or nothing to read.
    """
    found = Found()
    for given in inputs:
        root = Path(given)
        if root.is_file():
            found.files.append(_file(root, root.name))
        elif root.is_dir():
            found.files.extend(
                sorted(_walk(root, wanted, {*without, "__pycache__"}, found.ignored), key=lambda f: f.name)
            )
        else:
            raise ConfigError(f"there is no file or directory {given} to read text from.")
    if not found.files:
        ignored = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in found.ignored.most_common(5))
        raise ConfigError(
            f"{' '.join(inputs)} holds no text: "
            + (
                f"its files are of other kinds ({ignored}); name a file itself to have it read as text."
                if ignored
                else "no file at all."
            )
        )
    return found


def _walk(root: Path, wanted: Callable[[str], bool], without: set[str], ignored: Counter[str]) -> Iterator[File]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"the directory {error.filename} cannot be read: {error.strerror}.")

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in without and not f.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or not path.is_file():
                continue
            if wanted(name):
                yield _file(path, f"{root.resolve().name}/{path.relative_to(root).as_posix()}")
            else:
                ignored[path.suffix] += 1


def _file(path: Path, name: str) -> File:
    status = path.stat()
    return File(str(path), name, status.st_size, status.st_mtime_ns)


def units(files: Sequence[File]) -> list[tuple[Part, ...]]:
    """The files in order, cut into units of work of about equal size; only plain JSON Lines can be cut inside a file."""
    weights = [file.size * (GZIP_RATIO if file.gzipped else 1) for file in files]
    size = min(max(sum(weights) // UNITS, LEAST_UNIT), MOST_UNIT)
    found: list[tuple[Part, ...]] = []
    unit: list[Part] = []
    room = size
    for file, weight in zip(files, weights, strict=True):
        cuts = range(0, file.size, size) if file.json_lines and not file.gzipped and file.size > size else range(1)
        for begin in cuts:
            end = min(begin + size, file.size) if len(cuts) > 1 else file.size
            if unit and room < min(weight, size):
                found.append(tuple(unit))
                unit, room = [], size
            unit.append(Part(file, begin, end))
            room -= end - begin if len(cuts) > 1 else weight
    if unit:
        found.append(tuple(unit))
    return found


def read(part: Part, text_field: str) -> Iterator[Document]:
    """The documents of a part, good and bad; a JSON Lines document is named file#byte where its line begins."""
    file = part.file
    try:
        if file.json_lines:
            yield from _lines(part, text_field)
            return
        with gzip.open(file.path) if file.gzipped else open(file.path, "rb") as stream:
            data = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        yield Document(file.name, "", "unreadable", f"({error})")
        return
    yield _decoded(file.name, data)


def _lines(part: Part, text_field: str) -> Iterator[Document]:
    """A line belongs to the part in which it begins."""
    with gzip.open(part.file.path) if part.file.gzipped else open(part.file.path, "rb") as stream:
        at = part.begin
        if at:
            stream.seek(at - 1)
            at += len(stream.readline()) - 1  # the line that began before, up to and with its end
        while part.file.gzipped or at < part.end:
            line = stream.readline()
            if not line:
                return
            if not line.isspace():
                yield _field(f"{part.file.name}#{at}", line, text_field)
            at += len(line)


def _field(name: str, line: bytes, text_field: str) -> Document:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        return Document(name, "", "not UTF-8")
    except ValueError:
        return Document(name, "", "not JSON")
    if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
        return Document(name, "", "without text", f"in the field {text_field!r}")
    text = value[text_field]
    try:
        text.encode()
    except UnicodeEncodeError:
        return Document(name, "", "not Unicode", "(half of a surrogate pair)")
    return Document(name, text, "" if text else "empty")


def _decoded(name: str, data: bytes) -> Document:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Document(name, "", "not UTF-8", f"at byte {error.start}")
    return Document(name, text, "" if text else "empty")
