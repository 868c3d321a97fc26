"""Images in arrays: a .npz file, or a directory of .npy files.

    images  [n, H, W] or [n, H, W, C]    uint8 from 0 to 255, or floats from 0 to 1
    labels  [n] or [n, 1]                whole numbers from 0

also under other names that people give them (NAMES), for train and, where there are any, for validation. What is not compressed is
mapped into memory: an image is read when it is wanted.
"""

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from meshtrain.config import Config
from meshtrain.data.images.pixels import check_channels, in_channels
from meshtrain.data.images.source import HELD_OUT, ImageSource, held_out_share, numbered
from meshtrain.data.shards import digest_of_file
from meshtrain.errors import ConfigError, refusal, short

ARRAYS, ARRAY = ".npz", ".npy"
# Images and labels, as pairs of names; of those that are there the first counts.
PLAIN = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "target"))
NAMES = {
    "train": (("train_images", "train_labels"), ("x_train", "y_train"), ("X_train", "y_train"), ("train_x", "train_y")),
    "validation": tuple(
        pair
        for word in ("validation", "val", "test")
        for pair in ((f"{word}_images", f"{word}_labels"), (f"x_{word}", f"y_{word}"), (f"X_{word}", f"y_{word}"), (f"{word}_x", f"{word}_y"))
    ),
}  # fmt: skip
LOOKED_AT = 64  # images of floats whose range is looked at on opening


class Array:
    """Images of an array [n, H, W, C], each read when it is wanted."""

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray, channels: int) -> None:
        self.name, self.images, self.channels = name, images, channels
        self.labels = labels.astype(np.int32)

    def pixels(self, index: int) -> np.ndarray:
        found = self.images[index]
        if found.dtype != np.uint8:
            # Not a comparison that a NaN passes.
            if not (found.min() >= 0 and found.max() <= 1):
                raise ConfigError(
                    f"image {index} of {self.name} has numbers from {found.min():g} to {found.max():g}; floats must be from 0 to 1."
                )
            found = np.rint(found * np.float32(255)).astype(np.uint8)
        return in_channels(np.asarray(found), self.channels)


class Joined:
    """Several arrays, one after the other."""

    def __init__(self, parts: list[Array]) -> None:
        self.parts, self.labels = parts, np.concatenate([part.labels for part in parts])
        self.ends = np.cumsum([len(part.labels) for part in parts])

    def pixels(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self.ends, index, "right"))
        return self.parts[part].pixels(index - (int(self.ends[part - 1]) if part else 0))


def has_arrays(path: Path) -> bool:
    """Whether a path is a .npz file or a directory of .npy files."""
    return path.suffix == ARRAYS if path.is_file() else any(path.glob(f"*{ARRAY}"))


def open_arrays(path: Path, config: Config) -> ImageSource:
    """ConfigError for arrays that are not there, of other shapes or numbers, or damaged."""
    try:
        found = _read_directory(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise ConfigError(f"{short(path)} cannot be read: {refusal(error)}.") from None
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError(f"{short(path)} holds no arrays that can be read ({short(error)}).") from None
    train = _pair(found, (*NAMES["train"], *PLAIN))
    if train is None:
        there = ", ".join(sorted(map(short, found))) or "nothing"
        raise ConfigError(
            f"{short(path)} holds {there}, but no pair of images and labels; name them images and labels."
        )
    pairs = [train, *([held] if (held := _pair(found, NAMES["validation"])) else [])]
    parts = [_array(path, names, found, config) for names in pairs]
    said: tuple[str, ...] = ()
    if len(parts) > 1:
        if config.data.validation is not None:
            raise ConfigError(
                f"data.validation is {config.data.validation}, but {short(path)} has {pairs[1][0]} of its own; leave the key out."
            )
        counts = np.cumsum([0, *(len(part.labels) for part in parts)])
        splits = {name: np.arange(*counts[i : i + 2]) for i, name in enumerate(("train", "validation"))}
    else:
        share = HELD_OUT if config.data.validation is None else config.data.validation
        splits = held_out_share(len(parts[0].labels), share)
    pictures = Joined(parts) if len(parts) > 1 else parts[0]
    classes = int(pictures.labels.max()) + 1
    return ImageSource(str(path), pictures, splits, tuple(numbered(classes)), _content(path, pairs), said)


def _content(path: Path, pairs: list[tuple[str, str]]) -> str:
    files = [path] if path.is_file() else [path / f"{name}{ARRAY}" for pair in pairs for name in pair]
    return hashlib.sha256("".join(map(digest_of_file, files)).encode()).hexdigest()


def _pair(found: dict[str, np.ndarray], names: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return next((pair for pair in names if found.keys() >= set(pair)), None)


def _array(path: Path, names: tuple[str, str], found: dict[str, np.ndarray], config: Config) -> Array:
    images, labels = (found[name] for name in names)
    what, shape = f"{names[0]} of {short(path)}", list(images.shape)
    if images.ndim not in (3, 4) or not images.size:
        raise ConfigError(
            f"{what} have the shape {shape}; it must be [n, height, width] or [n, height, width, channels]."
        )
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise ConfigError(f"{what} are {images.dtype}; they must be uint8 from 0 to 255, or floats from 0 to 1.")
    if images.ndim == 3:
        images = images[..., None]
    channels = images.shape[-1]
    if channels > 4 and channels != config.model.channels and images.shape[1] in (1, 3, 4):
        raise ConfigError(
            f"{what} have the shape {shape}, channels first; they must come last: [n, height, width, channels]."
        )
    check_channels(channels, config.model.channels, what)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"{names[1]} of {short(path)} are {labels.dtype}{list(labels.shape)}; for {len(images)} images they must be {len(images)} whole "
            "numbers."
        )
    if labels.min() < 0 or labels.max() >= 2**31:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ConfigError(f"{names[1]} of {short(path)} have the class {wrong}; classes are numbered from 0.")
    made = Array(what, images, labels, config.model.channels)
    if images.dtype != np.uint8:
        for index in np.linspace(0, len(images) - 1, min(LOOKED_AT, len(images))).astype(int).tolist():
            made.pixels(index)
    return made


def _read_directory(path: Path) -> dict[str, np.ndarray]:
    return {file.stem: np.load(file, mmap_mode="r") for file in sorted(path.glob(f"*{ARRAY}"))}


def _read_file(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive, np.load(path) as arrays:
        members = {
            info.filename.removesuffix(ARRAY): info for info in archive.infolist() if info.filename.endswith(ARRAY)
        }
        names = [name for pair in (*PLAIN, *NAMES["train"], *NAMES["validation"]) for name in pair]
        # Others are none of ours, and may be large.
        return {
            name: _mapped(path, info) if info.compress_type == zipfile.ZIP_STORED else arrays[name]
            for name, info in members.items()
            if name in names
        } or dict.fromkeys(members, np.empty(0))


def _mapped(path: Path, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of a .npz file that is not compressed, where it lies in it."""
    with path.open("rb") as stream:
        # The member's own header: 30 bytes, of which the last four say how long its name and what follows are.
        stream.seek(info.header_offset + 26)
        lengths = np.frombuffer(stream.read(4), "<u2")
        stream.seek(int(lengths.sum()), 1)
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds Python objects")
        return np.memmap(path, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
