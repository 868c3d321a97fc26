"""What a source of images is, once it is open."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshtrain.data.permutation import key_of, permute

HELD_OUT = 0.01  # where data.validation is null


class Pictures(Protocol):
    """Images by their number, each with a class; of any size, in the model's channels."""

    labels: np.ndarray  # int32 [n]

    def pixels(self, index: int) -> np.ndarray:
        """uint8 [H, W, C]."""
        ...


@dataclass(frozen=True)
class ImageSource:
    """All images of a source, and which of them are of which split."""

    name: str
    pictures: Pictures
    splits: dict[str, np.ndarray]  # train, validation: numbers of images, int64
    classes: tuple[str, ...]  # by label
    content: str  # names what the images are, wherever they lie; empty if nothing is read
    said: tuple[str, ...] = ()

    def indices(self, split: str) -> np.ndarray:
        """Numbers of the images of train, validation or all."""
        return np.concatenate(list(self.splits.values())) if split == "all" else self.splits[split]

    def digest(self, split: str) -> str:
        """Equal digests, equal images with equal classes in the same order."""
        if not self.content:
            return ""
        told = hashlib.sha256("\0".join((self.content, *self.classes)).encode())
        told.update(self.indices(split).astype("<i8").tobytes())
        return told.hexdigest()


def held_out_share(count: int, share: float) -> dict[str, np.ndarray]:
    """Splits of images that have no names: a share of them, the same whenever there are so many."""
    order = permute(np.arange(count), count, key_of("held out", count))
    held = round(count * share)
    return {"train": np.sort(order[held:]), "validation": np.sort(order[:held])}


def numbered(classes: int) -> Sequence[str]:
    """Names of classes that have none."""
    return tuple(map(str, range(classes)))
