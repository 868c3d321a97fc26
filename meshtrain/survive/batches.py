"""What a training process read, so that the batches of one run can be held against those of another: `log.batches`."""

import json
import zlib
from collections import deque
from collections.abc import Mapping

import numpy as np

from meshtrain.inputs import WEIGHTS, inputs
from meshtrain.survive.beat import Supervised


class BatchLog:
    """rank-R.batches.jsonl: of every step that is begun, the checksums of the rows that this process read, and where they lie in the batch.

    Rows that count nothing are left out: how many fill a batch up depends on the mesh.
    """

    def __init__(self, supervised: Supervised) -> None:
        self._file = supervised.own("batches.jsonl").open("a", buffering=1)
        self._ahead: deque[list[int]] = deque()  # of the batches that lie ready

    def add(self, batch: Mapping[str, np.ndarray]) -> None:
        """The next batch, on the loader's thread."""
        read = inputs(batch)
        weights = batch.get(WEIGHTS, np.ones((len(read), 1)))
        counts = weights.any(axis=1)
        self._ahead.append([zlib.crc32(row.tobytes()) for row in read[counts]])

    def write(self, step: int, first: int) -> None:
        """The batch that step takes, of which this process has the rows from `first` on."""
        self._file.write(json.dumps({"step": step, "first": first, "rows": self._ahead.popleft()}) + "\n")

    def close(self) -> None:
        self._file.close()
