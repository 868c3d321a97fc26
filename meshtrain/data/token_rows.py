"""Rows of tokens, made of stretches of a corpus: which labels stand side by side in each row, the tokens not yet read.

Batching `window`, and source `synthetic`.

    row         E a a a E b b . .      two stretches and the padding behind them
    first       17   4031   PADDING    number of each stretch's first label
    lengths     4    3      2
    segments    1    2      0

Everything here is numpy over all stretches at once: a line of Python for each costs more than reading it.

In conversations, the weights say which labels are learned. In pairs, each stretch is two segments, the chosen and the
rejected conversation, whose answers weigh 1 and -1; `pairs` says to which pair of the row a place belongs:

    tokens      c c C C C r r R R . .      c, r: what comes before the answer, C, R: the answer
    labels      c C C C r r R R R . .      (the label at the border is not learned: it weighs 0)
    segments    1 1 1 1 1 2 2 2 2 0 0
    positions   0 1 2 3 4 0 1 2 3 0 0
    weights     0 1 1 1 0 0 - - - 0 0      -: -1
    pairs       1 1 1 1 1 1 1 1 1 0 0
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtrain.config import Config
from meshtrain.data.loader import Batch
from meshtrain.data.manifest import ID, LEARNED, PADDING, REJECTED
from meshtrain.data.permutation import key_of, keys_of, permute

if TYPE_CHECKING:
    from meshtrain.data.shards import Corpus


@dataclass(frozen=True)
class Stretches:
    """The first label, length and segment number of each stretch; edges [rows + 1]: where each row's begin and end.

    A row is `length` long.
    """

    length: int
    first: np.ndarray
    lengths: np.ndarray
    segments: np.ndarray
    edges: np.ndarray
    skipped: np.ndarray | int = 0  # labels of each stretch that lie before the first

    def __getitem__(self, rows: slice) -> "Stretches":
        """These rows, of which there is no step."""
        begin, end, _ = rows.indices(len(self.edges) - 1)
        edges = self.edges[begin : end + 1]
        which = slice(edges[0], edges[-1])
        return Stretches(
            self.length,
            self.first[which],
            self.lengths[which],
            self.segments[which],
            edges - edges[0],
        )

    def select(self, columns: np.ndarray) -> "Stretches":
        """Returns the labels in these places of each row, ascending: rows of as many labels, where one stretch may
        become several.
        """
        gaps = np.flatnonzero(np.diff(columns) > 1)
        runs = np.split(columns, gaps + 1)
        run_begins = np.array([[run[0]] for run in runs])
        run_ends = np.array([[run[-1] + 1] for run in runs])
        row, begins = np.divmod(self._begins, self.length)
        low = np.maximum(begins, run_begins)
        high = np.minimum(begins + self.lengths, run_ends)
        which, run = np.nonzero((high > low).T)
        lengths = (high - low)[run, which]
        skipped = low[run, which] - begins[which]
        first = self.first[which]
        first = np.where(first == PADDING, PADDING, first + skipped)
        edges = np.searchsorted(row[which], np.arange(len(self.edges)))
        return Stretches(
            len(columns), first, lengths, self.segments[which], edges, skipped
        )

    @property
    def _begins(self) -> np.ndarray:
        """The places before each stretch, in its row and in the rows above."""
        return np.cumsum(self.lengths) - self.lengths

    def read(self, corpus: "Corpus") -> Batch:
        """tokens, labels: int32 [rows, length]; of conversations also weights, of pairs also segments, positions and
        pairs.
        """
        tokens, labels = corpus.read(self.first, self.lengths)
        if corpus.contents == "text":
            return {
                "tokens": self._rows(tokens.astype(np.int32)),
                "labels": self._rows(labels.astype(np.int32)),
            }
        arrays = {
            "tokens": (tokens & ID).astype(np.int32),
            "labels": (labels & ID).astype(np.int32),
        }
        weights = ((labels & LEARNED) > 0).astype(np.int32)
        if corpus.contents == "pairs":
            rejected = ((tokens & REJECTED) > 0).astype(np.int32)
            weights *= 1 - 2 * rejected
            pairs = np.repeat(self.segments.astype(np.int32), self.lengths)
            segments = (2 * pairs - 1 + rejected) * (pairs > 0)
            arrays["pairs"] = pairs
            arrays["segments"] = segments
            arrays["positions"] = self._restarting(segments)
        arrays["weights"] = weights.astype(np.float32)
        return {name: self._rows(flat) for name, flat in arrays.items()}

    @staticmethod
    def _restarting(segments: np.ndarray) -> np.ndarray:
        """Each label's place in its segment; 0 in the padding.

        A row begins with a pair's first side and never ends with one.
        """
        places = np.arange(len(segments), dtype=np.int32)
        begins = np.append(True, segments[1:] != segments[:-1])
        first_places = np.maximum.accumulate(np.where(begins, places, 0))
        return (places - first_places) * (segments > 0)

    @property
    def labels(self) -> int:
        """The number of labels in the rows, without padding."""
        return int(self.lengths[self.segments > 0].sum())

    def weights(self) -> np.ndarray:
        """1 where a label stands, 0 in the padding: float32 [rows, length]."""
        is_real = (self.segments > 0).astype(np.float32)
        return self._rows(np.repeat(is_real, self.lengths))

    def segments_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of its stretch in the row, and its place in the stretch, of each label; 0 in the padding: int32
        [rows, length].
        """
        segments = np.repeat(self.segments.astype(np.int32), self.lengths)
        positions = np.arange(len(segments), dtype=np.int32)
        begins = (self._begins - self.skipped).astype(np.int32)
        positions -= np.repeat(begins, self.lengths)
        positions *= segments > 0
        return self._rows(segments), self._rows(positions)

    def _rows(self, flat: np.ndarray) -> np.ndarray:
        return flat.reshape(len(self.edges) - 1, self.length)


