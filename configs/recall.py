"""Source `recall`: rows in which what is asked lies far back.

A row is a table of keys with a value each, then questions and their answers:

    key:value of each key, in random order        key? value  key? value  key? value  ...

An item of the table is one token, so that a question needs one look back. Answers alone count in the loss: log 8 = 2.08
for who guesses.
"""

from typing import Any

import numpy as np

from meshtrain.config import Config
from meshtrain.data.permutation import key_of
from meshtrain.sources import SOURCES, SourceKind

# ids: the values, a question for each key, then the items of the table
VALUES, KEYS = 8, 16


class RecallRows:
    """Row r of all rows is a function of (seed, split, r), as `meshtrain.data.batches.EpochRows` asks."""

    count = 1 << 40

    def __init__(self, config: Config, split: str) -> None:
        self.length, self.key = (
            config.train.sequence_length,
            key_of(config.run.seed, "recall", split),
        )
        self.labels = self.count * self.length

    def locate(self, items: np.ndarray) -> np.ndarray:
        return items

    def read(self, places: np.ndarray) -> dict[str, Any]:
        rows = np.empty((len(places), self.length + 1), np.int32)
        for row, item in zip(rows, places.tolist(), strict=True):
            draw = np.random.Generator(
                np.random.Philox(key=[self.key, np.uint64(item)])
            )
            values, asked = (
                draw.integers(0, VALUES, KEYS),
                draw.integers(0, KEYS, self.length),
            )
            table = VALUES + KEYS + np.arange(KEYS) * VALUES + values
            answered = np.stack([VALUES + asked, values[asked]], axis=1).reshape(-1)
            row[:] = np.append(draw.permutation(table), answered)[: len(row)]
        labels = rows[:, 1:].copy()
        return {
            "tokens": rows[:, :-1].copy(),
            "labels": labels,
            "weights": (labels < VALUES).astype(np.float32),
        }


SOURCES.register(SourceKind("recall", rows=RecallRows))
