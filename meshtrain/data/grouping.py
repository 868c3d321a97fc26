"""Batching `grouped` and `budget`: documents of about equal length together, padded to one of a few lengths.

    grouped   every batch has the same rows; their length varies:   16 x 64,  16 x 256,  16 x 1024
    budget    every batch has about the same tokens:               256 x 64,  64 x 256,  16 x 1024

The pieces stand in order of length (pieces.py), so a group is a range of them; a few of the longest move up to the next
group so that every group but the last fills its batches. Which pieces of a group meet in a batch, and the order of the
batches of all groups, are drawn anew each epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshtrain.data.loader import Batch
from meshtrain.data.permutation import key_of, keys_of, permute
from meshtrain.data.pieces import DocumentPieces
from meshtrain.data.shards import Corpus
from meshtrain.data.token_rows import Stretches, arrange_rows, read_part

CHOICES = 512  # row lengths to choose from
AHEAD = 256  # batches whose places in the order are found at a time


@dataclass(frozen=True)
class LengthGroup:
    """The pieces begin .. end, in batches of `rows` rows of `length`."""

    length: int
    rows: int
    begin: int
    end: int
    batches: int


def choose_lengths(counts: np.ndarray, most: int, multiple: int) -> tuple[int, ...]:
    """At most `most` row lengths, multiples of `multiple` or the longest, that together need the least padding.

    counts[l]: pieces (or their weight) of each length l = 0 .. T. Exact, by dynamic programming over the last length
    taken, among at most CHOICES evenly spaced lengths.
    """
    longest = len(counts) - 1
    step = multiple * -(-longest // (multiple * CHOICES))
    choices = np.unique([0, *range(step, longest, step), longest])
    upto = np.cumsum(counts)[choices]  # pieces of at most each choice
    # cost[i, j]: tokens of all pieces longer than choice i and at most choice j, padded to choice j
    cost = (upto[None, :] - upto[:, None]) * choices[None, :].astype(float)
    cost[np.tril_indices(len(choices))] = np.inf
    # With one length: the least cost of covering the pieces up to choice j
    best = cost[0].copy()
    taken = []
    for _ in range(min(most, len(choices) - 1) - 1):
        through = best[:, None] + cost
        taken.append(through.argmin(0))
        better = through.min(0)
        # -1: one length fewer does as well.
        taken[-1] = np.where(better < best, taken[-1], -1)
        best = np.minimum(best, better)
    lengths = []
    at = len(choices) - 1
    for step in reversed(taken):
        if step[at] >= 0:
            lengths.append(int(choices[at]))
            at = step[at]
    return tuple(sorted([*lengths, int(choices[at])]))


def budget_rows(budget: int, length: int, multiple: int) -> int:
    """The most rows of a length within a budget of tokens, in multiples of `multiple`."""
    return max(budget // length // multiple, 1) * multiple


def make_groups(
    pieces: DocumentPieces, lengths: Sequence[int], rows: Sequence[int], pad: bool
) -> list[LengthGroup]:
    """All pieces in groups of these lengths, with these rows a batch; only the last group's last batch may not be
    full.
    """
    groups: list[LengthGroup] = []
    begin = 0
    total = len(pieces.first)
    for length, size in zip(lengths, rows, strict=True):
        end = int(pieces.ends[length])
        batches = (end - begin) // size
        if end == total:
            batches += pad and (end - begin) % size > 0
        else:
            end = begin + batches * size
        if batches:
            groups.append(LengthGroup(length, size, begin, end, batches))
        begin = end
    return groups


class Grouped:
    """The batches of an epoch in an order drawn for it. Keys: tokens, labels, weights (0 behind the end of a document).

    Padding stands behind the documents, where causal attention does not see it: neither segments nor positions are
    needed.
    """

    def __init__(
        self,
        corpus: Corpus,
        pieces: DocumentPieces,
        groups: Sequence[LengthGroup],
        seed: int,
    ) -> None:
        self.corpus = corpus
        self.pieces = pieces
        self.groups = list(groups)
        self.seed = seed
        batches = np.array([group.batches for group in groups], np.int64)
        self._ends = np.cumsum(batches)
        self._starts = self._ends - batches
        self._places = lru_cache(maxsize=2)(self._make_places)
        self.batches_per_epoch = self.batches_once = (
            int(self._ends[-1]) if len(groups) else 0
        )

    @property
    def tokens_per_batch(self) -> float:
        """Labels on average over an epoch; what a dropped last batch would have held counts as if it came (it is a
        random one).
        """
        counts = self.pieces.counts
        taken = sum(min(g.batches * g.rows, g.end - g.begin) for g in self.groups)
        return self.pieces.labels * taken / int(counts.sum()) / self.batches_per_epoch

    @property
    def places_per_batch(self) -> float:
        return (
            sum(group.length * group.rows * group.batches for group in self.groups)
            / self.batches_per_epoch
        )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((group.rows, group.length) for group in self.groups)

    def batch_shape(self, k: int) -> tuple[int, int]:
        group, _ = self._place(k)
        return self.groups[group].rows, self.groups[group].length

    def batch(
        self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None
    ) -> Batch:
        return read_part(self, self._stretches(k, rows), columns)

    def tokens(self, k: int) -> int:
        return self._stretches(k, slice(None)).labels

    def _stretches(self, k: int, rows: slice) -> Stretches:
        number, index = self._place(k)
        group = self.groups[number]
        epoch = k // self.batches_per_epoch
        positions = index * group.rows + np.arange(group.rows)[rows]
        size = group.end - group.begin
        key = key_of(self.seed, "group", group.length, epoch)
        real = positions < size
        numbers = group.begin + permute(np.where(real, positions, 0), size, key)
        lengths = self.pieces.lengths(numbers) * real
        first = self.pieces.first[numbers].astype(np.int64)
        return arrange_rows(group.length, np.ones_like(lengths), first, lengths)

    def read(self, places: Stretches) -> Batch:
        return {"weights": places.weights(), **places.read(self.corpus)}

    def _place(self, k: int) -> tuple[int, int]:
        block, index = divmod(k, AHEAD)
        groups, indices = self._places(block)
        return int(groups[index]), int(indices[index])

    def _make_places(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = np.divmod(
            block * AHEAD + np.arange(AHEAD), self.batches_per_epoch
        )
        at = permute(
            indices, self.batches_per_epoch, keys_of(epochs, self.seed, "batches")
        )
        groups = np.searchsorted(self._ends, at, side="right")
        return groups, at - self._starts[groups]
