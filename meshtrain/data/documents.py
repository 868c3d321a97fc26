"""Reads documents: text, Markdown, source trees, JSON Lines, each also compressed, and Parquet; conversations from JSON
Lines, JSON and Parquet.

A file is one document; in JSON Lines a line is one, in Parquet a row, in a JSON list an entry. Work is cut into units
that follow from the input alone, so that what comes out does not depend on how many workers share them. A compressed or
Parquet file that is damaged is skipped whole.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from meshtrain.data.formats import (
    DAMAGE,
    HEAD,
    is_chat,
    open_plain,
    parquet_column,
    parquet_records,
)
from meshtrain.data.input_files import InputFile
from meshtrain.errors import refusal, short
from meshtrain.files import UNREAD, refuse_passing, retried

# Raised when the same input gives other documents than before, so that no old shards are taken for new ones
RULES = 3
COMPRESSION_RATIO = (
    # Compressed text is about this much larger once unpacked; only used to size the units
    4
)
# About as many units as this, so that the shards of a large corpus stay few
UNIT_COUNT = 256
# bytes of input
LEAST_UNIT = 4 << 20
MOST_UNIT = 1 << 30
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """A file, or the lines of it that begin in the bytes [begin, end)."""

    file: InputFile
    begin: int
    end: int


@dataclass(frozen=True)
class Document:
    """A document, or why it is none: the kind of problem and its detail (then `text` is empty). record: the JSON value
    of a conversation.
    """

    name: str
    text: str
    kind: str = ""
    detail: str = ""
    record: Any = None

    @property
    def problem(self) -> str:
        return " ".join(filter(None, (self.kind, self.detail)))


def units(files: Sequence[InputFile]) -> list[tuple[Part, ...]]:
    """The files in order, cut into units of work of about equal size; only plain JSON Lines can be cut inside a
    file.
    """
    weights = [
        file.size * (COMPRESSION_RATIO if file.compression or file.parquet else 1)
        for file in files
    ]
    size = min(max(sum(weights) // UNIT_COUNT, LEAST_UNIT), MOST_UNIT)
    cut: list[tuple[Part, ...]] = []
    unit: list[Part] = []
    room = size
    for file, weight in zip(files, weights, strict=True):
        cuttable = file.json_lines and not file.compression and file.size > size
        pieces = [
            (begin, min(begin + size, file.size)) for begin in range(0, file.size, size)
        ]
        for begin, end in pieces if cuttable else [(0, file.size)]:
            if unit and room < min(weight, size):
                cut.append(tuple(unit))
                unit = []
                room = size
            unit.append(Part(file, begin, end))
            room -= end - begin if cuttable else weight
    return [*cut, tuple(unit)] if unit else cut


def read(
    part: Part, text_field: str | None, check: Callable[[], None] = lambda: None
) -> Iterator[Document]:
    """The documents of a part, good and bad; one of JSON Lines is named file#byte where its line begins, one of Parquet
    or a list file#row.

    text_field None: records of conversations are read, whole.
    check is called now and then while a file is gone through before its first document, and may raise to stop.
    """
    file = part.file
    try:
        if file.json_lines:
            take = (
                _whole_record
                if text_field is None
                else partial(_record, text_field=text_field)
            )
            yield from _lines(part, take, check)
        elif text_field is None:
            yield from _row_records(file, check) if file.parquet else _entries(file)
        elif file.parquet:
            yield from _rows(file, text_field, check)
        else:
            yield _whole(file.name, retried(lambda: _content(file.path)))
    except DAMAGE as error:
        # It may be read a moment later: a document that is left out for it would be missing for good.
        if isinstance(error, OSError):
            refuse_passing(file.path, error, UNREAD)
        reason = refusal(error) if isinstance(error, OSError) else str(error)
        yield Document(file.name, "", "unreadable", f"({short(reason)})")


def _content(path: str) -> bytes:
    with open_plain(path) as stream:
        return stream.read()


def documents(files: Sequence[InputFile], text_field: str | None) -> Iterator[Document]:
    """Reads the documents of all files in order, good and bad."""
    for part in chain.from_iterable(units(files)):
        yield from read(part, text_field)


def _whole(name: str, data: bytes) -> Document:
    if data.startswith(b"%PDF-"):  # which may have no NUL
        return Document(name, "", "not text", "but a PDF")
    if (at := data.find(b"\0", 0, HEAD)) >= 0:
        return Document(
            name, "", "not text", f"in UTF-8 but binary data (a NUL at byte {at})"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Document(name, "", "not UTF-8", f"at byte {error.start}")
    return Document(name, text, "" if text else "empty")


def _lines(
    part: Part, take: Callable[[str, bytes], Document], check: Callable[[], None]
) -> Iterator[Document]:
    """A line belongs to the part in which it begins."""
    file = part.file
    if file.compression:
        with open_plain(file.path) as stream:
            # To its checksum at the end, before a line of it is taken
            while stream.read(1 << 20):
                check()
    with open_plain(file.path) as stream:
        at = part.begin
        if at:  # past the line that began before, with its end
            stream.seek(at - 1)
            at += len(stream.readline()) - 1
        while file.compression or at < part.end:
            line = stream.readline()
            if not line:
                return
            if not line.isspace():
                yield take(
                    f"{file.name}#{at}", line.removeprefix(BOM) if at == 0 else line
                )
            at += len(line)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(
            name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i])
        )
        raise _Ambiguous(f"(the field '{short(twice)}' stands twice)")
    return record


class _Ambiguous(Exception):
    """A field of an object stands more than once."""


# Objects as pairs, so that a key that stands twice is seen; numbers as floats, which have no limit of digits.
FIELDS = json.JSONDecoder(object_pairs_hook=tuple, parse_int=float)
RECORDS = json.JSONDecoder(object_pairs_hook=_once)


def _decoded(name: str, data: bytes, take: Callable[[str], Document]) -> Document:
    try:
        return take(data.decode())
    except UnicodeDecodeError:
        return Document(name, "", "not UTF-8")
    except UnicodeEncodeError:
        return Document(name, "", "not Unicode", "(half of a surrogate pair)")
    except RecursionError:
        return Document(name, "", "not JSON", "(nested too deeply)")
    except _Ambiguous as error:
        return Document(name, "", "ambiguous", str(error))
    except ValueError:
        return Document(name, "", "not JSON")


def _record(name: str, line: bytes, text_field: str) -> Document:
    def take(text: str) -> Document:
        value = FIELDS.decode(text)
        texts = (
            [text for key, text in value if key == text_field]
            if isinstance(value, tuple)
            else []
        )
        if len(texts) > 1:
            raise _Ambiguous(
                f"(the field '{short(text_field)}' stands {len(texts)} times)"
            )
        return _field(name, texts[0] if texts else None, text_field)

    return _decoded(name, line, take)


def _whole_record(name: str, data: bytes) -> Document:
    def take(text: str) -> Document:
        record = RECORDS.decode(text)
        if "\\u" in text:  # as which half of a surrogate pair stands, anywhere in it
            json.dumps(record, ensure_ascii=False).encode()
        return Document(name, "", record=record)

    return _decoded(name, data, take)


def _entries(file: InputFile) -> Iterator[Document]:
    if not is_chat(file.name):
        yield Document(
            file.name,
            "",
            "no conversation",
            "(they are read from .jsonl, .ndjson, .json and .parquet files)",
        )
        return
    with open_plain(file.path) as stream:
        content = _whole_record(file.name, stream.read().removeprefix(BOM))
    if content.problem:
        yield content
    elif not isinstance(content.record, list):
        yield Document(
            file.name,
            "",
            "no conversation",
            "(a file that is not JSON Lines is a JSON list of them)",
        )
    else:
        for number, record in enumerate(content.record):
            yield Document(f"{file.name}#{number}", "", record=record)


def _field(name: str, text: Any, text_field: str) -> Document:
    if not isinstance(text, str):
        return Document(name, "", "without text", f"in the field '{short(text_field)}'")
    text.encode()  # raises for half of a surrogate pair
    return Document(name, text, "" if text else "empty")


def _rows(
    file: InputFile, text_field: str, check: Callable[[], None]
) -> Iterator[Document]:
    try:
        # To its end, before a row of it is taken
        for _ in parquet_column(file.path, text_field):
            check()
    except KeyError:
        yield Document(
            file.name, "", "without text", f"in a column '{short(text_field)}'"
        )
        return
    for number, data in enumerate(
        chain.from_iterable(parquet_column(file.path, text_field))
    ):
        name = f"{file.name}#{number}"
        try:
            yield _field(name, data if data is None else data.decode(), text_field)
        except UnicodeDecodeError as error:
            yield Document(name, "", "not UTF-8", f"at byte {error.start}")


def _row_records(file: InputFile, check: Callable[[], None]) -> Iterator[Document]:
    for number, _ in enumerate(
        parquet_records(file.path)
    ):  # to its end, before a row of it is taken
        if number % 1024 == 0:
            check()
    for number, record in enumerate(parquet_records(file.path)):
        # A column of times or bytes is none of a conversation's; as text it can be passed on.
        yield Document(
            f"{file.name}#{number}",
            "",
            record=json.loads(json.dumps(record, default=str)),
        )
