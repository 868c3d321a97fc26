"""One global order of batches: which rows make up batch k, whatever the mesh, the process count or the history of the run."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshtrain.data.loader import Batch


class RowSource(Protocol):
    """The rows of an epoch, all of one length, in an order that is computed."""

    count: int  # rows of an epoch
    length: int  # tokens of a row
    labels: int  # real (not padded) labels of an epoch

    def empty(self, rows: int) -> Batch:
        """Arrays for a batch of padding."""
        ...

    def fill(self, batch: Batch, at: np.ndarray, epoch: int, positions: np.ndarray) -> None:
        """Writes to the rows `at` [N] of a batch what stands at the positions [N] of an epoch."""
        ...


@dataclass(frozen=True)
class RowBatches:
    """Batches of `size` rows of one source, epoch after epoch; the last of an epoch is dropped or padded with empty rows."""

    source: RowSource
    size: int
    pad: bool

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
        epoch, index = divmod(k, self.batches_per_epoch)
        positions = index * self.size + np.arange(self.size)[rows]
        batch = self.source.empty(len(positions))
        at = np.flatnonzero(positions < self.source.count)
        self.source.fill(batch, at, epoch, positions[at])
        return batch

    def describe(self) -> dict[str, Any]:
        return {
            "batches_per_epoch": self.batches_per_epoch,
            "tokens_per_batch": round(self.tokens_per_batch),
            "padding": round(1 - self.source.labels / (self.source.count * self.source.length), 4),
        }