def arrange_rows(
    length: int, counts: np.ndarray, first: np.ndarray, lengths: np.ndarray
) -> Stretches:
    """Returns rows of `length`, each of its count of stretches and then padding; stretches of length 0 are dropped."""
    ends = np.cumsum(counts)
    rows = np.arange(len(counts))
    # where each stands
    padding = ends + rows
    real = np.arange(len(first)) + np.repeat(rows, counts)
    columns = np.zeros((3, len(first) + len(rows)), np.int64)
    columns[0, padding] = PADDING
    filled = np.diff(np.cumsum(lengths)[ends - 1], prepend=0)
    columns[1, padding] = length - filled
    columns[0, real] = first
    columns[1, real] = lengths
    columns[2, real] = within(counts) + 1
    nonempty = columns[1] > 0
    starts, sizes, segments = columns[:, nonempty]
    behind = np.cumsum(nonempty)[padding]
    edges = np.concatenate([[0], behind])
    return Stretches(length, starts, sizes, segments, edges)


def read_part(rows: Any, places: Any, columns: np.ndarray | None) -> Batch:
    """Returns what `rows` has at `places`, of each row these columns (None: all).

    No more is read of stretches, but of pairs, whose second halves begin where their tokens say.
    """
    if (
        columns is not None
        and isinstance(places, Stretches)
        and rows.corpus.contents != "pairs"
    ):
        return rows.read(places.select(columns))
    batch = rows.read(places)
    if columns is None:
        return batch
    return {name: x[:, columns] for name, x in batch.items()}


def within(counts: np.ndarray) -> np.ndarray:
    """0 .. count for each count, one behind another."""
    ends = np.cumsum(counts)
    total = ends[-1] if len(ends) else 0
    begins = np.repeat(ends - counts, counts)
    return np.arange(total) - begins


class Windows:
    """Batching `window`: rows that follow one another in the corpus, whatever documents they cut; window w holds the
    labels [w T, (w + 1) T); with pad also the shorter last one.

    Keys of a batch: tokens, labels; with pad also weights (0 where nothing stands).
    """

    def __init__(self, corpus: "Corpus", length: int, pad: bool, seed: int) -> None:
        self.corpus = corpus
        self.length = length
        self.pad = pad
        self.seed = seed
        self.count = corpus.labels // length
        self.labels = self.count * length  # an epoch's labels
        if pad:
            self.count = -(-corpus.labels // length)
            self.labels = corpus.labels

    def locate(self, items: np.ndarray) -> Stretches:
        epochs, positions = np.divmod(items, self.count)
        keys = keys_of(epochs, self.seed, "windows")
        windows = permute(positions, self.count, keys)
        first = windows * self.length
        lengths = np.minimum(self.length, self.corpus.labels - first)
        return arrange_rows(self.length, *self.corpus.cut(first, lengths))

    def read(self, places: Stretches) -> Batch:
        batch = places.read(self.corpus)
        if self.pad:
            return {**batch, "weights": places.weights()}
        return batch


class SyntheticRows:
    """Source `synthetic`, for benchmarks: uniform random tokens, row r of all rows a pure function of (seed, split,
    r).
    """

    count = 1 << 40  # rows of an epoch: more than anyone asks for

    def __init__(self, config: Config, split: str) -> None:
        self.vocab_size = config.model.vocab_size
        self.length = config.train.sequence_length
        self.labels = self.count * self.length
        self.key = key_of(config.run.seed, "synthetic", split)

    def locate(self, items: np.ndarray) -> np.ndarray:
        return items

    def read(self, places: np.ndarray) -> Batch:
        drawn = np.empty((len(places), self.length + 1), np.int32)
        for row, item in zip(drawn, places.tolist(), strict=True):
            bits = np.random.Philox(key=[self.key, np.uint64(item)])
            stream = np.random.Generator(bits)
            tokens = self.length + 1
            row[:] = stream.integers(0, self.vocab_size, tokens, dtype=np.uint32)
        return {
            "tokens": drawn[:, :-1].copy(),
            "labels": drawn[:, 1:].copy(),
        }
