"""Which operations an image gets: RandAugment and AutoAugment.

RandAugment (Cubuk et al. 2020, section 3): N of the 14 operations, drawn anew for each image, all of one magnitude M of 30.

AutoAugment (Cubuk et al. 2019, appendix, table 9): the policy that was found on ImageNet, 25 pairs of operations. An image gets one
pair; each of its operations has a probability and a magnitude from 0 to 9.
"""

from numpy.random import Generator

from meshtrain.data.images.operations import OPERATIONS, Picture

MOST_RAND, MOST_AUTO = 30, 9

RANDAUGMENT = (
    "identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize", "contrast", "brightness", "sharpness", "shear_x",
    "shear_y", "translate_x", "translate_y",
)  # fmt: skip

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


def randaugment(image: Picture, draw: Generator, operations: int, magnitude: float) -> Picture:
    """N operations of magnitude M, each drawn with its sign."""
    for _ in range(operations):
        name = RANDAUGMENT[int(draw.random() * len(RANDAUGMENT))]
        image = OPERATIONS[name](image, magnitude / MOST_RAND, _sign(draw))
    return image


def autoaugment(image: Picture, draw: Generator) -> Picture:
    """One pair of the policy for ImageNet."""
    for name, probability, magnitude in IMAGENET[int(draw.random() * len(IMAGENET))]:
        taken, sign = draw.random() < probability, _sign(draw)
        if taken:
            image = OPERATIONS[name](image, magnitude / MOST_AUTO, sign)
    return image


def _sign(draw: Generator) -> int:
    return 1 if draw.random() < 0.5 else -1
