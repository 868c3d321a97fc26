"""Batching `window`: rows of T labels that follow one another in the corpus, whatever documents they cut."""

import numpy as np

from meshtrain.data.loader import Batch
from meshtrain.data.permutation import keys_of, permute
from meshtrain.data.shards import Corpus
from meshtrain.data.stretches import Stretches, in_rows


class Windows:
    """The rows of an epoch: window w holds the labels [w T, (w + 1) T); with pad also the shorter last one.

    Keys of a batch: tokens, labels; with pad also weights (0 where nothing stands).
    """

    def __init__(self, corpus: Corpus, length: int, pad: bool, seed: int) -> None:
        self.corpus, self.length, self.pad, self.seed = corpus, length, pad, seed
        self.count = corpus.labels // length + (pad and corpus.labels % length > 0)
        self.labels = corpus.labels if pad else self.count * length  # an epoch's labels

    def locate(self, items: np.ndarray) -> Stretches:
        epochs, positions = np.divmod(items, self.count)
        first = permute(positions, self.count, keys_of(epochs, self.seed, "windows")) * self.length
        return in_rows(self.length, *self.corpus.cut(first, np.minimum(self.length, self.corpus.labels - first)))

    def read(self, places: Stretches) -> Batch:
        batch = places.read(self.corpus)
        return {**batch, "weights": places.weights()} if self.pad else batch
