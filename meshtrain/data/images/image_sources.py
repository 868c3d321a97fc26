"""Sources of images: arrays in files, scikit-learn's digits, random pixels.

A folder for each class: `meshtrain.data.images.folders`.

Arrays are a .npz file, or a directory of .npy files:

    images  [n, H, W] or [n, H, W, C]    uint8 from 0 to 255, or floats from 0 to 1
    labels  [n] or [n, 1]                whole numbers from 0

also under other names that people give them (NAMES), for train and, where there are any, for validation. Files of a
directory are memory-mapped: an image is read when it is needed.
"""

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from meshtrain.config import Config
from meshtrain.data.images.pixels import check_channels, convert_channels
from meshtrain.data.permutation import key_of, permute
from meshtrain.data.shards import digest_of_file
from meshtrain.errors import ConfigError, not_installed, short

VALIDATION = 0.01  # where data.validation is null
ARRAYS = ".npz"
ARRAY = ".npy"
# Images and labels, as pairs of names; of those that are there the first counts.
PLAIN = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "target"))
NAMES = {
    "train": (
        ("train_images", "train_labels"),
        ("x_train", "y_train"),
        ("X_train", "y_train"),
        ("train_x", "train_y"),
    ),
    "validation": tuple(
        pair
        for word in ("validation", "val", "test")
        for pair in (
            (f"{word}_images", f"{word}_labels"),
            (f"x_{word}", f"y_{word}"),
            (f"X_{word}", f"y_{word}"),
            (f"{word}_x", f"{word}_y"),
        )
    ),
}
CHECKED = 64  # images of floats whose range is checked on opening
RANDOM = 1 << 16  # images of an epoch of source `synthetic`


Arrays = dict[str, np.ndarray]


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
    splits: Arrays  # train, validation: numbers of images, int64
    classes: tuple[str, ...]  # by label
    content: str  # digest of the images, wherever they lie; empty if nothing is read
    notes: tuple[str, ...] = ()

    def indices(self, split: str) -> np.ndarray:
        """Numbers of the images of train, validation or all."""
        if split == "all":
            return np.concatenate(list(self.splits.values()))
        return self.splits[split]

    def digest(self, split: str) -> str:
        """Equal digests, equal images with equal classes in the same order."""
        if not self.content:
            return ""
        digest = hashlib.sha256("\0".join((self.content, *self.classes)).encode())
        digest.update(self.indices(split).astype("<i8").tobytes())
        return digest.hexdigest()


def share_held_out(config: Config, path: Path, own: str | None) -> float:
    """Returns the share of the images to hold out; ConfigError for data.validation beside a split of their `own`."""
    share = config.data.validation
    if own and share is not None:
        raise ConfigError(
            f"data.validation is {share}, but {short(path)} has {own} of its own; leave the key out."
        )
    return VALIDATION if share is None else share


def split_by_share(count: int, share: float) -> Arrays:
    """Splits of images that have no names: a share of them for validation, the same whenever there are so many."""
    order = permute(np.arange(count), count, key_of("held out", count))
    validation = round(count * share)
    return {
        "train": np.sort(order[validation:]),
        "validation": np.sort(order[:validation]),
    }


def numbered(classes: int) -> tuple[str, ...]:
    """Names of classes that have none."""
    return tuple(map(str, range(classes)))


class ArrayPart(NamedTuple):
    """Images [n, H, W, C], uint8 or floats from 0 to 1, their classes [n], and what a sentence calls them."""

    name: str
    images: np.ndarray
    labels: np.ndarray


class ImageArrays:
    """Images of arrays, one array after the other, each image read when it is needed."""

    def __init__(self, parts: Sequence[ArrayPart], channels: int) -> None:
        self.parts = parts
        self.channels = channels
        self.labels = np.concatenate([part.labels for part in parts]).astype(np.int32)
        self.starts = np.cumsum([0, *(len(part.labels) for part in parts)])

    def pixels(self, index: int) -> np.ndarray:
        number = int(np.searchsorted(self.starts, index, "right")) - 1
        part = self.parts[number]
        index = index - int(self.starts[number])
        image = part.images[index]
        if image.dtype != np.uint8:
            # Not a comparison that a NaN passes.
            if not (image.min() >= 0 and image.max() <= 1):
                raise ConfigError(
                    f"image {index} of {part.name} has numbers from {image.min():g} to {image.max():g}; floats must "
                    "be from 0 to 1."
                )
            image = np.rint(image * np.float32(255)).astype(np.uint8)
        return convert_channels(np.asarray(image), self.channels)


def has_arrays(path: Path) -> bool:
    """Returns whether a path is a .npz file or a directory of .npy files."""
    return path.suffix == ARRAYS if path.is_file() else any(path.glob(f"*{ARRAY}"))


