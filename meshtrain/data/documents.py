"""Reading documents: text, Markdown, source trees, JSON Lines, each also compressed, and Parquet; of conversations JSON Lines, JSON and Parquet.

A file is one document; in JSON Lines a line is one, in Parquet a row, in a JSON list an entry. Work is cut into units that follow from the input alone, so that
what comes out does not depend on how many workers share them. Of a compressed or Parquet file that is damaged nothing is taken.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from meshtrain.data.formats import DAMAGE, HEAD, is_chat, no_text, open_plain, parquet_column, parquet_records
from meshtrain.data.inputs import File
from meshtrain.errors import refusal, short

RULES = 2  # raised when the same input gives other documents than before, so that no old shards are taken for new ones
COMPRESSION_RATIO = 4  # compressed text is about this much larger once unpacked; only used to size the units
UNIT_COUNT = 256  # about as many units as this, so that the shards of a large corpus stay few
LEAST_UNIT, MOST_UNIT = 4 << 20, 1 << 30  # bytes of input
BOM = b"\xef\xbb\xbf"
# Objects as pairs, so that a key that stands twice is seen; numbers as floats, which have no limit of digits.
JSON = json.JSONDecoder(object_pairs_hook=tuple, parse_int=float)


@dataclass(frozen=True)
class Part:
    """A file, or the lines of it that begin in the bytes [begin, end)."""

    file: File
    begin: int
    end: int


@dataclass(frozen=True)
class Document:
    """A document, or why it is none: the kind of problem, and what exactly (then `text` is empty). Of a conversation its JSON value."""

    name: str
    text: str
    kind: str = ""
    detail: str = ""
    record: Any = None

    @property
    def problem(self) -> str:
        return " ".join(filter(None, (self.kind, self.detail)))


def units(files: Sequence[File]) -> list[tuple[Part, ...]]:
    """The files in order, cut into units of work of about equal size; only plain JSON Lines can be cut inside a file."""
    weights = [file.size * (COMPRESSION_RATIO if file.compression or file.parquet else 1) for file in files]
    size = min(max(sum(weights) // UNIT_COUNT, LEAST_UNIT), MOST_UNIT)
    found: list[tuple[Part, ...]] = []
    unit: list[Part] = []
    room = size
    for file, weight in zip(files, weights, strict=True):
        cuttable = file.json_lines and not file.compression and file.size > size
        cuts = range(0, file.size, size) if cuttable else range(1)
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


def read(part: Part, text_field: str | None, check: Callable[[], None] = lambda: None) -> Iterator[Document]:
    """The documents of a part, good and bad; one of JSON Lines is named file#byte where its line begins, one of Parquet or a list file#row.

    text_field None: records of conversations are read, whole.
    check is called now and then while a file is gone through before its first document, and may raise to stop.
    """
    file = part.file
    try:
        if file.json_lines:
            take = _whole_record if text_field is None else partial(_record, text_field=text_field)
            yield from _lines(part, take, check)
        elif text_field is None:
            yield from _row_records(file, check) if file.parquet else _entries(file)
        elif file.parquet:
            yield from _rows(file, text_field, check)
        else:
            with open_plain(file.path) as stream:
                yield _whole(file.name, stream.read())
    except DAMAGE as error:
        said = refusal(error) if isinstance(error, OSError) else str(error)
        yield Document(file.name, "", "unreadable", f"({short(said)})")


def _whole(name: str, data: bytes) -> Document:
    """A file that is one document."""
    if what := no_text(name, data[:HEAD]):
        return Document(name, "", "not text", f"but {what}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Document(name, "", "not UTF-8", f"at byte {error.start}")
    if (at := data.find(b"\0", 0, HEAD)) >= 0:
        return Document(name, "", "not text", f"but binary data (a NUL at byte {at})")
    return Document(name, text, "" if text else "empty")


def _lines(part: Part, take: Callable[[str, bytes], Document], check: Callable[[], None]) -> Iterator[Document]:
    """A line belongs to the part in which it begins."""
    file = part.file
    with open_plain(file.path) as stream:
        if what := no_text(file.name, stream.read(HEAD)):
            yield Document(file.name, "", "not text", f"but {what}")
            return
        if file.compression:
            # To its checksum at the end, before a line of it is taken.
            while stream.read(1 << 20):
                check()
    with open_plain(file.path) as stream:
        at = part.begin
        if at:
            stream.seek(at - 1)
            # Past the line that began before, with its end.
            at += len(stream.readline()) - 1
        while file.compression or at < part.end:
            line = stream.readline()
            if not line:
                return
            if not line.isspace():
                yield take(f"{file.name}#{at}", line.removeprefix(BOM) if at == 0 else line)
            at += len(line)


def _record(name: str, line: bytes, text_field: str) -> Document:
    try:
        value = _json(line.decode())
    except UnicodeDecodeError:
        return Document(name, "", "not UTF-8")
    except RecursionError:
        return Document(name, "", "not JSON", "(nested too deeply)")
    except ValueError:
        return Document(name, "", "not JSON")
    texts = [text for key, text in value if key == text_field] if isinstance(value, tuple) else []
    if len(texts) > 1:
        return Document(name, "", "ambiguous", f"(the field '{short(text_field)}' stands {len(texts)} times)")
    return _field(name, texts[0] if texts else None, text_field)


def _json(text: str, decoder: json.JSONDecoder = JSON) -> Any:
    try:
        return decoder.decode(text)
    except RecursionError:
        # How deep the calls stand here depends on who called; in a thread of its own it never does.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(decoder.decode, text).result()


class _Twice(Exception):
    """A field of an object stands twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice(next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i])))
    return found


