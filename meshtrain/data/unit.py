"""One unit of the input (documents.units): read, tokenized, written as one shard of each split, and recorded.

A finished unit leaves these files beside its shards:

    DIR/units/00000.json       its shards, with counts and digests
    DIR/units/00000.skipped    the documents that it skipped, a line each
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeVar

import numpy as np

from meshtrain.data.documents import Document, Part, read
from meshtrain.data.examples import Example, Examples
from meshtrain.data.manifest import SPLITS, UNITS, Contents, Shard
from meshtrain.data.messages import Unfit
from meshtrain.data.shards import digest_of_file
from meshtrain.data.template import ChatTemplate, find_template
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer
from meshtrain.errors import ConfigError, short
from meshtrain.files import refuse_passing, temporary_beside, write_atomically

ESCAPED = str.maketrans(
    {"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
)  # so that a name is one field of one line
BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at once
T = TypeVar("T", str, Example)


class ShardWriter:
    """Writes one shard: appended to, digested on the way, renamed when whole."""

    def __init__(
        self,
        directory: Path,
        name: str,
        end_of_document: int,
        dtype: np.dtype,
        begin: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.dtype = dtype
        # A document is predicted from what it begins with, else from the end of the one before it.
        self.rest = np.array(begin[1:], dtype)
        self.end = np.array([end_of_document, *begin[:1]], dtype)
        self.path = directory / f"{name}.tokens"
        self.temporary = temporary_beside(self.path)
        self.digest = hashlib.sha256()
        self.tokens = 1
        self.offsets = [1]
        self.waiting = [self.end[-1:]]

    def add(self, ids: np.ndarray) -> None:
        """More of the document."""
        if self.tokens == self.offsets[-1]:
            self._append(self.rest)
        self._append(ids)

    def _append(self, ids: np.ndarray) -> None:
        self.waiting.append(ids)
        self.tokens += len(ids)

    def end_document(self) -> None:
        self._append(self.end)
        self.offsets.append(self.tokens)

    def flush(self) -> None:
        """Writes what has been added; the file comes into being with the first."""
        if self.tokens > 1 and self.waiting:
            tokens = np.concatenate(self.waiting, dtype=self.dtype, casting="unsafe")
            with open(self.temporary, "ab") as stream:
                stream.write(tokens.data)
            self.digest.update(tokens.data)
            self.waiting = []

    def close(self) -> Shard | None:
        """Returns the finished shard; None, and no file, if it has no document."""
        self.flush()
        if self.tokens == 1:
            return None
        offsets = np.array(self.offsets, "<u8").tobytes()
        with open(self.temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(self.temporary, self.path)
        write_atomically(self.path.with_suffix(".offsets"), offsets)
        digests = self.digest.hexdigest(), hashlib.sha256(offsets).hexdigest()
        return Shard(self.name, len(self.offsets) - 1, self.tokens, *digests)

    def discard(self) -> None:
        """Removes an unfinished shard; does nothing to a finished one."""
        self.temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class PrepareOptions:
    """The options that decide, with the input's content, the bytes of the shards."""

    tokenizer: str = "byte"
    validation: float = 0.01  # share of the documents that is held out
    text_field: str = "text"
    bad: str = "skip"  # skip | refuse a document that is none
    contents: Contents = "text"
    # Of conversations: its file; None: the one beside the tokenizer
    template: str | None = None
    begin: str | None = None  # as data.begin and data.end
    end: str | None = None


@dataclass(frozen=True)
class UnitRecord:
    """The shards and counts of a finished unit, kept for a later run."""

    shards: dict[str, Shard | None]
    skipped: dict[str, int]
    counts: dict[str, int]
    first: list[
        int
        # Of its conversations the places (`place`) of the two that a growing share would hold out first
    ]


@dataclass(frozen=True)
class Encoder:
    """Turns documents into tokens; conversations by its `examples`."""

    tokenizer: Tokenizer
    examples: Examples | None = None

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id, little-endian; of conversations uint32, since a token
        has bits of its own.
        """
        return np.dtype(
            "<u2"
            if self.tokenizer.vocab_size <= 1 << 16 and self.examples is None
            else "<u4"
        )

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document; a conversation begins as its template has it."""
        return self.tokenizer.begin if self.examples is None else ()


def open_encoder(options: PrepareOptions, now: float) -> Encoder:
    """ConfigError for a tokenizer or a template that is none; now: the time that templates see, in seconds since
    1970.
    """
    tokenizer = load_tokenizer(
        options.tokenizer, options.contents != "text", options.begin, options.end
    )
    if options.contents == "text":
        if options.template is not None:
            raise ConfigError(
                f"text has no chat template; leave {short(options.template)} out, or say that the input is chat or "
                "pairs."
            )
        return Encoder(tokenizer)
    template = ChatTemplate(find_template(options.template, options.tokenizer), now)
    return Encoder(tokenizer, Examples(options.contents, template, tokenizer))


def place(name: str) -> int:
    """Returns a document's place among all that might be, 0 .. 2**64, by its name alone."""
    return int.from_bytes(hashlib.blake2b(encoded(name), digest_size=8).digest())


def held_out(name: str, fraction: float) -> bool:
    """Returns whether a document belongs to the validation split, where it stays when others come and go."""
    return place(name) < fraction * 2**64


def encoded(names: str) -> bytes:
    """Names of files as bytes; Python keeps those that are not UTF-8 as surrogates."""
    return names.encode(errors="surrogateescape")


class Unfinished(Exception):
    """In a worker: the unit is left unfinished, since the preparation ends."""


