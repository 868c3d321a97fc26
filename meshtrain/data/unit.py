"""One unit of the input (documents.units): read, tokenized, written as one shard of each split, and noted.

What a unit that is finished leaves beside its shards:

    DIR/units/00000.json       its shards, with counts and digests
    DIR/units/00000.skipped    the documents that it skipped, a line each
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from meshtrain.data.answers import Example, Examples
from meshtrain.data.chat import Unfit
from meshtrain.data.documents import Document, Part, read
from meshtrain.data.manifest import SPLITS, UNITS, Contents, Shard
from meshtrain.data.shards import ShardWriter, digest_of_file
from meshtrain.data.template import ChatTemplate, find_template
from meshtrain.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from meshtrain.errors import ConfigError, short
from meshtrain.files import write_atomically

ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})  # so that a name is one field of one line
BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at once


@dataclass(frozen=True)
class Options:
    """What decides, with the input's content, the bytes that come out."""

    tokenizer: str = "byte"
    validation: float = 0.01  # share of the documents that is held out
    text_field: str = "text"
    bad: str = "skip"  # skip | refuse a document that is none
    contents: Contents = "text"
    template: str | None = None  # of conversations: its file; None: the one beside the tokenizer


@dataclass(frozen=True)
class Note:
    """What a finished unit leaves behind."""

    shards: dict[str, Shard | None]
    skipped: dict[str, int]
    counts: dict[str, int]


@dataclass(frozen=True)
class Reading:
    """What documents become tokens by; `examples` of conversations."""

    tokenizer: ByteTokenizer | FileTokenizer
    examples: Examples | None = None

    def close(self) -> None:
        if self.examples is not None:
            self.examples.template.close()


def reading(options: Options, now: float) -> Reading:
    """ConfigError for a tokenizer or a template that is none; now: seconds since 1970 that templates are told."""
    tokenizer = load_tokenizer(options.tokenizer, chat=options.contents != "text")
    if options.contents == "text":
        if options.template is not None:
            raise ConfigError(
                f"text has no chat template; leave {short(options.template)} out, or say that the input is chat or pairs."
            )
        return Reading(tokenizer)
    template = ChatTemplate(find_template(options.template, options.tokenizer), now)
    return Reading(tokenizer, Examples(options.contents, template, tokenizer))