def open_arrays(path: Path, config: Config) -> ImageSource:
    """Opens arrays; ConfigError for those that are not there, of other shapes or numbers, or damaged."""
    try:
        arrays = _read(path)
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError(
            f"{short(path)} holds no arrays that can be read ({short(error)})."
        ) from None
    pairs = [
        next((pair for pair in names if arrays.keys() >= set(pair)), None)
        for names in ((*NAMES["train"], *PLAIN), NAMES["validation"])
    ]
    if pairs[0] is None:
        there = ", ".join(sorted(map(short, arrays))) or "nothing"
        raise ConfigError(
            f"{short(path)} holds {there}, but no pair of images and labels; name them images and labels."
        )
    pictures = ImageArrays(
        [_checked(path, names, arrays, config) for names in pairs if names],
        config.model.channels,
    )
    share = share_held_out(config, path, pairs[1] and pairs[1][0])
    if pairs[1] is None:
        splits = split_by_share(len(pictures.labels), share)
    else:
        splits = {
            name: np.arange(*pictures.starts[i : i + 2])
            for i, name in enumerate(("train", "validation"))
        }
    files = [path]
    if path.is_dir():
        files = [path / f"{name}{ARRAY}" for pair in pairs if pair for name in pair]
    content = hashlib.sha256("".join(map(digest_of_file, files)).encode()).hexdigest()
    return ImageSource(
        str(path), pictures, splits, numbered(int(pictures.labels.max()) + 1), content
    )


def _checked(
    path: Path, names: tuple[str, str], arrays: Arrays, config: Config
) -> ArrayPart:
    images, labels = (arrays[name] for name in names)
    what = f"{names[0]} of {short(path)}"
    shape = list(images.shape)
    if images.ndim not in (3, 4) or not images.size:
        raise ConfigError(
            f"{what} have the shape {shape}; it must be [n, height, width] or [n, height, width, channels]."
        )
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise ConfigError(
            f"{what} are {images.dtype}; they must be uint8 from 0 to 255, or floats from 0 to 1."
        )
    if images.ndim == 3:
        images = images[..., None]
    channels = images.shape[-1]
    if (
        channels > 4
        and channels != config.model.channels
        and images.shape[1] in (1, 3, 4)
    ):
        raise ConfigError(
            f"{what} have the shape {shape}, channels first; they must come last: [n, height, width, channels]."
        )
    check_channels(channels, config.model.channels, what)
    part = ArrayPart(
        what,
        images,
        _checked_labels(f"{names[1]} of {short(path)}", labels, len(images)),
    )
    if images.dtype != np.uint8:
        pictures = ImageArrays([part], config.model.channels)
        for index in (
            np.linspace(0, len(images) - 1, min(CHECKED, len(images)))
            .astype(int)
            .tolist()
        ):
            pictures.pixels(index)
    return part


def _checked_labels(what: str, labels: np.ndarray, count: int) -> np.ndarray:
    """Returns the classes of `count` images, [n]; ConfigError if they are not that many whole numbers from 0."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"{what} are {labels.dtype}{list(labels.shape)}; for {count} images they must be {count} whole numbers."
        )
    if labels.min() < 0 or labels.max() >= 2**31:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ConfigError(
            f"{what} have the class {wrong}; classes are numbered from 0."
        )
    return labels


def _read(path: Path) -> Arrays:
    if path.is_dir():
        return {
            file.stem: np.load(file, mmap_mode="r")
            for file in sorted(path.glob(f"*{ARRAY}"))
        }
    names = {
        name
        for pair in (*PLAIN, *NAMES["train"], *NAMES["validation"])
        for name in pair
    }
    with np.load(path) as arrays:
        # Others may be large, and are not read.
        return {
            name: arrays[name] for name in arrays if name in names
        } or dict.fromkeys(arrays, np.empty(0))


def open_digits(config: Config) -> ImageSource:
    """Source `digits`: 1797 handwritten digits of 8 x 8 pixels, which scikit-learn brings along (Alpaydin and Kaynak
    1998).

    360 are held out, always the same, unless data.validation says how many.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise not_installed(
            "the digits of data.source digits come with scikit-learn", "vision"
        ) from None
    digits = load_digits()
    # Their numbers go from 0 to 16.
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)
    share = 360 / 1797 if config.data.validation is None else config.data.validation
    content = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    pictures = ImageArrays([ArrayPart("digits", pixels, labels)], config.model.channels)
    return ImageSource(
        "digits", pictures, split_by_share(len(labels), share), numbered(10), content
    )


class RandomPixels:
    """Image i and its class are a pure function of (seed, i)."""

    def __init__(self, config: Config) -> None:
        self.shape = (
            config.model.image_size,
            config.model.image_size,
            config.model.channels,
        )
        self.key = key_of(config.run.seed, "synthetic images")
        self.labels = self._stream(RANDOM).integers(
            0, config.model.vocab_size, RANDOM, dtype=np.int32
        )

    def pixels(self, index: int) -> np.ndarray:
        return self._stream(index).integers(0, 256, self.shape, dtype=np.uint8)

    def _stream(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.key, np.uint64(index)]))


def synthetic_images(config: Config) -> ImageSource:
    """Source `synthetic` of images: random pixels from the seed, for benchmarks; nothing is read."""
    splits = split_by_share(RANDOM, 1 / 16)
    return ImageSource(
        "synthetic", RandomPixels(config), splits, numbered(config.model.vocab_size), ""
    )
