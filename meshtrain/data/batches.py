"""One global order of batches: which rows make up batch k, whatever the mesh, the process count or the history of the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from meshtrain.data.loader import Batch

# Planned at a time, at most: a call of numpy costs as much as a hundred rows, and a plan needs a hundred calls.
AHEAD_BATCHES, AHEAD_LABELS = 32, 1 << 20


class RowSource(Protocol):
    """The rows of an epoch, all of one length, in an order that is computed; row p of epoch e is the source's item e * count + p."""

    count: int  # rows of an epoch
    length: int  # tokens of a row
    labels: int  # real (not padded) labels of an epoch

    def plan(self, items: np.ndarray) -> Any:
        """Where the rows of these items [N] lie; `plan[a:b]` is that of rows a .. b."""
        ...

    def read(self, plan: Any) -> Batch:
        """The rows of a plan."""
        ...


@dataclass(frozen=True)
class Part:
    """The rows `at` of a batch, all of one source."""

    source: RowSource
    plan: Any
    at: np.ndarray


class Ahead:
    """Batches of `size` rows of several sources, planned many at a time.

    choose: (batch numbers [B, 1], rows of a batch [R]) -> (which source, which of its items) for each row, int64 [B, R] each;
    source -1: the row is padding.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        size: int,
        choose: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.sources, self.size, self.choose = list(sources), size, choose
        self._plans = lru_cache(maxsize=2)(self._make_plans)

    def batch(self, k: int, rows: slice) -> Batch:
        """These rows of batch k."""
        begin, end, step = rows.indices(self.size)
        taken = len(range(begin, end, step))
        many = min(AHEAD_LABELS // max(taken * self.sources[0].length, 1), AHEAD_BATCHES) or 1
        parts = self._plans(k // many, many, begin, end, step)[k % many]
        read = [part.source.read(part.plan) for part in parts]
        if len(parts[0].at) == taken:
            return read[0]
        batch = {name: np.zeros((taken, *x.shape[1:]), x.dtype) for name, x in read[0].items()}
        for part, found in zip(parts, read, strict=True):
            for name, x in found.items():
                batch[name][part.at] = x
        return batch

    def _make_plans(self, block: int, many: int, begin: int, end: int, step: int) -> list[list[Part]]:
        """The parts of each of `many` batches: no empty one, but for a batch without any row."""
        rows = np.arange(begin, end, step)
        sources, items = self.choose((block * many + np.arange(many))[:, None], rows)
        parts: list[list[Part]] = [[] for _ in range(many)]
        for number, source in enumerate(self.sources):
            theirs = sources == number
            plan, ends = source.plan(items[theirs]), np.cumsum(theirs.sum(1)).tolist()
            for held, here, first, last in zip(parts, theirs, [0, *ends], ends, strict=False):
                held.append(Part(source, plan[first:last], np.flatnonzero(here)))
        return [[part for part in held if len(part.at)] or held[:1] for held in parts]


class RowBatches:
    """Batches of `size` rows of one source, epoch after epoch; the last of an epoch is dropped or padded with empty rows."""

    def __init__(self, source: RowSource, size: int, pad: bool) -> None:
        self.source, self.size, self.pad = source, size, pad
        self._ahead = Ahead([source], size, self._choose)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.source.count // self.size) if self.pad else self.source.count // self.size

    @property
    def tokens_per_batch(self) -> float:
        kept = 1 if self.pad else self.batches_per_epoch * self.size / self.source.count
        return self.source.labels * kept / self.batches_per_epoch

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.size, self.source.length),)

    def batch_shape(self, k: int) -> tuple[int, int]:
        return self.size, self.source.length

    def batch(self, k: int, rows: slice = slice(None)) -> Batch:
        return self._ahead.batch(k, rows)

    def _choose(self, ks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = np.divmod(ks, self.batches_per_epoch)
        positions = indices * self.size + rows
        return np.where(positions < self.source.count, 0, -1), epochs * self.source.count + positions

    def describe(self) -> dict[str, Any]:
        return {
            "batches_per_epoch": self.batches_per_epoch,
            "tokens_per_batch": round(self.tokens_per_batch),
            "padding": round(1 - self.source.labels / (self.source.count * self.source.length), 4),
        }
