"""Batching `packed`: whole documents side by side in rows of T labels; attention and loss never cross from one to the
next.

    tokens     E a a a E b b E c c c c c E d d . .      E: end of document, which each document also begins with
    labels     a a a E b b E c c c c c E d d E . .
    segments   1 1 1 1 2 2 2 3 3 3 3 3 3 4 4 4 0 0      0: padding
    positions  0 1 2 3 0 1 2 0 1 2 3 4 5 0 1 2 0 0

Packing works on the histogram of lengths, not on the documents (Krell et al., "Efficient sequence packing without
cross-contamination", 2021, section 3, there LPFHP: best fit, the longest first). The result is a short list of kinds of
row, "213 rows of lengths 700 + 300 + 24"; which documents of those lengths meet in a row is drawn anew each epoch.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from meshtrain.data.loader import Batch
from meshtrain.data.permutation import keys_of, permute
from meshtrain.data.pieces import DocumentPieces
from meshtrain.data.shards import Corpus
from meshtrain.data.token_rows import Stretches, arrange_rows, within


@dataclass(frozen=True)
class RowKind:
    """Rows of the same make: `rows` of them, each with `copies` pieces of each length."""

    rows: int
    content: tuple[tuple[int, int], ...]  # (length, copies)


def pack(counts: np.ndarray, size: int) -> list[RowKind]:
    """Kinds of row of `size` that hold counts[l] pieces of each length l (counts [size + 1]), by best fit, the longest
    first.
    """
    # Kinds by the room that their rows have left
    by_room: dict[int, list[RowKind]] = {}
    rooms: list[int] = []  # its keys, ascending

    def put(room: int, kind: RowKind) -> None:
        if room not in by_room:
            bisect.insort(rooms, room)
        by_room.setdefault(room, []).append(kind)

    for length in (np.flatnonzero(counts[1:])[::-1] + 1).tolist():
        left = int(counts[length])
        while left:
            tightest = bisect.bisect_left(rooms, length)
            if tightest == len(rooms):
                # New rows, more than enough.
                room, kind = size, RowKind(left, ())
            else:
                room = rooms[tightest]
                kind = by_room[room].pop()
                if not by_room[room]:
                    del by_room[room], rooms[tightest]
            copies = min(room // length, left)
            rows = min(kind.rows, left // copies)
            put(
                room - length * copies, RowKind(rows, (*kind.content, (length, copies)))
            )
            if kind.content and rows < kind.rows:
                put(room, RowKind(kind.rows - rows, kind.content))
            left -= rows * copies
    return [kind for _, kinds in sorted(by_room.items()) for kind in kinds]


class Packed:
    """The rows of an epoch: every piece of every document in exactly one of them."""

    def __init__(
        self,
        corpus: Corpus,
        pieces: DocumentPieces,
        length: int,
        seed: int,
    ) -> None:
        self.corpus = corpus
        self.pieces = pieces
        self.length = length
        self.seed = seed
        self.labels = pieces.labels
        self._of_length = pieces.counts
        kinds = pack(self._of_length, length)
        # The pieces of a row of each kind: its j-th row takes the (base + j stride)-th piece of that length.
        slots: list[tuple[int, int, int]] = []  # length, base, stride
        counts = []
        used = np.zeros(length + 1, np.int64)
        for kind in kinds:
            before = len(slots)
            for piece, copies in kind.content:
                slots += [(piece, used[piece] + copy, copies) for copy in range(copies)]
                used[piece] += kind.rows * copies
            counts.append(len(slots) - before)
        self._slots = np.array(slots, np.int64).T
        self._slot_counts = np.array(counts)
        self._slot_starts = np.cumsum(counts) - counts
        self._row_ends = np.cumsum([kind.rows for kind in kinds])
        self._row_starts = self._row_ends - [kind.rows for kind in kinds]
        self.count = int(self._row_ends[-1])

    def locate(self, items: np.ndarray) -> Stretches:
        epochs, positions = np.divmod(items, self.count)
        row = permute(positions, self.count, keys_of(epochs, self.seed, "rows"))
        kind = np.searchsorted(self._row_ends, row, side="right")
        counts = self._slot_counts[kind]
        lengths, bases, strides = self._slots[
            :, np.repeat(self._slot_starts[kind], counts) + within(counts)
        ]
        of_length = bases + np.repeat(row - self._row_starts[kind], counts) * strides
        keys = np.repeat(keys_of(epochs, self.seed, "pieces"), counts) + lengths.astype(
            np.uint64
        )
        numbers = self.pieces.ends[lengths - 1] + permute(
            of_length, self._of_length[lengths], keys
        )
        return arrange_rows(
            self.length, counts, self.pieces.first[numbers].astype(np.int64), lengths
        )

    def read(self, places: Stretches) -> Batch:
        segments, positions = places.segments_and_positions()
        return {
            "segments": segments,
            "positions": positions,
            "weights": places.weights(),
            **places.read(self.corpus),
        }