def held_out(name: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by its name alone, so it stays there when others come and go."""
    return int.from_bytes(hashlib.blake2b(encoded(name), digest_size=8).digest()) < fraction * 2**64


def encoded(names: str) -> bytes:
    """Names of files as bytes; Python keeps those that are not UTF-8 as surrogates."""
    return names.encode(errors="surrogateescape")


class Unfinished(Exception):
    """In a worker: the unit is left unfinished, since the preparation ends."""


class Unit:
    """Reads, tokenizes and writes one unit, and leaves its note."""

    def __init__(
        self, number: int, output: Path, options: Options, reading: Reading, stop: Event | None = None
    ) -> None:
        self.number, self.output, self.options, self.reading, self.stop = number, output, options, reading, stop
        end, dtype = reading.tokenizer.end_of_document, dtype_of(reading.tokenizer, options.contents)
        self.writers = {split: ShardWriter(output, f"{split}-{number:05d}", end, dtype) for split in SPLITS}
        self.skipped: Counter[str] = Counter()
        self.named: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self, parts: tuple[Part, ...]) -> None:
        try:
            self._run(parts)
        finally:
            for writer in self.writers.values():
                # A full disk needs the room of a unit that was not finished.
                writer.discard()

    def _run(self, parts: tuple[Part, ...]) -> None:
        if self.reading.examples is None:
            self._texts(parts)
        else:
            self._examples(parts, self.reading.examples)
        note = Note(
            {split: writer.close() for split, writer in self.writers.items()}, dict(self.skipped), dict(self.counts)
        )
        path = self.output / UNITS / f"{self.number:05d}"
        write_atomically(path.with_suffix(".skipped"), encoded("".join(self.named)))
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(note)).encode())

    def _texts(self, parts: tuple[Part, ...]) -> None:
        batch: list[tuple[str, str | None]] = []  # (split, text); None: there the document ends
        characters = 0
        for document in self._documents(parts, self.options.text_field):
            split = self._split(document)
            for text in cut(document.text):
                batch.append((split, text))
                characters += len(text)
                if characters >= BATCH_CHARACTERS:
                    self._write(batch)
                    batch, characters = [], 0
            batch.append((split, None))
        self._write(batch)

    def _examples(self, parts: tuple[Part, ...], examples: Examples) -> None:
        batch: list[tuple[str, Example]] = []
        characters = 0
        for document in self._documents(parts, None):
            try:
                made = examples.of(document, self.counts)
            except Unfit as error:
                self._skip(replace(document, kind=error.kind, detail=error.detail))
                continue
            batch += [(self._split(document), example) for example in made]
            characters += sum(len(text.text) for example in made for text in example)
            if characters >= BATCH_CHARACTERS:
                self._write_examples(batch, examples)
                batch, characters = [], 0
        self._write_examples(batch, examples)

    def _documents(self, parts: tuple[Part, ...], text_field: str | None) -> Iterator[Document]:
        """The good ones."""
        for part in parts:
            for document in read(part, text_field, self._check):
                if document.problem:
                    self._skip(document)
                else:
                    yield document

    def _split(self, document: Document) -> str:
        return "validation" if held_out(document.name, self.options.validation) else "train"

    def _skip(self, document: Document) -> None:
        if self.options.bad == "refuse":
            raise ConfigError(
                f"the document {short(document.name)} is {document.problem}; mend it, or have bad documents skipped."
            )
        self.skipped[document.kind] += 1
        self.named.append(f"{document.name.translate(ESCAPED)}\t{document.problem}\n")

    def _check(self) -> None:
        if self.stop is not None and self.stop.is_set():
            raise Unfinished

    def _write(self, batch: list[tuple[str, str | None]]) -> None:
        self._check()
        encoded = iter(self.reading.tokenizer.encode([text for _, text in batch if text is not None]))
        for split, text in batch:
            if text is None:
                self.writers[split].end_document()
            else:
                self.writers[split].add(next(encoded))
        self._flush()

    def _write_examples(self, batch: list[tuple[str, Example]], examples: Examples) -> None:
        self._check()
        for (split, _), tokens in zip(batch, examples.encode([made for _, made in batch], self.counts), strict=True):
            self.writers[split].add(tokens)
            self.writers[split].end_document()
        self._flush()

    def _flush(self) -> None:
        for writer in self.writers.values():
            writer.flush()


def cut(text: str, longest: int = BATCH_CHARACTERS) -> Iterator[str]:
    """A long text in parts, each to the end of a line where it can: tokenizers need memory many times their text."""
    at = 0
    while len(text) - at > longest:
        end = text.rfind("\n", at, at + longest) + 1 or at + longest
        yield text[at:end]
        at = end
    yield text[at:]


def dtype_of(tokenizer: Tokenizer, contents: Contents = "text") -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian; of conversations uint32, since there is more to a token."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 and contents == "text" else "<u4")


def read_note(output: Path, number: int, dtype: np.dtype, verify: bool = False) -> Note | None:
    """The note of a unit whose shards are all there in full length and (with verify) unaltered."""
    path = output / UNITS / f"{number:05d}.json"
    try:
        if not path.is_file() or not path.with_suffix(".skipped").is_file():
            return None
        values = json.loads(path.read_bytes())
        shards = {split: Shard(**values["shards"][split]) if values["shards"][split] else None for split in SPLITS}
        files = [file for shard in shards.values() if shard for file in shard.files(output, dtype.itemsize)]
        if any(path.stat().st_size != size for path, size, _ in files):
            return None
        if verify and any(digest_of_file(path) != digest for path, _, digest in files):
            return None
        return Note(shards, dict(values["skipped"]), dict(values.get("counts", {})))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Not there, or not whole: the unit is done again.
        return None
