"""Source `synthetic`: random tokens from the seed, for benchmarks; nothing is read and nothing ends."""

import numpy as np

from meshtrain.data.loader import Batch
from meshtrain.data.permutation import key_of


class Synthetic:
    """Rows of uniform random tokens, row r of all rows a pure function of (seed, split, r)."""

    count = 1 << 40  # rows of an epoch: more than anyone asks for

    def __init__(self, vocab_size: int, length: int, seed: int, split: str) -> None:
        self.vocab_size, self.length = vocab_size, length
        self.labels = self.count * length
        self.key = key_of(seed, "synthetic", split)

    def plan(self, items: np.ndarray) -> np.ndarray:
        return items

    def read(self, plan: np.ndarray) -> Batch:
        drawn = np.empty((len(plan), self.length + 1), np.int32)
        for row, item in zip(drawn, plan.tolist(), strict=True):
            stream = np.random.Generator(np.random.Philox(key=[self.key, np.uint64(item)]))
            row[:] = stream.integers(0, self.vocab_size, self.length + 1, dtype=np.uint32)
        return {"tokens": drawn[:, :-1].copy(), "labels": drawn[:, 1:].copy()}
