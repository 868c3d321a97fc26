"""The operations on one image that policies are made of (Cubuk et al. 2019, table 6), as Pillow computes them.

What goes further the greater the magnitude, from 0 to its last value: `share` of the way, a share from 0 to 1.

    shear_x, shear_y             0 .. 0.3 of the height or width        either way
    translate_x, translate_y     0 .. 150 / 331 of the width or height  either way
    rotate                       0 .. 30 degrees                        either way
    brightness, color,
    contrast, sharpness          0 .. 0.9 more or less than 1           either way
    posterize                    8 .. 4 bits of each number
    solarize                     from 256 .. 0 on, numbers are inverted
    autocontrast, equalize, invert, identity: no magnitude

150 / 331 is that of images of 331 pixels, of which the paper's table says 150. Where nothing is, pixels are black.
"""

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

SHEAR, TRANSLATE, DEGREES, ENHANCE, BITS = 0.3, 150 / 331, 30.0, 0.9, 4
Picture = Any  # PIL.Image.Image, of mode L or RGB


def _affine(image: Picture, *matrix: float) -> Picture:
    """matrix a, b, c, d, e, f: the pixel at (x, y) is what was at (a x + b y + c, d x + e y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def _shear_x(image: Picture, share: float, sign: int) -> Picture:
    return _affine(image, 1, sign * SHEAR * share, 0, 0, 1, 0)


def _shear_y(image: Picture, share: float, sign: int) -> Picture:
    return _affine(image, 1, 0, 0, sign * SHEAR * share, 1, 0)


def _translate_x(image: Picture, share: float, sign: int) -> Picture:
    return _affine(image, 1, 0, sign * int(TRANSLATE * share * image.width), 0, 1, 0)


def _translate_y(image: Picture, share: float, sign: int) -> Picture:
    return _affine(image, 1, 0, 0, 0, 1, sign * int(TRANSLATE * share * image.height))


def _rotate(image: Picture, share: float, sign: int) -> Picture:
    return image.rotate(sign * DEGREES * share, Image.Resampling.BILINEAR)


def _enhanced(by: Callable[[Picture], Any]) -> Callable[[Picture, float, int], Picture]:
    return lambda image, share, sign: by(image).enhance(1 + sign * ENHANCE * share)


def _posterize(image: Picture, share: float, sign: int) -> Picture:
    return ImageOps.posterize(image, 8 - round(BITS * share))


def _solarize(image: Picture, share: float, sign: int) -> Picture:
    return ImageOps.solarize(image, round(256 * (1 - share)))


OPERATIONS: dict[str, Callable[[Picture, float, int], Picture]] = {
    "identity": lambda image, share, sign: image,
    "autocontrast": lambda image, share, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, share, sign: ImageOps.equalize(image),
    "invert": lambda image, share, sign: ImageOps.invert(image),
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
    "rotate": _rotate,
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "posterize": _posterize,
    "solarize": _solarize,
}
