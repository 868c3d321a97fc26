"""From the configuration to the batches of images of training and validation."""

import os
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config import Config
from meshtrain.config.rows import row_multiple
from meshtrain.data.batches import RowBatches
from meshtrain.data.images.arrays import has_arrays, open_arrays
from meshtrain.data.images.folders import NAMED, open_folder
from meshtrain.data.images.rows import ImageRows
from meshtrain.data.images.source import ImageSource, numbered
from meshtrain.data.split import SplitBatches
from meshtrain.errors import ConfigError, nearest, refusal, short
from meshtrain.sources import SOURCES, has_images

# How a sentence ends on a split with too few images.
WAYS_OUT = {
    "train": ".",
    "validation": "; hold out more with data.validation, give images of their own as data.validation_source, or set eval.every to 0.",
    "all": "; give more images as data.validation_source, or set eval.every to 0.",
}


@dataclass(frozen=True, repr=False)
class ImageBatches(SplitBatches):
    """The batches of one split of images, and the names of their classes by label.

    A batch has `patches` float32 [rows, N, P] and `labels` int32 [rows, 1]; where images are mixed also `labels_b` int32 [rows, 1] and
    `mix` float32 [rows, 1], the share of `labels`; and float32 `weights` [rows, 1] of the loss where some rows are empty (absent: all
    ones).
    """

    classes: tuple[str, ...]

    def describe(self) -> str:
        epoch = f"{self.batches_per_epoch:,} batches an epoch of {self.tokens_per_batch:,.0f} images"
        named = ", ".join(map(short, self.classes[:NAMED])) + (", ..." if len(self.classes) > NAMED else "")
        classes = f"{len(self.classes):,} classes" + (
            f" ({named})" if self.classes != numbered(len(self.classes)) else ""
        )
        return f"{self.source}: " + "; ".join((epoch, classes, *self.said))


def open_images(config: Config) -> tuple[ImageBatches, ImageBatches | None]:
    """Training and held-out batches; None if nothing is held out. Touches no device.

    Raises ConfigError (one sentence): a source that is not there or not whole, more classes than the model has, too few images.
    """
    data = config.data
    source = held = _open("data.source", data.source, config)
    train = _batches(config, source, "train")
    if data.validation_source is not None:
        held = _open("data.validation_source", data.validation_source, config)
        if unknown := [name for name in held.classes if name not in source.classes]:
            raise ConfigError(f"data.validation_source has a class {short(unknown[0])} that data.source has not.")
        if held.classes != source.classes[: len(held.classes)]:
            raise ConfigError(
                "data.validation_source has other classes than data.source, so that its labels mean others; give it a folder for each."
            )
    split = "all" if data.validation_source is not None else "validation"
    try:
        return train, _batches(config, held, split)
    except ConfigError as error:
        if config.eval.every:
            raise ConfigError(f"eval.every is {config.eval.every}, but of held-out images {error}") from None
        return train, None


def _open(key: str, name: str, config: Config) -> ImageSource:
    """Opens what a key names; ConfigError (one sentence) on bad input."""
    if name in SOURCES and (opens := SOURCES[name].images) is not None:
        source = opens(config)
    else:
        path = Path(os.path.expanduser(name))
        try:
            if not path.exists():
                words = list(filter(has_images, SOURCES))
                raise ConfigError(
                    f"{key} is '{short(name)}', but there is no such file or directory; it must be a folder with a folder for each class, "
                    f"arrays (.npz, or a folder of .npy) or {' or '.join(words)}" + (nearest(name, words) or ".")
                )
            if has_arrays(path):
                source = open_arrays(path, config)
            elif path.is_dir():
                source = open_folder(path, config)
            else:
                raise ConfigError(
                    f"{key} {short(name)} is a file, but none of arrays (.npz); give a folder with a folder for each class."
                )
        except OSError as error:
            raise ConfigError(f"{key} {short(name)} cannot be read: {refusal(error)}.") from None
    if len(source.classes) > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is less than the {len(source.classes):,} classes of {key} {short(name)}; give at least "
            f"{len(source.classes)}."
        )
    return source


def _batches(config: Config, source: ImageSource, split: str) -> ImageBatches:
    """The batches of a split; ConfigError if it has too few images."""
    size, count = config.train.global_batch_size, len(source.indices(split))
    purpose = f" for {split}" if split != "all" else ""
    if not count:
        raise ConfigError(f"{short(source.name)} holds no image{purpose}{WAYS_OUT[split]}")
    # Of held-out images none is left out: they are few, and what is said of them is said of all.
    pad = config.data.last == "pad" if split == "train" else count % size > 0
    batches = RowBatches(ImageRows(source, split, config, pad), size, pad)
    if not batches.batches_per_epoch:
        raise ConfigError(
            f"{short(source.name)} holds {count:,} images{purpose}, fewer than train.global_batch_size {size}; give a smaller batch, or "
            "data.last: pad."
        )
    said = source.said if split == "train" else ()
    digest = source.digest(split)[:16]
    return ImageBatches(batches, source.name, digest, source.classes, multiple=row_multiple(config), said=said)
