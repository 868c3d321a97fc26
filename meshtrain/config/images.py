"""The section `data.images`: what is done to images before a model reads them, a row a batch's image.

Everything random in it is a function of run.seed, the step and the row: the same on every mesh, and after a resume.
"""

from dataclasses import dataclass
from typing import Literal

from meshtrain.config.key import Resume, key

REFUSED = Resume.REFUSED


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class ImagesConfig:
    mean: tuple[float, ...] = key((), "taken from each channel of pixels from 0 to 1; one number for all; empty: 0.5", resume=REFUSED)
    std: tuple[float, ...] = key((), "what is left is divided by this; one number for all; empty: 0.5", above=0.0, resume=REFUSED)
    resize: Literal["stretch", "crop"] = key(
        "crop", "images of another size: crop the shorter side's square from the middle, or stretch both sides", resume=REFUSED
    )
    policy: Literal["none", "randaugment", "autoaugment"] = key(
        "none", "training: operations on each image (Cubuk et al. 2019, 2020); autoaugment is the policy for ImageNet", resume=REFUSED
    )
    operations: int = key(2, "randaugment: operations an image", least=1, most=16, resume=REFUSED)
    magnitude: float = key(9.0, "randaugment: how far each goes, of 30", least=0.0, most=30.0, resume=REFUSED)
    crop: float = key(
        1.0, "training: least share of the image's area that a random crop keeps, which is then resized (Szegedy et al. 2015: 0.08); 1: none",
        least=0.01, most=1.0, resume=REFUSED
    )
    shift: int = key(0, "training: images are moved by up to so many pixels each way, zeros where nothing is", least=0, resume=REFUSED)
    flip: float = key(0.0, "training: probability of mirroring left and right", least=0.0, most=1.0, resume=REFUSED)
    mixup: float = key(
        0.0, "training: two images of a batch are blended by a share drawn from Beta(mixup, mixup) (Zhang et al. 2018); 0: none",
        least=0.0, most=100.0, resume=REFUSED
    )
    cutmix: float = key(
        0.0, "training: a box of another image of the batch is pasted, its share of the area likewise (Yun et al. 2019); 0: none",
        least=0.0, most=100.0, resume=REFUSED
    )
    switch: float = key(0.5, "mixup and cutmix: probability that an image gets cutmix", least=0.0, most=1.0, resume=REFUSED)
    mixed: float = key(1.0, "mixup, cutmix: share of images that are mixed at all", least=0.0, most=1.0, resume=REFUSED)
