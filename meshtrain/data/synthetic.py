"""Source `synthetic`: random tokens from the seed, for benchmarks; nothing is read and nothing ends."""

import numpy as np

from meshtrain.config import Config
from meshtrain.data.loader import Batch
from meshtrain.data.permutation import key_of


class SyntheticRows:
    """Rows of uniform random tokens, row r of all rows a pure function of (seed, split, r)."""

    count = 1 << 40  # rows of an epoch: more than anyone asks for

    def __init__(self, config: Config, split: str) -> None:
        self.vocab_size, self.length = config.model.vocab_size, config.train.sequence_length
        self.labels = self.count * self.length
        self.key = key_of(config.run.seed, "synthetic", split)

    def locate(self, items: np.ndarray) -> np.ndarray:
        return items

    def read(self, places: np.ndarray) -> Batch:
        drawn = np.empty((len(places), self.length + 1), np.int32)
        for row, item in zip(drawn, places.tolist(), strict=True):
            stream = np.random.Generator(np.random.Philox(key=[self.key, np.uint64(item)]))
            row[:] = stream.integers(0, self.vocab_size, self.length + 1, dtype=np.uint32)
        return {"tokens": drawn[:, :-1].copy(), "labels": drawn[:, 1:].copy()}
