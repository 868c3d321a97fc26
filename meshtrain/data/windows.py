"""Batching `window`: rows of T labels that follow one another in the corpus, whatever documents they cut."""

import numpy as np

from meshtrain.data.loader import Batch
from meshtrain.data.permutation import key_of, permute
from meshtrain.data.shards import Corpus


class Windows:
    """The rows of an epoch: window w holds the labels [w T, (w + 1) T); with pad also the shorter last one.

    Keys of a batch: tokens, labels; with pad also weights (0 where nothing stands).
    """

    def __init__(self, corpus: Corpus, length: int, pad: bool, seed: int) -> None:
        self.corpus, self.length, self.pad, self.seed = corpus, length, pad, seed
        self.count = corpus.labels // length + (pad and corpus.labels % length > 0)
        self.labels = corpus.labels if pad else self.count * length  # an epoch's labels

    def empty(self, rows: int) -> Batch:
        """Arrays for a batch of padding."""
        shape = (rows, self.length)
        batch = {"tokens": np.zeros(shape, np.int32), "labels": np.zeros(shape, np.int32)}
        return {**batch, "weights": np.zeros(shape, np.float32)} if self.pad else batch

    def fill(self, batch: Batch, at: np.ndarray, epoch: int, positions: np.ndarray) -> None:
        """Writes to the rows `at` [N] of a batch what stands at the positions [N] of an epoch."""
        windows = permute(positions, self.count, key_of(self.seed, "windows", epoch))
        for row, window in zip(at.tolist(), windows.tolist(), strict=True):
            start = window * self.length
            n = min(self.length, self.corpus.labels - start)
            self.corpus.read(start, batch["tokens"][row, :n], batch["labels"][row, :n])
            if self.pad:
                batch["weights"][row, :n] = 1
