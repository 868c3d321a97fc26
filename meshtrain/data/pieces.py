"""The pieces of a corpus by length: its documents, those longer than a row cut into rows and a rest.

A conversation is not cut into several: what of it does not fit a row is left out, and all of it where no learned token
would be left. A pair is left out whole or not at all: half an answer is another answer.

The table lies on disk, memory-mapped: a corpus of 10^8 documents needs 800 MB there and almost nothing in memory.

    [SHA-256 of the file's name and the rest]  [pieces of length <= 0, <= 1, ..., <= T]
    [first label of each piece, in order of (length, place in the corpus)]
"""

import hashlib
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from meshtrain.data.manifest import LEARNED
from meshtrain.data.shards import Corpus
from meshtrain.errors import ConfigError, refusal
from meshtrain.files import (
    locked,
    refuse_passing,
    remove_temporaries,
    retried,
    sync,
    temporary_beside,
)

DIGEST = hashlib.sha256().digest_size
DOCUMENTS_AT_ONCE = 1 << 18  # of which the table is made
LABELS_AT_ONCE = 1 << 24  # of those that are looked at for an answer
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentPieces:
    """Pieces in order of length; those of length l are numbered ends[l - 1] .. ends[l].

    ends: int64 [T + 1]; first: uint64 [pieces], memory-mapped.
    """

    ends: np.ndarray
    first: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """The number of pieces of each length 0 .. T; int64 [T + 1]."""
        return np.diff(self.ends, prepend=0)

    def shortened(self, corpus: Corpus, longest: int) -> tuple[int, int]:
        """Returns how many documents are cut off at `longest`, and how many are left out; none is cut into several."""
        left_out = corpus.documents - len(self.first)
        return sum(
            int((lengths > longest).sum()) for _, lengths in stored(corpus)
        ) - left_out, left_out

    @property
    def labels(self) -> int:
        """The labels of all pieces together."""
        return int(self.counts @ np.arange(len(self.ends)))

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """The lengths of the pieces with these numbers."""
        return np.searchsorted(self.ends, numbers, side="right")


def open_pieces(corpus: Corpus, longest: int, path: Path) -> DocumentPieces:
    """Opens the pieces of at most `longest` labels; the table is made at `path` unless it is there, whole.

    ConfigError if it cannot be.
    """
    try:
        table = retried(lambda: _read(path))
        if table is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.parent):
                # Another process may have made it meanwhile.
                table = _read(path)
                if table is None:
                    damaged = os.path.lexists(path)
                    table = _make(corpus, longest, path)
                    if damaged:
                        log.warning(
                            "the table of document lengths %s is damaged; it is made again.",
                            path,
                        )
    except OSError as error:
        refuse_passing(path, error)
        raise ConfigError(
            f"the table of document lengths {path} cannot be written or read ({refusal(error)}); set XDG_CACHE_HOME "
            "to a directory with room."
        ) from None
    return DocumentPieces(table[: longest + 1].astype(np.int64), table[longest + 1 :])


def _read(path: Path) -> np.ndarray | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb", buffering=0) as file:
            return _map(file) if file.read(DIGEST) == _digest(file, path) else None
    except PermissionError:
        return None


def _digest(file: io.FileIO, path: Path) -> bytes:
    file.seek(DIGEST)
    return hashlib.file_digest(
        file, lambda: hashlib.sha256(path.name.encode())
    ).digest()


def _map(file: io.FileIO) -> np.ndarray:
    return np.asarray(np.memmap(file, "<u8", "r", DIGEST))


def _make(corpus: Corpus, longest: int, path: Path) -> np.ndarray:
    # None is at work, since we hold the lock.
    remove_temporaries(path.parent)
    temporary = temporary_beside(path)
    try:
        with temporary.open("w+b", buffering=0) as file:
            _write(corpus, longest, file)
            os.pwrite(file.fileno(), _digest(file, path), 0)
            os.fsync(file.fileno())
            table = _map(file)
        os.replace(temporary, path)
    finally:
        # A full disk needs the room of what failed.
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return table


def _put(file: int, values: np.ndarray, at: int) -> None:
    """Writes numbers behind the first `at`.

    By ordinary writes: a full disk refuses them, where it kills a process that writes to a memory map.
    """
    data = values.astype("<u8").tobytes()
    offset = DIGEST + 8 * at
    while data:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset = offset + written


def _write(corpus: Corpus, longest: int, file: io.FileIO) -> None:
    """Writes all but the digest."""
    put = partial(_put, file.fileno())
    counts = np.zeros(longest + 1, np.int64)
    for _, lengths in _documents(corpus, longest):
        counts += np.bincount(lengths % longest, minlength=longest + 1)
        counts[longest] += (lengths // longest).sum()
    # A document without a rest has no piece of length 0.
    counts[0] = 0
    ends = np.cumsum(counts)
    put(ends, 0)
    free = longest + 1 + ends - counts  # where the next piece of each length goes
    for starts, lengths in _documents(corpus, longest):
        rows = lengths // longest
        rests = lengths % longest
        full = np.repeat(starts, rows)
        full += longest * (
            np.arange(len(full)) - np.repeat(np.cumsum(rows) - rows, rows)
        )
        put(full, free[longest])
        free[longest] += len(full)
        order = np.argsort(rests, kind="stable")
        taken = np.bincount(rests, minlength=longest + 1)
        firsts = (starts + rows * longest)[order]
        upto = np.cumsum(taken)
        taken[0] = 0
        for rest in np.flatnonzero(taken).tolist():
            put(firsts[upto[rest] - taken[rest] : upto[rest]], free[rest])
        free += taken


def _documents(corpus: Corpus, longest: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(first label, number of labels that are taken) of the documents in order, some at a time; int64."""
    for starts, lengths in stored(corpus):
        if corpus.contents == "pairs":
            lengths[lengths > longest] = 0
        elif corpus.contents == "chat":
            (long,) = np.nonzero(lengths > longest)
            for at in np.array_split(
                long, -(-len(long) * longest // LABELS_AT_ONCE) or 1
            ):
                _, labels = corpus.read(starts[at], np.full(len(at), longest))
                learned = ((labels & LEARNED) > 0).reshape(len(at), longest).any(1)
                lengths[at] = np.where(learned, longest, 0)
        yield starts, lengths


def stored(corpus: Corpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(first label, number of labels) of the documents in order, some at a time; int64."""
    for shard_start, offsets in zip(corpus.starts, corpus.offsets, strict=False):
        for at in range(0, len(offsets) - 1, DOCUMENTS_AT_ONCE):
            edges = offsets[at : at + DOCUMENTS_AT_ONCE + 1].astype(np.int64)
            starts = shard_start + edges[:-1] - 1
            lengths = np.diff(edges)
            # A conversation's first token is nobody's label, nor is the E behind it.
            yield (
                (starts, lengths)
                if corpus.contents == "text"
                else (starts + 1, np.maximum(lengths - 2, 0))
            )
