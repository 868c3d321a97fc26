"""One unit of the input (documents.units): read, tokenized, written as one shard of each split, and noted.

What a unit that is finished leaves beside its shards:

    DIR/units/00000.json       its shards, with counts and digests
    DIR/units/00000.skipped    the documents that it skipped, a line each
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from meshtrain.data.documents import Document, Part, read
from meshtrain.data.manifest import SPLITS, UNITS, Shard
from meshtrain.data.shards import ShardWriter, digest_of_file
from meshtrain.data.tokenizer import Tokenizer
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


@dataclass(frozen=True)
class Note:
    """What a finished unit leaves behind."""

    shards: dict[str, Shard | None]
    skipped: dict[str, int]


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
        self, number: int, output: Path, options: Options, tokenizer: Tokenizer, stop: Event | None = None
    ) -> None:
        self.number, self.output, self.options, self.tokenizer, self.stop = number, output, options, tokenizer, stop
        end, dtype = tokenizer.end_of_document, dtype_of(tokenizer)
        self.writers = {split: ShardWriter(output, f"{split}-{number:05d}", end, dtype) for split in SPLITS}
        self.skipped: Counter[str] = Counter()
        self.named: list[str] = []

    def run(self, parts: tuple[Part, ...]) -> None:
        try:
            self._run(parts)
        finally:
            for writer in self.writers.values():
                # A full disk needs the room of a unit that was not finished.
                writer.discard()

    def _run(self, parts: tuple[Part, ...]) -> None:
        batch: list[tuple[str, str | None]] = []  # (split, text); None: there the document ends
        characters = 0
        for part in parts:
            for document in read(part, self.options.text_field, self._check):
                if document.problem:
                    self._skip(document)
                    continue
                split = "validation" if held_out(document.name, self.options.validation) else "train"
                for text in cut(document.text):
                    batch.append((split, text))
                    characters += len(text)
                    if characters >= BATCH_CHARACTERS:
                        self._write(batch)
                        batch, characters = [], 0
                batch.append((split, None))
        self._write(batch)
        note = Note({split: writer.close() for split, writer in self.writers.items()}, dict(self.skipped))
        path = self.output / UNITS / f"{self.number:05d}"
        write_atomically(path.with_suffix(".skipped"), encoded("".join(self.named)))
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(note)).encode())

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
        encoded = iter(self.tokenizer.encode([text for _, text in batch if text is not None]))
        for split, text in batch:
            if text is None:
                self.writers[split].end_document()
            else:
                self.writers[split].add(next(encoded))
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


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


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
        return Note(shards, dict(values["skipped"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Not there, or not whole: the unit is done again.
        return None
