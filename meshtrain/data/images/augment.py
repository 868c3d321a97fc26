"""Augments images in training: crop or fit, flip, policy, shift, in this order; then mixup or cutmix with another
image.

    mixup     lam a + (1 - lam) b                     ┌────────┐
    cutmix    b in a box of a, here of a quarter:     │ a  ┌──┐│     mix, the share of a's class: lam, or a's share of
              sides sqrt(1 - lam), clipped at edges   │    │ b││     the area once the box is clipped
                                                      │    └──┘│
                                                      └────────┘
lam is drawn from Beta(alpha, alpha), for each row anew (mixup: Zhang et al. 2018, section 2; cutmix: Yun et al. 2019,
section 3).

The other image is that of the row beside it in the batch: 0 with 1, 2 with 3; the last of an odd number with the one
before. The order of an epoch is random already, so it is any image; and whoever reads a row nearly always reads the one
beside it too.

Everything is drawn from the stream of the image's row, so that it is the same wherever and whenever that row is read.
"""

import math

import numpy as np
from numpy.random import Generator

from meshtrain.config.images import ImagesConfig
from meshtrain.data.images.pixels import Box, as_image, as_pixels, fitted, resized

TRIES = 10  # crops that are drawn before one is taken from the middle
RATIO = (3 / 4, 4 / 3)  # width over height of a crop (Szegedy et al. 2015, section 6)


def changes(images: ImagesConfig) -> bool:
    """Returns whether images are changed at all, apart from being fitted."""
    return (
        images.crop < 1
        or images.flip > 0
        or images.policy != "none"
        or images.shift > 0
    )


def augmented(
    pixels: np.ndarray, images: ImagesConfig, size: int, draw: Generator
) -> np.ndarray:
    """An image uint8 [H, W, C] as training sees it, uint8 [size, size, C]."""
    if images.crop < 1:
        height, width, _ = pixels.shape
        pixels = resized(pixels, random_box(height, width, images.crop, draw), size)
    else:
        pixels = fitted(pixels, size, images.resize)
    if images.flip and draw.random() < images.flip:
        pixels = pixels[:, ::-1]
    if images.policy != "none":
        image = as_image(np.ascontiguousarray(pixels))
        # Pillow is there now.
        from meshtrain.data.images.policies import autoaugment, randaugment

        if images.policy == "autoaugment":
            pixels = as_pixels(autoaugment(image, draw))
        else:
            pixels = as_pixels(
                randaugment(image, draw, images.operations, images.magnitude)
            )
    if images.shift:
        down, right = (
            int(draw.random() * (2 * images.shift + 1)) - images.shift for _ in range(2)
        )
        pixels = shifted(pixels, down, right)
    return pixels


def random_box(height: int, width: int, least: float, draw: Generator) -> Box:
    """A part of at least this share of the area, about as wide as high; the largest in the middle where none that is
    drawn fits.
    """
    for _ in range(TRIES):
        area = height * width * (least + (1 - least) * draw.random())
        ratio = math.exp(
            math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * draw.random()
        )
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(draw.random() * (width - w + 1))
            top = int(draw.random() * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h


def shifted(pixels: np.ndarray, down: int, right: int) -> np.ndarray:
    """Moved by so many pixels, black where nothing is."""
    height, width, _ = pixels.shape
    moved = np.zeros_like(pixels)
    if abs(down) < height and abs(right) < width:
        moved[
            max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)
        ] = pixels[
            max(-down, 0) : height + min(-down, 0),
            max(-right, 0) : width + min(-right, 0),
        ]
    return moved


def mixes(images: ImagesConfig) -> bool:
    """Returns whether batches have a second class at all."""
    return bool(images.mixed and (images.mixup or images.cutmix))


def partners(rows: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The rows [N] that those of batches of `count` [N] rows are mixed with; a row alone with itself."""
    other = rows ^ 1
    return np.where(other < count, other, np.maximum(rows - 1, 0))


def mix(
    first: np.ndarray, second: np.ndarray, images: ImagesConfig, draw: Generator
) -> float:
    """Mixes an image [S, S, C] with another, in place; returns the share that is left of its class."""
    mixed = draw.random() < images.mixed
    cuts = draw.random() < images.switch
    if not mixed:
        return 1.0
    if images.cutmix and (cuts or not images.mixup):
        size = len(first)
        side = round(size * math.sqrt(1 - draw.beta(images.cutmix, images.cutmix)))
        top, left = (int(draw.random() * size) - side // 2 for _ in range(2))
        rows, columns = (slice(max(at, 0), min(at + side, size)) for at in (top, left))
        first[rows, columns] = second[rows, columns]
        return 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / size**2
    share = draw.beta(images.mixup, images.mixup)
    first *= np.float32(share)
    first += np.float32(1 - share) * second
    return share
