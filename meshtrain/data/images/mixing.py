"""Mixup (Zhang et al. 2018, section 2) and cutmix (Yun et al. 2019, section 3): an image with a part of another, and both classes.

    mixup     lam a + (1 - lam) b                     ┌────────┐
    cutmix    b in a box of a, here of a quarter:     │ a  ┌──┐│     mix, the share of a's class: lam, or what of the area
              sides sqrt(1 - lam), clipped at edges   │    │ b││     is a's once the box is clipped
                                                      │    └──┘│
                                                      └────────┘
lam is drawn from Beta(alpha, alpha), for each row anew.

The other image is that of the row beside it in the batch: 0 with 1, 2 with 3; the last of an odd number with the one before. The order of
an epoch is random already, so it is any image; and whoever reads a row nearly always reads the one beside it too.
"""

import math

import numpy as np
from numpy.random import Generator

from meshtrain.config.images import ImagesConfig


def mixes(images: ImagesConfig) -> bool:
    """Whether batches have a second class at all."""
    return bool(images.mixed and (images.mixup or images.cutmix))


def beside(rows: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The rows [N] that those of batches of `count` [N] rows are mixed with; itself where it is alone."""
    other = rows ^ 1
    return np.where(other < count, other, np.maximum(rows - 1, 0))


def mix(first: np.ndarray, second: np.ndarray, images: ImagesConfig, draw: Generator) -> float:
    """Mixes an image [S, S, C] with another, in place; the share that is left of its class."""
    mixed, cuts = draw.random() < images.mixed, draw.random() < images.switch
    if not mixed:
        return 1.0
    if images.cutmix and (cuts or not images.mixup):
        return _paste(first, second, draw.beta(images.cutmix, images.cutmix), draw)
    share = draw.beta(images.mixup, images.mixup)
    first *= np.float32(share)
    first += np.float32(1 - share) * second
    return share


def _paste(first: np.ndarray, second: np.ndarray, share: float, draw: Generator) -> float:
    size = len(first)
    side = round(size * math.sqrt(1 - share))
    top, left = (int(draw.random() * size) - side // 2 for _ in range(2))
    rows, columns = (slice(max(at, 0), min(at + side, size)) for at in (top, left))
    first[rows, columns] = second[rows, columns]
    return 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / size**2
