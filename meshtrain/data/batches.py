"""One global order of batches: which rows make up batch k, whatever the mesh, the process count or the history of the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from meshtrain.data.loader import Batch

# Located at a time, at most: a call of numpy costs as much as a hundred rows, and it takes a hundred calls.
AHEAD_BATCHES, AHEAD_LABELS = 32, 1 << 20


class EpochRows(Protocol):
    """The rows of an epoch, all of one length, in an order that is computed; row p of epoch e is item e * count + p."""

    count: int  # rows of an epoch
    length: int  # tokens of a row
    labels: int  # real (not padded) labels of an epoch

    def locate(self, items: np.ndarray) -> Any:
        """Where the rows of these items [N] lie; `[a:b]` of it is where rows a .. b do."""
        ...

    def read(self, places: Any) -> Batch:
        """The rows that lie there."""
        ...


@dataclass(frozen=True)
class Portion:
    """The rows `at` of a batch, all of one source, and where they lie."""

    rows: EpochRows
    places: Any
    at: np.ndarray


class Ahead:
    """Batches of `size` rows of several sources, located many at a time.

    choose: (batch numbers [B, 1], rows of a batch [R]) -> (which source, which of its items) for each row, int64 [B, R] each;
    source -1: the row is padding.
    """

    def __init__(
        self,
        sources: Sequence[EpochRows],
        size: int,
        choose: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.sources, self.size, self.choose = list(sources), size, choose
        self._located = lru_cache(maxsize=2)(self._locate)

    def batch(self, k: int, rows: slice) -> Batch:
        """These rows of batch k."""
        begin, end, step = rows.indices(self.size)
        taken = len(range(begin, end, step))
        many = min(AHEAD_LABELS // max(taken * self.sources[0].length, 1), AHEAD_BATCHES) or 1
        portions = self._located(k // many, many, begin, end, step)[k % many]
        read = [portion.rows.read(portion.places) for portion in portions]
        if len(portions[0].at) == taken:
            return read[0]
        batch = {name: np.zeros((taken, *x.shape[1:]), x.dtype) for name, x in read[0].items()}
        for portion, found in zip(portions, read, strict=True):
            for name, x in found.items():
                batch[name][portion.at] = x
        return batch

    def _locate(self, block: int, many: int, begin: int, end: int, step: int) -> list[list[Portion]]:
        """The portions of each of `many` batches: no empty one, but for a batch without any row."""
        rows = np.arange(begin, end, step)
        sources, items = self.choose((block * many + np.arange(many))[:, None], rows)
        portions: list[list[Portion]] = [[] for _ in range(many)]
        for number, source in enumerate(self.sources):
            theirs = sources == number
            places, ends = source.locate(items[theirs]), np.cumsum(theirs.sum(1)).tolist()
            for held, here, first, last in zip(portions, theirs, [0, *ends], ends, strict=False):
                held.append(Portion(source, places[first:last], np.flatnonzero(here)))
        return [[portion for portion in held if len(portion.at)] or held[:1] for held in portions]


class RowBatches:
    """Batches of `size` rows, epoch after epoch; the last of an epoch is dropped or padded with empty rows."""

    def __init__(self, rows: EpochRows, size: int, pad: bool) -> None:
        self.rows, self.size, self.pad = rows, size, pad
        self.shapes = ((size, rows.length),)
        self.places_per_batch = size * rows.length
        self._ahead = Ahead([rows], size, self._choose)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.rows.count // self.size) if self.pad else self.rows.count // self.size

    @property
    def tokens_per_batch(self) -> float:
        kept = 1 if self.pad else self.batches_per_epoch * self.size / self.rows.count
        return self.rows.labels * kept / self.batches_per_epoch

    def batch_shape(self, k: int) -> tuple[int, int]:
        return self.shapes[0]

    def batch(self, k: int, rows: slice = slice(None)) -> Batch:
        return self._ahead.batch(k, rows)

    def _choose(self, ks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = np.divmod(ks, self.batches_per_epoch)
        positions = indices * self.size + rows
        return np.where(positions < self.rows.count, 0, -1), epochs * self.rows.count + positions
