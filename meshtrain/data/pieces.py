"""The pieces of a corpus by length: its documents, those longer than a row cut into rows and a rest.

The table lies on disk, memory-mapped: a corpus of 10^8 documents needs 800 MB there and almost nothing in memory.

    [pieces of length <= 0, <= 1, ..., <= T]  [first label of each piece, in order of (length, place in the corpus)]
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshtrain.config import ConfigError
from meshtrain.data.shards import Corpus
from meshtrain.files import temporary_beside

DOCUMENTS_AT_ONCE = 1 << 18  # of which the table is made


@dataclass(frozen=True)
class Pieces:
    """Pieces in order of length; those of length l are numbered ends[l - 1] .. ends[l].

    ends: int64 [T + 1]; first: uint64 [pieces], memory-mapped.
    """

    ends: np.ndarray
    first: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """How many pieces have each length 0 .. T; int64 [T + 1]."""
        return np.diff(self.ends, prepend=0)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """The lengths of the pieces with these numbers."""
        return np.searchsorted(self.ends, numbers, side="right")


def open_pieces(corpus: Corpus, longest: int, path: Path) -> Pieces:
    """The pieces of at most `longest` labels; the table is made at `path` unless it is there. ConfigError if it cannot be."""
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_beside(path)
            _write(corpus, longest, temporary)
            os.replace(temporary, path)  # whoever else makes it makes the same
        table = np.asarray(np.memmap(path, "<u8", "r"))
    except OSError as error:
        raise ConfigError(
            f"the table of document lengths {path} cannot be written or read ({error.strerror}); set XDG_CACHE_HOME to a directory with room."
        ) from None
    return Pieces(table[: longest + 1].astype(np.int64), table[longest + 1 :])


def _write(corpus: Corpus, longest: int, path: Path) -> None:
    counts = np.zeros(longest + 1, np.int64)
    for _, lengths in _documents(corpus):
        counts += np.bincount(lengths % longest, minlength=longest + 1)
        counts[longest] += (lengths // longest).sum()
    counts[0] = 0  # documents without a rest
    ends = np.cumsum(counts)
    table = np.memmap(path, "<u8", "w+", shape=(longest + 1 + int(ends[-1]),))
    table[: longest + 1] = ends
    first, free = table[longest + 1 :], ends - counts  # free: where the next piece of each length goes
    for starts, lengths in _documents(corpus):
        rows, rests = lengths // longest, lengths % longest
        whole = np.repeat(starts, rows)
        whole += longest * (np.arange(len(whole)) - np.repeat(np.cumsum(rows) - rows, rows))
        first[free[longest] : free[longest] + len(whole)] = whole
        free[longest] += len(whole)
        order = np.argsort(rests, kind="stable")
        order = order[rests[order] > 0]
        taken = np.bincount(rests[order], minlength=longest + 1)
        rank = np.arange(len(order)) - np.repeat(np.cumsum(taken) - taken, taken)
        first[free[rests[order]] + rank] = (starts + rows * longest)[order]
        free += taken
    table.flush()


def _documents(corpus: Corpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(first label, number of labels) of the documents in order, some at a time; int64."""
    for shard_start, offsets in zip(corpus.starts, corpus.offsets, strict=False):
        for at in range(0, len(offsets) - 1, DOCUMENTS_AT_ONCE):
            edges = offsets[at : at + DOCUMENTS_AT_ONCE + 1].astype(np.int64)
            yield shard_start + edges[:-1] - 1, np.diff(edges)
