"""From the configuration to the batches of images of training and validation, and the rows that they are made of.

Row p of epoch e is item e * count + p, and all that is random in it follows from the seed and that number.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.random import Generator, Philox

from meshtrain.config import Config
from meshtrain.config.follow import row_multiple
from meshtrain.config.model import positions_of
from meshtrain.data.batches import RowBatches, SplitBatches, few
from meshtrain.data.images.augment import augmented, changes, mix, mixes, partners
from meshtrain.data.images.folders import NAMED, open_folder
from meshtrain.data.images.image_sources import (
    ImageSource,
    has_arrays,
    numbered,
    open_arrays,
)
from meshtrain.data.images.pixels import fitted, patches, scaling
from meshtrain.data.loader import Batch
from meshtrain.data.permutation import key_of, keys_of, permute
from meshtrain.errors import ConfigError, nearest, refusal, short
from meshtrain.files import refuse_passing
from meshtrain.inputs import LABELS, MIX, OTHER_LABELS, PATCHES, WEIGHTS
from meshtrain.sources import SOURCES, has_images

# pixels a side from which on several threads are faster than one: Pillow lets go of the interpreter while it works
LARGE = 64
# How a sentence ends on a split with too few images.
WAYS_OUT = {
    "train": ".",
    "validation": "; hold out more with data.validation, give images of their own as data.validation_source, or set "
    "eval.every to 0.",
    "all": "; give more images as data.validation_source, or set eval.every to 0.",
}


@dataclass(frozen=True, repr=False)
class ImageBatches(SplitBatches):
    """The batches of one split of images, and the names of their classes by label.

    A batch has `patches` float32 [rows, N, P] and `labels` int32 [rows, 1]; where images are mixed also `labels_b`
    int32 [rows, 1] and `mix` float32 [rows, 1], the share of `labels`; and float32 `weights` [rows, 1] of the loss
    where some rows are padding (absent: all ones).
    """

    classes: tuple[str, ...]

    def describe(self) -> str:
        epoch = f"{self.batches_per_epoch:,} batches an epoch of {self.tokens_per_batch:,.0f} images"
        names = ", ".join(map(short, self.classes[:NAMED])) + (
            ", ..." if len(self.classes) > NAMED else ""
        )
        names = f" ({names})" if self.classes != numbered(len(self.classes)) else ""
        return f"{self.source}: " + "; ".join(
            (epoch, f"{len(self.classes):,} classes{names}", *self.notes)
        )


def open_images(config: Config) -> tuple[ImageBatches, ImageBatches | None]:
    """Opens training and validation batches; None if nothing is held out. Touches no device.

    Raises ConfigError (one sentence): a source that is not there or not whole, more classes than the model has, too few
    images.
    """
    data = config.data
    source = validation = _open("data.source", data.source, config)
    train = _batches(config, source, "train")
    if data.validation_source is not None:
        validation = _open("data.validation_source", data.validation_source, config)
        if unknown := [
            name for name in validation.classes if name not in source.classes
        ]:
            raise ConfigError(
                f"data.validation_source has a class {short(unknown[0])} that data.source has not."
            )
        if validation.classes != source.classes[: len(validation.classes)]:
            raise ConfigError(
                "data.validation_source has other classes than data.source, so that its labels mean others; give it a "
                "folder for each."
            )
    try:
        return train, _batches(
            config,
            validation,
            "validation" if data.validation_source is None else "all",
        )
    except ConfigError as error:
        if config.eval.every:
            raise ConfigError(
                f"eval.every is {config.eval.every}, but of held-out images {error}"
            ) from None
        return train, None


def _open(key: str, name: str, config: Config) -> ImageSource:
    if name in SOURCES and (opens := SOURCES[name].images) is not None:
        source = opens(config)
    else:
        path = Path(os.path.expanduser(name))
        try:
            if not path.exists():
                words = list(filter(has_images, SOURCES))
                raise ConfigError(
                    f"{key} is '{short(name)}', but there is no such file or directory; it must be a folder with a "
                    "folder for each class, "
                    f"arrays (.npz, or a folder of .npy) or {' or '.join(words)}"
                    + (nearest(name, words) or ".")
                )
            if has_arrays(path):
                source = open_arrays(path, config)
            elif path.is_dir():
                source = open_folder(path, config)
            else:
                raise ConfigError(
                    f"{key} {short(name)} is a file, but none of arrays (.npz); give a folder with a folder for each "
                    "class."
                )
        except OSError as error:
            refuse_passing(error.filename or name, error)
            raise ConfigError(
                f"{key} {short(name)} cannot be read: {refusal(error)}."
            ) from None
    if len(source.classes) > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is less than the {len(source.classes):,} classes of {key} "
            f"{short(name)}; give at least "
            f"{len(source.classes)}."
        )
    return source


def _batches(config: Config, source: ImageSource, split: str) -> ImageBatches:
    size = config.train.global_batch_size
    count = len(source.indices(split))
    if not count:
        purpose = f" for {split}" if split != "all" else ""
        raise ConfigError(
            f"{short(source.name)} holds no image{purpose}{WAYS_OUT[split]}"
        )
    if split == "train":
        pad = config.data.last == "pad" or count < size
        notes = (*source.notes, *(few(size) if count < size else ()))
    else:
        # No validation image is left out: they are few, and what is logged of them is of all.
        pad = count % size > 0
        notes = ()
    batches = RowBatches(ImageRows(source, split, config, pad), size, pad)
    digest = source.digest(split)[:16]
    return ImageBatches(
        batches,
        source.name,
        digest,
        source.classes,
        multiple=row_multiple(config),
        notes=notes,
    )


class ImageRows:
    """The images of a split in a new order each epoch; those of train are changed as data.images says.

    Keys of a batch: patches, labels; where images are mixed also labels_b, mix; with pad also weights (0 where no image
    is).
    """

    def __init__(
        self,
        source: ImageSource,
        split: str,
        config: Config,
        pad: bool,
    ) -> None:
        self.images = config.data.images
        self.model = config.model
        self.seed = config.run.seed
        self.pictures = source.pictures
        self.indices = source.indices(split)
        self.count = self.labels = len(self.indices)
        self.length = positions_of(config.model)
        self.size = config.train.global_batch_size
        self.pad = pad
        training = split == "train"
        self.changes, self.mixes = (
            training and changes(self.images),
            training and mixes(self.images),
        )
        self.factor, self.term = scaling(
            self.images.mean, self.images.std, self.model.channels
        )
        self._keys = {
            purpose: key_of(self.seed, "images", purpose)
            for purpose in ("augment", "mix")
        }

    def locate(self, items: np.ndarray) -> np.ndarray:
        return items

    def read(self, places: np.ndarray) -> Batch:
        items = places
        own = np.arange(len(places))
        if self.mixes:
            items, which = np.unique(
                np.concatenate([places, self._partners(places)]), return_inverse=True
            )
            own = which[: len(places)]
            other = which[len(places) :]
        epochs, positions = np.divmod(items, self.count)
        indices = self.indices[
            permute(positions, self.count, keys_of(epochs, self.seed, "images"))
        ]
        classes = self.pictures.labels[indices].astype(np.int32)[:, None]
        images = self._images(items, indices)
        batch: Batch = {LABELS: classes[own]}
        if self.mixes:
            partners_of = images[other]
            images = images[own]
            shares = [
                mix(image, partner, self.images, self._stream("mix", item))
                for image, partner, item in zip(
                    images, partners_of, places.tolist(), strict=True
                )
            ]
            batch |= {
                OTHER_LABELS: classes[other],
                MIX: np.array(shares, np.float32)[:, None],
            }
        batch[PATCHES] = patches(images, self.model.patch_size)
        if self.pad:
            return {**batch, WEIGHTS: np.ones((len(places), 1), np.float32)}
        return batch

    def _partners(self, items: np.ndarray) -> np.ndarray:
        """The items that these are mixed with: of the same batch, whatever part of it is read here."""
        positions = items % self.count
        rows = positions % self.size
        first = positions - rows
        return items - rows + partners(rows, np.minimum(self.count - first, self.size))

    def _images(self, items: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Normalized, float32 [N, S, S, C]."""
        size = self.model.image_size
        pixels = np.empty((len(items), size, size, self.model.channels), np.uint8)
        pairs = list(zip(items.tolist(), indices.tolist(), strict=True))
        outputs: Iterable[np.ndarray]
        outputs = (
            self._threads.map(self._image, pairs)
            if size >= LARGE and len(pairs) > 1
            else map(self._image, pairs)
        )
        for place, image in enumerate(outputs):
            pixels[place] = image
        images = pixels * self.factor
        images += self.term
        return images

    def _image(self, pair: tuple[int, int]) -> np.ndarray:
        """uint8 [S, S, C] of (item, index of its image)."""
        item, index = pair
        pixels = self.pictures.pixels(index)
        if not self.changes:
            return fitted(pixels, self.model.image_size, self.images.resize)
        return augmented(
            pixels, self.images, self.model.image_size, self._stream("augment", item)
        )

    def _stream(self, purpose: str, item: int) -> Generator:
        return Generator(Philox(key=np.array([self._keys[purpose], item], np.uint64)))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "meshtrain-images")
