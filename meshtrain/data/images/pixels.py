"""Pixels as they lie in memory: channels, sizes, patches; and Pillow, which changes them.

    an image, uint8 [S, S, C]                    its patches, float32 [N, P]

       p     p                                   0: a's pixels row by row, each with its channels
    ┌─────┬─────┐                                1: b's
    │  a  │  b  │ p                              2: c's
    ├─────┼─────┤          ── patches ──►        3: d's
    │  c  │  d  │ p
    └─────┴─────┘                                N = (S / p)^2, P = p x p x C

Each patch becomes one place of the sequence.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from meshtrain.errors import ConfigError, not_installed

# The weights of red, green and blue in grey (ITU-R BT.601), of 2^16, as Pillow has it.
GREY = np.array([19595, 38470, 7471], np.uint32)
Box = tuple[float, float, float, float]  # left, top, right, bottom


def pillow(why: str) -> ModuleType:
    """Imports PIL.Image (extra `vision`); ConfigError, which begins with `why` (resizing images), where it is not
    installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise not_installed(f"{why} needs the Pillow library", "vision") from None
    return Image


def check_channels(have: int, wanted: int, name: str) -> None:
    """ConfigError where the images of a source have channels that `convert_channels` cannot turn into the model's."""
    if not (have == wanted or have == 1 or (have in (3, 4) and wanted in (1, 3))):
        raise ConfigError(
            f"{name} has images of {have} channels, but model.channels is {wanted}; give {have}."
        )


def convert_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """uint8 [..., C] in other channels: grey is repeated, colours are weighed to grey, alpha is left out."""
    have = pixels.shape[-1]
    if have == channels:
        return pixels
    if have == 1:
        return np.repeat(pixels, channels, -1)
    if channels == 1:
        return ((pixels[..., :3] @ GREY + 0x8000) >> 16).astype(np.uint8)[..., None]
    return pixels[..., :channels]


def fitted(pixels: np.ndarray, size: int, how: str) -> np.ndarray:
    """An image of any size as uint8 [size, size, C]; how: crop (the square in the middle) or stretch."""
    height, width, _ = pixels.shape
    if how == "stretch":
        return resized(pixels, (0, 0, width, height), size)
    side = min(height, width)
    left = (width - side) // 2
    top = (height - side) // 2
    return resized(pixels, (left, top, left + side, top + side), size)


def resized(pixels: np.ndarray, box: Box, size: int) -> np.ndarray:
    """The pixels in the box as uint8 [size, size, C]: bilinear, and where it becomes smaller the mean over what a pixel
    covers.
    """
    height, width, channels = pixels.shape
    if (height, width) == (size, size) and box == (0, 0, size, size):
        return pixels
    image = pillow("resizing images")
    if channels not in (1, 3):
        return np.concatenate(
            [resized(pixels[..., c : c + 1], box, size) for c in range(channels)], -1
        )
    return as_pixels(
        as_image(pixels).resize((size, size), image.Resampling.BILINEAR, box=box)
    )


def as_image(pixels: np.ndarray):  # type: ignore[no-untyped-def]
    """uint8 [H, W, C] of 1 or 3 channels as Pillow has it."""
    return pillow("changing images").fromarray(
        pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    )


def as_pixels(image: object) -> np.ndarray:
    """A grey or red, green, blue image of Pillow's as uint8 [H, W, C]."""
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def scaling(
    mean: Sequence[float], std: Sequence[float], channels: int
) -> tuple[np.ndarray, np.ndarray]:
    """float32 [C] each: (pixel / 255 - mean) / std is pixel * factor + term."""
    means, stds = (
        np.broadcast_to(np.array(values or (0.5,), np.float64), channels)
        for values in (mean, std)
    )
    return (1 / (255 * stds)).astype(np.float32), (-means / stds).astype(np.float32)


def patches(images: np.ndarray, patch: int) -> np.ndarray:
    """[B, S, S, C] as [B, N, P]; a patch's numbers in the order row, column, channel."""
    rows, size, _, channels = images.shape
    n = size // patch
    cut = images.reshape(rows, n, patch, n, patch, channels).swapaxes(2, 3)
    return cut.reshape(rows, n * n, patch * patch * channels)


def unpatched(cut: np.ndarray, patch: int) -> np.ndarray:
    """The inverse of `patches`: [B, N, P] as [B, S, S, C]."""
    rows, count, numbers = cut.shape
    n = round(count**0.5)
    channels = numbers // patch**2
    return (
        cut.reshape(rows, n, n, patch, patch, channels)
        .swapaxes(2, 3)
        .reshape(rows, n * patch, n * patch, channels)
    )
