"""Batches whose rows a mesh cannot share, filled up at their end with empty rows of weight 0."""

from typing import Protocol

import numpy as np

from meshtrain.data.loader import Batch
from meshtrain.inputs import LABELS


class Batches(Protocol):
    """As `loader.Batches`, of rows [rows, T]."""

    def batch(self, k: int, rows: slice) -> Batch: ...

    def batch_shape(self, k: int) -> tuple[int, int]: ...


def filled(batches: Batches, k: int, rows: slice, total: int) -> Batch:
    """These rows of batch k, filled up to `total` rows. With real rows enough it is the batch itself, without `weights` of ours."""
    real, _ = batches.batch_shape(k)
    if real == total:
        return batches.batch(k, rows)
    begin, end, step = rows.indices(total)
    batch = batches.batch(k, slice(min(begin, real), min(end, real), step))
    missing = len(range(begin, end, step)) - len(batch[LABELS])
    # All processes must give the same arrays, those that hold no empty row too.
    batch = {"weights": np.ones(batch[LABELS].shape, np.float32), **batch}
    return {name: np.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for name, x in batch.items()}
