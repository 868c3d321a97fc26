"""The rows of an epoch of images: row p of epoch e is item e * count + p, and all that is random in it follows from the seed and that number."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.random import Generator, Philox

from meshtrain.config import Config
from meshtrain.config.model import positions_of
from meshtrain.data.images.augment import augmented, changes
from meshtrain.data.images.mixing import beside, mix, mixes
from meshtrain.data.images.pixels import fitted, patches, scaling
from meshtrain.data.images.source import ImageSource
from meshtrain.data.loader import Batch
from meshtrain.data.permutation import key_of, keys_of, permute
from meshtrain.inputs import LABELS, MIX, OTHER_LABELS, PATCHES

LARGE = 64  # pixels a side from which on several threads are faster than one: Pillow lets go of the interpreter while it works


class ImageRows:
    """The images of a split in a new order each epoch; of train as data.images has them changed.

    Keys of a batch: patches, labels; where images are mixed also labels_b, mix; with pad also weights (0 where no image is).
    """

    def __init__(self, source: ImageSource, split: str, config: Config, pad: bool) -> None:
        self.images, self.model, self.seed = config.data.images, config.model, config.run.seed
        self.pictures, self.indices = source.pictures, source.indices(split)
        self.count = self.labels = len(self.indices)
        self.length, self.size, self.pad = positions_of(config.model), config.train.global_batch_size, pad
        training = split == "train"
        self.changes, self.mixes = training and changes(self.images), training and mixes(self.images)
        self.factor, self.term = scaling(self.images.mean, self.images.std, self.model.channels)

    def locate(self, items: np.ndarray) -> np.ndarray:
        return items

    def read(self, places: np.ndarray) -> Batch:
        items, own = places, np.arange(len(places))
        if self.mixes:
            items, found = np.unique(np.concatenate([places, self._beside(places)]), return_inverse=True)
            own, other = found[: len(places)], found[len(places) :]
        epochs, positions = np.divmod(items, self.count)
        indices = self.indices[permute(positions, self.count, keys_of(epochs, self.seed, "images"))]
        classes = self.pictures.labels[indices].astype(np.int32)[:, None]
        images = self._images(items, indices)
        batch: Batch = {LABELS: classes[own]}
        if self.mixes:
            all_of_them, images = images, images[own]
            shares = [
                mix(image, all_of_them[o], self.images, self._stream("mix", item))
                for image, o, item in zip(images, other.tolist(), places.tolist(), strict=True)
            ]
            batch |= {OTHER_LABELS: classes[other], MIX: np.array(shares, np.float32)[:, None]}
        batch[PATCHES] = patches(images, self.model.patch_size)
        return {**batch, "weights": np.ones((len(places), 1), np.float32)} if self.pad else batch

    def _beside(self, items: np.ndarray) -> np.ndarray:
        """The items that these are mixed with: of the same batch, whatever part of it is read here."""
        positions = items % self.count
        rows = positions % self.size
        first = positions - rows
        return items - rows + beside(rows, np.minimum(self.count - first, self.size))

    def _images(self, items: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Normalised, float32 [N, S, S, C]."""
        size = self.model.image_size
        pixels = np.empty((len(items), size, size, self.model.channels), np.uint8)
        pairs = list(zip(items.tolist(), indices.tolist(), strict=True))
        made: Iterable[np.ndarray]
        made = self._threads.map(self._image, pairs) if size >= LARGE and len(pairs) > 1 else map(self._image, pairs)
        for place, image in enumerate(made):
            pixels[place] = image
        images = pixels * self.factor
        images += self.term
        return images

    def _image(self, pair: tuple[int, int]) -> np.ndarray:
        """uint8 [S, S, C] of an item, which is the image of this index."""
        item, index = pair
        pixels = self.pictures.pixels(index)
        if not self.changes:
            return fitted(pixels, self.model.image_size, self.images.resize)
        return augmented(pixels, self.images, self.model.image_size, self._stream("augment", item))

    def _stream(self, purpose: str, item: int) -> Generator:
        return Generator(Philox(key=np.array([self._keys[purpose], item], np.uint64)))

    @cached_property
    def _keys(self) -> dict[str, np.uint64]:
        return {purpose: key_of(self.seed, "images", purpose) for purpose in ("augment", "mix")}

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "meshtrain-images")
