"""Source `synthetic` of images: random pixels from the seed, for benchmarks; nothing is read."""

import numpy as np

from meshtrain.config import Config
from meshtrain.data.images.source import ImageSource, held_out_share, numbered
from meshtrain.data.permutation import key_of

COUNT = 1 << 16  # images of an epoch


def synthetic_images(config: Config) -> ImageSource:
    classes = config.model.vocab_size
    splits = held_out_share(COUNT, 1 / 16)
    return ImageSource("synthetic", RandomPixels(config), splits, tuple(numbered(classes)), "")


class RandomPixels:
    """Image i and its class are a pure function of (seed, i)."""

    def __init__(self, config: Config) -> None:
        self.shape = (config.model.image_size, config.model.image_size, config.model.channels)
        self.key = key_of(config.run.seed, "synthetic images")
        stream = np.random.Generator(np.random.Philox(key=[self.key, np.uint64(COUNT)]))
        self.labels = stream.integers(0, config.model.vocab_size, COUNT, dtype=np.int32)

    def pixels(self, index: int) -> np.ndarray:
        stream = np.random.Generator(np.random.Philox(key=[self.key, np.uint64(index)]))
        return stream.integers(0, 256, self.shape, dtype=np.uint8)