RECORDS = json.JSONDecoder(object_pairs_hook=_once)


def _whole_record(name: str, data: bytes) -> Document:
    try:
        text = data.decode()
        record = _json(text, RECORDS)
        # Half of a surrogate pair stands as an escape, anywhere in it.
        if "\\u" in text:
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return Document(name, "", "not UTF-8")
    except UnicodeEncodeError:
        return Document(name, "", "not Unicode", "(half of a surrogate pair)")
    except RecursionError:
        return Document(name, "", "not JSON", "(nested too deeply)")
    except _Twice as error:
        return Document(name, "", "ambiguous", f"(the field '{short(error)}' stands twice)")
    except ValueError:
        return Document(name, "", "not JSON")
    return Document(name, "", record=record)


def _entries(file: File) -> Iterator[Document]:
    """The entries of a file that is one JSON list."""
    if not is_chat(file.name):
        yield Document(
            file.name, "", "no conversation", "(they are read from .jsonl, .ndjson, .json and .parquet files)"
        )
        return
    with open_plain(file.path) as stream:
        whole = _whole_record(file.name, stream.read().removeprefix(BOM))
    if whole.problem:
        yield whole
    elif not isinstance(whole.record, list):
        yield Document(file.name, "", "no conversation", "(a file that is no JSON Lines is a JSON list of them)")
    else:
        for number, record in enumerate(whole.record):
            yield Document(f"{file.name}#{number}", "", record=record)


def _field(name: str, text: Any, text_field: str) -> Document:
    if not isinstance(text, str):
        return Document(name, "", "without text", f"in the field '{short(text_field)}'")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Document(name, "", "not Unicode", "(half of a surrogate pair)")
    return Document(name, text, "" if text else "empty")


def _rows(file: File, text_field: str, check: Callable[[], None]) -> Iterator[Document]:
    try:
        # To its end, before a row of it is taken.
        for _ in parquet_column(file.path, text_field):
            check()
    except KeyError:
        yield Document(file.name, "", "without text", f"in a column '{short(text_field)}'")
        return
    for number, data in enumerate(chain.from_iterable(parquet_column(file.path, text_field))):
        name = f"{file.name}#{number}"
        try:
            yield _field(name, data if data is None else data.decode(), text_field)
        except UnicodeDecodeError as error:
            yield Document(name, "", "not UTF-8", f"at byte {error.start}")


def _row_records(file: File, check: Callable[[], None]) -> Iterator[Document]:
    # To its end, before a row of it is taken.
    for number, _ in enumerate(parquet_records(file.path)):
        if number % 1024 == 0:
            check()
    for number, record in enumerate(parquet_records(file.path)):
        # A column of times or bytes is none of a conversation's; as text it can be passed on.
        yield Document(f"{file.name}#{number}", "", record=json.loads(json.dumps(record, default=str)))
