"""The section `data.images`: how images are changed before a model reads them.

Everything random in it is a function of run.seed, the step and the row: the same on every mesh, and after a resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from meshtrain.config.key import Resume, key
from meshtrain.config.model import positions_of
from meshtrain.errors import listed_divisors
from meshtrain.families import FAMILIES
from meshtrain.sources import SOURCES, has_images, has_text

IMAGES: Final = "images"  # data.format
REFUSED = Resume.REFUSED


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class ImagesConfig:
    mean: tuple[float, ...] = key(
        (), "taken from each channel of pixels from 0 to 1; one number for all; empty: 0.5",
        resume=REFUSED
    )
    std: tuple[float, ...] = key(
        (), "what is left is divided by this; one number for all; empty: 0.5",
        above=0.0, resume=REFUSED
    )
    resize: Literal["stretch", "crop"] = key(
        "crop", "images of another size: crop the shorter side's square from the middle, or stretch both sides",
        resume=REFUSED
    )
    policy: Literal["none", "randaugment", "autoaugment"] = key(
        "none", "training: operations on each image (Cubuk et al. 2019, 2020); autoaugment is the policy for ImageNet",
        resume=REFUSED
    )
    operations: int = key(2, "randaugment: operations an image", least=1, most=16, resume=REFUSED)
    magnitude: float = key(9.0, "randaugment: how far each goes, of 30", least=0.0, most=30.0, resume=REFUSED)
    crop: float = key(
        1.0, "training: least share of the image's area that a random crop keeps, which is then resized (Szegedy et "
             "al. 2015: 0.08); 1: none",
        least=0.01, most=1.0, resume=REFUSED
    )
    shift: int = key(
        0, "training: images are moved by up to so many pixels each way, zeros where nothing is",
        least=0, resume=REFUSED
    )
    flip: float = key(0.0, "training: probability of mirroring left and right", least=0.0, most=1.0, resume=REFUSED)
    mixup: float = key(
        0.0, "training: two images of a batch are blended by a share drawn from Beta(mixup, mixup) (Zhang et al. "
             "2018); 0: none",
        least=0.0, most=100.0, resume=REFUSED
    )
    cutmix: float = key(
        0.0, "training: a box of another image of the batch is pasted, its share of the area likewise (Yun et al. "
             "2019); 0: none",
        least=0.0, most=100.0, resume=REFUSED
    )
    switch: float = key(
        0.5, "mixup and cutmix: probability that an image gets cutmix",
        least=0.0, most=1.0, resume=REFUSED
    )
    mixed: float = key(1.0, "mixup, cutmix: share of images that are mixed at all", least=0.0, most=1.0, resume=REFUSED)
# fmt: on


def problems(config: Any) -> Iterator[str]:
    """Yields a sentence on keys that contradict a family of images, or one of text."""
    model = config.model
    data = config.data
    train = config.train
    family = FAMILIES[model.family]
    of_images = " or ".join(name for name in FAMILIES if FAMILIES[name].images)
    reads = f"model.family {family.name} reads {'images' if family.images else 'text'}"
    for name, value, wanted in (
        ("data.format", data.format, IMAGES),
        ("train.objective", train.objective, "classify"),
    ):
        if family.images and value != wanted:
            yield f"{name} is {value}, but {reads}; leave it out, or set it to {wanted}."
        if value == wanted and not family.images:
            yield f"{name} is {value}, but {reads}; of images is {of_images}."
    if family.images:
        yield from _source_problems(data)
        yield from _size_problems(model, data.images)
        if train.sequence_length != (positions := positions_of(model)):
            but = f"but an image has {positions} positions of model.patch_size {model.patch_size}"
            yield f"train.sequence_length is {train.sequence_length}, {but}; leave it out."
        return
    if data.images != ImagesConfig():
        yield f"the section data.images asks for something, but {reads}; of images is {of_images}."
    if not has_text(data.source):
        yield f"data.source is {data.source}, which holds images, but {reads}; of images is {of_images}."


def _source_problems(data: Any) -> Iterator[str]:
    words = " or ".join(filter(has_images, SOURCES))
    for name, value in (
        ("data.source", data.source),
        ("data.validation_source", data.validation_source),
    ):
        if value is not None and not has_images(value):
            yield f"{name} is {value}, which holds no images; name a folder of them, arrays, or {words}."
    if (
        data.source in SOURCES
        and SOURCES[data.source].rows is not None
        and data.validation_source is not None
    ):
        with_source = (
            f"with data.source {data.source} the held-out images are drawn too"
        )
        yield f"data.validation_source is given, but {with_source}; leave it out."
    # Keys of text alone, and their defaults.
    for name, default in (
        ("batching", "window"),
        ("mixture", ()),
        ("template", None),
        ("tokenizer", "byte"),
        ("begin", None),
        ("end", None),
    ):
        if (value := getattr(data, name)) != default:
            yield f"data.{name} is {value}, but images have none; leave it out."


def _size_problems(model: Any, images: ImagesConfig) -> Iterator[str]:
    size = model.image_size
    channels = model.channels
    if size % model.patch_size:
        legal = listed_divisors(size)
        yield f"model.patch_size {model.patch_size} does not divide model.image_size {size}; legal are {legal}."
    for name in ("mean", "std"):
        if len(values := getattr(images, name)) not in (0, 1, channels):
            has = f"has {len(values)} numbers, but model.channels is {channels}"
            yield f"data.images.{name} {has}; give one, or one for each channel."
    if images.policy != "none" and channels not in (1, 3):
        but = f"but model.channels is {channels}; its operations are for 1 (grey) and 3 (red, green, blue)"
        yield f"data.images.policy is {images.policy}, {but}."
    if images.shift >= size:
        moves = f"which moves images of model.image_size {size} out of sight"
        yield f"data.images.shift is {images.shift}, {moves}; legal are at most {size - 1}."
