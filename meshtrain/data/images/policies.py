"""RandAugment and AutoAugment: which operations an image gets, and the operations as Pillow computes them.

RandAugment (Cubuk et al. 2020, section 3): N of the 14 operations, drawn anew for each image, all of one magnitude M of
30.

AutoAugment (Cubuk et al. 2019, appendix, table 9): the policy that was found on ImageNet, 25 pairs of operations. An
image gets one pair; each of its operations has a probability and a magnitude from 0 to 9.

The operations are those of Cubuk et al. 2019, table 6. An operation that grows with the magnitude goes `share` of the
way from 0 to its last value, a share from 0 to 1.

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

from numpy.random import Generator
from PIL import Image, ImageEnhance, ImageOps

SHEAR = 0.3
TRANSLATE = 150 / 331
DEGREES = 30.0
ENHANCE = 0.9
BITS = 4
Picture = Any  # PIL.Image.Image, of mode L or RGB
MOST_RAND = 30
MOST_AUTO = 9

RANDAUGMENT = (
    "identity",
    "autocontrast",
    "equalize",
    "rotate",
    "solarize",
    "color",
    "posterize",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)

# (operation, probability, magnitude), twice; of an operation that has no magnitude it is 0.
IMAGENET = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 0)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
    (("equalize", 0.0, 0), ("equalize", 0.8, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 0)),
    (("color", 0.4, 0), ("equalize", 0.6, 0)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
)


def _affine(image: Picture, *matrix: float) -> Picture:
    """matrix a, b, c, d, e, f: the pixel at (x, y) is what was at (a x + b y + c, d x + e y + f)."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )


def _enhanced(by: Callable[[Picture], Any]) -> Callable[[Picture, float, int], Picture]:
    return lambda image, share, sign: by(image).enhance(1 + sign * ENHANCE * share)


OPERATIONS: dict[str, Callable[[Picture, float, int], Picture]] = {
    "identity": lambda x, share, sign: x,
    "autocontrast": lambda x, share, sign: ImageOps.autocontrast(x),
    "equalize": lambda x, share, sign: ImageOps.equalize(x),
    "invert": lambda x, share, sign: ImageOps.invert(x),
    "shear_x": lambda x, share, sign: _affine(x, 1, sign * SHEAR * share, 0, 0, 1, 0),
    "shear_y": lambda x, share, sign: _affine(x, 1, 0, 0, sign * SHEAR * share, 1, 0),
    "translate_x": lambda x, share, sign: _affine(
        x, 1, 0, sign * int(TRANSLATE * share * x.width), 0, 1, 0
    ),
    "translate_y": lambda x, share, sign: _affine(
        x, 1, 0, 0, 0, 1, sign * int(TRANSLATE * share * x.height)
    ),
    "rotate": lambda x, share, sign: x.rotate(
        sign * DEGREES * share, Image.Resampling.BILINEAR
    ),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "posterize": lambda x, share, sign: ImageOps.posterize(x, 8 - round(BITS * share)),
    "solarize": lambda x, share, sign: ImageOps.solarize(x, round(256 * (1 - share))),
}


def randaugment(
    image: Picture, draw: Generator, operations: int, magnitude: float
) -> Picture:
    """N operations of magnitude M, each drawn with its sign."""
    for _ in range(operations):
        name = RANDAUGMENT[int(draw.random() * len(RANDAUGMENT))]
        image = OPERATIONS[name](image, magnitude / MOST_RAND, _sign(draw))
    return image


def autoaugment(image: Picture, draw: Generator) -> Picture:
    """One pair of the policy for ImageNet."""
    for name, probability, magnitude in IMAGENET[int(draw.random() * len(IMAGENET))]:
        taken = draw.random() < probability
        sign = _sign(draw)
        if taken:
            image = OPERATIONS[name](image, magnitude / MOST_AUTO, sign)
    return image


def _sign(draw: Generator) -> int:
    return 1 if draw.random() < 0.5 else -1