class Unit:
    """Reads, tokenizes and writes one unit, and leaves its record."""

    def __init__(
        self,
        number: int,
        output: Path,
        options: PrepareOptions,
        encoder: Encoder,
        stop: Event | None = None,
    ) -> None:
        self.number = number
        self.output = output
        self.options = options
        self.encoder = encoder
        self.stop = stop
        how = encoder.tokenizer.end_of_document, encoder.dtype, encoder.begin
        self.writers = {
            split: ShardWriter(output, f"{split}-{number:05d}", *how)
            for split in SPLITS
        }
        self.skipped: Counter[str] = Counter()
        self.log: list[str] = []  # the skipped ones by name
        self.counts: Counter[str] = Counter()
        self.first: list[int] = []

    def run(self, parts: tuple[Part, ...]) -> None:
        try:
            if (examples := self.encoder.examples) is None:
                self._write(self._texts(parts), self.encoder.tokenizer.encode, len)
            else:
                characters = lambda example: sum(len(text.text) for text in example)
                self._write(
                    self._examples(parts, examples),
                    partial(examples.encode, counts=self.counts),
                    characters,
                )
            shards = {split: writer.close() for split, writer in self.writers.items()}
            record = UnitRecord(
                shards, dict(self.skipped), dict(self.counts), self.first
            )
            path = self.output / UNITS / f"{self.number:05d}"
            write_atomically(path.with_suffix(".skipped"), encoded("".join(self.log)))
            write_atomically(
                path.with_suffix(".json"), json.dumps(asdict(record)).encode()
            )
        finally:
            # A full disk needs the room of a unit that was not finished.
            for writer in self.writers.values():
                writer.discard()

    def _write(
        self,
        entries: Iterator[tuple[ShardWriter, T, bool]],
        encode: Callable[[list[T]], list[np.ndarray]],
        characters: Callable[[T], int],
    ) -> None:
        """Encodes and writes entries (writer, what to encode, whether the document ends there), many at a time."""
        more = True
        while more:
            batch = []
            size = 0
            while size < BATCH_CHARACTERS and (
                more := (entry := next(entries, None)) is not None
            ):
                batch.append(entry)
                size += characters(entry[1])
            self._check()
            for (writer, _, ends), ids in zip(
                batch, encode([content for _, content, _ in batch]), strict=True
            ):
                writer.add(ids)
                if ends:
                    writer.end_document()
            for writer in self.writers.values():
                writer.flush()

    def _texts(
        self, parts: tuple[Part, ...]
    ) -> Iterator[tuple[ShardWriter, str, bool]]:
        for document in self._documents(parts, self.options.text_field):
            *others, last = cut(document.text)
            writer = self._writer(document)
            yield from ((writer, text, False) for text in others)
            yield writer, last, True

    def _examples(
        self, parts: tuple[Part, ...], examples: Examples
    ) -> Iterator[tuple[ShardWriter, Example, bool]]:
        for document in self._documents(parts, None):
            try:
                entries = examples.read(document, self.counts)
            except Unfit as error:
                self._skip(replace(document, kind=error.kind, detail=error.detail))
                continue
            self.first = sorted({*self.first, place(document.name)})[:2]
            yield from ((self._writer(document), example, True) for example in entries)

    def _documents(
        self, parts: tuple[Part, ...], text_field: str | None
    ) -> Iterator[Document]:
        for part in parts:
            for document in read(part, text_field, self._check):
                if document.problem:
                    self._skip(document)
                else:
                    yield document

    def _writer(self, document: Document) -> ShardWriter:
        return self.writers[
            "validation"
            if held_out(document.name, self.options.validation)
            else "train"
        ]

    def _skip(self, document: Document) -> None:
        if self.options.bad == "refuse":
            raise ConfigError(
                f"the document {short(document.name)} is {document.problem}; mend it, or have bad documents skipped."
            )
        self.skipped[document.kind] += 1
        self.log.append(f"{document.name.translate(ESCAPED)}\t{document.problem}\n")

    def _check(self) -> None:
        if self.stop is not None and self.stop.is_set():
            raise Unfinished


def cut(text: str, longest: int = BATCH_CHARACTERS) -> Iterator[str]:
    """A long text in parts, each to the end of a line where it can: tokenizers need memory many times their text."""
    at = 0
    while len(text) - at > longest:
        end = text.rfind("\n", at, at + longest) + 1 or at + longest
        yield text[at:end]
        at = end
    yield text[at:]


def read_record(
    output: Path, number: int, dtype: np.dtype, verify: bool = False
) -> UnitRecord | None:
    """The record of a unit whose shards are all there in full length and (with verify) unaltered."""
    path = output / UNITS / f"{number:05d}.json"
    try:
        if not path.is_file() or not path.with_suffix(".skipped").is_file():
            return None
        values = json.loads(path.read_bytes())
        shards = {
            split: Shard(**values["shards"][split]) if values["shards"][split] else None
            for split in SPLITS
        }
        files = [
            file
            for shard in shards.values()
            if shard
            for file in shard.files(output, dtype.itemsize)
        ]
        if any(path.stat().st_size != size for path, size, _ in files):
            return None
        if verify and any(digest_of_file(path) != digest for path, _, digest in files):
            return None
        return UnitRecord(
            shards,
            dict(values["skipped"]),
            dict(values.get("counts", {})),
            list(values.get("first", [])),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, OSError):
            refuse_passing(path, error)
        # Not there, or not whole: the unit is done again.
        return None
