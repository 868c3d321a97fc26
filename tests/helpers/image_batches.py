"""Batches of made-up images, for tests of what any mesh makes of them."""

import numpy as np

from meshtrain.config import Config
from meshtrain.config.model import patches_of
from meshtrain.inputs import LABELS, MIX, OTHER_LABELS, PATCHES, WEIGHTS

Batch = dict[str, np.ndarray]


def image_batch(
    config: Config, seed: int = 0, mixed: bool = False, weighted: bool = False
) -> Batch:
    """A global batch of images with nothing special in them; `mixed` of two classes each, `weighted` as where some fill
    a batch up.
    """
    random, rows = np.random.default_rng(seed), config.train.global_batch_size

    def labels() -> np.ndarray:
        return random.integers(0, config.model.vocab_size, (rows, 1), np.int32)

    found = {
        PATCHES: random.standard_normal((rows, *patches_of(config.model)), np.float32),
        LABELS: labels(),
    }
    if mixed:
        found |= {OTHER_LABELS: labels(), MIX: random.random((rows, 1), np.float32)}
    if weighted:
        found[WEIGHTS] = (np.arange(rows)[:, None] % 3 != 2).astype(np.float32)
    return found
