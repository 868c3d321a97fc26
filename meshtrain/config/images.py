"""The section `data.images`: how images are changed before a model reads them.

Everything random in it is a function of run.seed, the step and the row: the same on every mesh, and after a resume.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from meshtrain.config.key import Resume, key
from meshtrain.config.model import positions_of
from meshtrain.errors import ConfigError, listed_divisors
from meshtrain.families import FAMILIES
from meshtrain.sources import SOURCES, has_images, has_text

IMAGES: Final = "images"  # data.format
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
# fmt: on


def check(config: Any) -> None:
    """Raises ConfigError for keys that contradict a family of images, or one of text."""
    model, data, train = config.model, config.data, config.train
    family = FAMILIES[model.family]
    for name, value, wanted in (("data.format", data.format, IMAGES), ("train.objective", train.objective, "classify")):
        if family.images and value != wanted:
            raise ConfigError(
                f"{name} is {value}, but model.family {family.name} reads images; leave it out, or set it to {wanted}."
            )
        if value == wanted and not family.images:
            raise ConfigError(
                f"{name} is {value}, but model.family {family.name} reads text; of images is {_families()}."
            )
    if not family.images:
        if data.images != ImagesConfig():
            raise ConfigError(
                f"the section data.images asks for something, but model.family {family.name} reads text; of images is {_families()}."
            )
        if not has_text(data.source):
            raise ConfigError(
                f"data.source is {data.source}, which holds images, but model.family {family.name} reads text; of images is {_families()}."
            )
        return
    _check_source(data)
    _check_sizes(model, data.images)
    if train.sequence_length != (positions := positions_of(model)):
        raise ConfigError(
            f"train.sequence_length is {train.sequence_length}, but an image has {positions} positions of model.patch_size {model.patch_size}; "
            "leave it out."
        )


def _families() -> str:
    return " or ".join(name for name in FAMILIES if FAMILIES[name].images)


def _check_source(data: Any) -> None:
    words = " or ".join(filter(has_images, SOURCES))
    for name, value in (("data.source", data.source), ("data.validation_source", data.validation_source)):
        if value is not None and not has_images(value):
            raise ConfigError(f"{name} is {value}, which holds no images; name a folder of them, arrays, or {words}.")
    if data.source in SOURCES and SOURCES[data.source].rows is not None and data.validation_source is not None:
        raise ConfigError(
            f"data.validation_source is given, but with data.source {data.source} the held-out images are drawn too; leave it out."
        )
    # Keys of text alone, and their defaults.
    for name, default in (("batching", "window"), ("mixture", ()), ("template", None), ("tokenizer", "byte")):
        if (value := getattr(data, name)) != default:
            raise ConfigError(f"data.{name} is {value}, but images have none; leave it out.")


def _check_sizes(model: Any, images: ImagesConfig) -> None:
    if model.image_size % model.patch_size:
        raise ConfigError(
            f"model.patch_size {model.patch_size} does not divide model.image_size {model.image_size}; legal are {listed_divisors(model.image_size)}."
        )
    for name in ("mean", "std"):
        if len(values := getattr(images, name)) not in (0, 1, model.channels):
            raise ConfigError(
                f"data.images.{name} has {len(values)} numbers, but model.channels is {model.channels}; give one, or one for each channel."
            )
    if images.policy != "none" and model.channels not in (1, 3):
        raise ConfigError(
            f"data.images.policy is {images.policy}, but model.channels is {model.channels}; its operations are for 1 (grey) and 3 (red, green, "
            "blue)."
        )
    if images.shift >= model.image_size:
        raise ConfigError(
            f"data.images.shift is {images.shift}, which moves images of model.image_size {model.image_size} out of sight; legal are at most "
            f"{model.image_size - 1}."
        )
