"""A folder of images, a folder for each class:

    FOLDER/cat/1.png                    or      FOLDER/train/cat/1.png
           cat/new/2.jpg                               train/dog/2.jpg
           dog/1.jpg                                   validation/cat/3.png      (val/ will do)

A class is the name of its folder, in the order of names. Without a validation folder a share of the images is held out,
by name.

An epoch is the same on every process only if all agree on which files are images, so each is decoded once before the
first step. An index of them is kept in the user's cache, which is read the next time if names, sizes and dates of the
files are the same:

    CACHE/images/NAME-HASH/index.json     a digest for each file, or what is wrong with it
    CACHE/images/NAME-HASH/skipped.log    the files that are no images, a line each
"""

import hashlib
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.config import Config
from meshtrain.data.cache import cache_directory, logged_progress
from meshtrain.data.images.image_sources import ImageSource, share_held_out
from meshtrain.data.images.pixels import as_pixels, pillow
from meshtrain.data.input_files import InputFile, find
from meshtrain.data.prepare import refusal_at
from meshtrain.data.unit import encoded, held_out
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import UNREAD, locked, refuse_passing, retried, write_atomically

TRAIN = "train"
VALIDATIONS = ("validation", "val")
ENDINGS = (
    ".png",
    ".jpg",
    ".jpeg",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
)
NAMED = 5  # classes and files in a sentence
INDEX = "index.json"
SKIPPED = "skipped.log"
RULES = (
    # Raised when other files are taken for images than before, so that no old index is used
    "2"
)
STRAY = "images that stand in no class's folder"
DAMAGED = "files that are no whole image"
ORIENTATION = 0x0112  # of Exif: 1 is upright
log = logging.getLogger(__name__)


# The digest of each file, and what is wrong with those that are no images.
Index = tuple[list[str], dict[str, str]]


class ImageFiles:
    """Images in files, each decoded when it is needed."""

    def __init__(self, paths: Sequence[str], labels: np.ndarray, channels: int) -> None:
        self.paths = paths
        self.labels = labels
        self.channels = channels

    def pixels(self, index: int) -> np.ndarray:
        path = self.paths[index]
        try:
            return decoded(Path(path).read_bytes(), self.channels)
        except Exception as error:  # as in `problem_of`
            raise ConfigError(
                f"the image {short(path)} could be read when the data was opened, and cannot be now ({short(error)})."
            ) from None


def open_folder(path: Path, config: Config) -> ImageSource:
    """Opens a folder; ConfigError for one without classes, a class without images, and damaged images where
    data.bad_documents refuses.
    """
    pillow("reading images")
    if config.model.channels not in (1, 3):
        raise ConfigError(
            f"model.channels is {config.model.channels}, but images of files have 1 (grey) or 3 (red, green, blue)."
        )
    train, validation = _layout(path)
    share = share_held_out(config, path, validation and f"a folder {validation}")
    inputs = find(
        [str(path)], lambda name: name.lower().endswith(ENDINGS), what="images"
    )
    if inputs.left_out:
        log.warning("%s: left out: %s", path, inputs.describe_left_out())
    digests = _digests(inputs.files, path, config.data.bad_documents)
    classes = _folders(path / train)
    images, left_out = _sort_files(
        zip(inputs.files, digests, strict=True),
        path,
        classes,
        (train, validation),
        share,
    )
    return _source(path, classes, config.model.channels, images, left_out)


def _sort_files(
    files: Iterable[tuple[InputFile, str]],
    path: Path,
    classes: Sequence[str],
    splits: tuple[str, str],
    share: float,
) -> tuple[list["_Image"], Counter[str]]:
    """Returns the images of files with their digests, and how many are left out, by why; `splits`: the folders of
    training and of validation, `share`: what is held out where there is no folder for it.
    """
    train, validation = splits
    numbers = {name: label for label, name in enumerate(classes)}
    images: list[_Image] = []
    left_out: Counter[str] = Counter()
    for file, digest in files:
        _, *parts = file.name.split("/")  # behind the folder's own name
        folder = parts.pop(0) if train else ""
        if folder not in (train, validation) or len(parts) < 2:
            left_out[STRAY] += 1
        elif not digest:
            left_out[DAMAGED] += 1
        elif parts[0] not in numbers:
            raise ConfigError(
                f"{short(path / folder)} has a class {short(parts[0])} that {short(path / train)} has not."
            )
        else:
            inside = "/".join(parts)
            by_share = not validation and held_out(
                inside if train else file.name, share
            )
            split = "validation" if by_share or folder != train else "train"
            images.append(
                _Image(split, file.path, numbers[parts[0]], f"{inside}\t{digest}")
            )
    return images, left_out


class _Image(NamedTuple):
    split: str
    path: str
    label: int
    name: str  # with its digest


def _source(
    path: Path,
    classes: tuple[str, ...],
    channels: int,
    images: list[_Image],
    left_out: Counter[str],
) -> ImageSource:
    """Returns the source of the images, with notes on files left out; ConfigError for a class without images."""
    labels = np.array([image.label for image in images], np.int32)
    if empty := set(range(len(classes))) - set(labels.tolist()):
        raise ConfigError(
            f"the class {short(classes[min(empty)])} of {short(path)} has no image; remove its folder, or fill it."
        )
    splits = np.array([image.split for image in images])
    indices = {
        split: np.flatnonzero(splits == split) for split in ("train", "validation")
    }
    content = hashlib.sha256(
        encoded("\n".join(image.name for image in images))
    ).hexdigest()
    pictures = ImageFiles([image.path for image in images], labels, channels)
    notes = (
        f"{left_out[what]:,} {what} are left out"
        for what in (STRAY, DAMAGED)
        if left_out[what]
    )
    return ImageSource(str(path), pictures, indices, classes, content, tuple(notes))


def _layout(path: Path) -> tuple[str, str]:
    """The folders in which the classes of training and of validation stand; empty: the folder itself, none."""
    folders = _folders(path)
    if not folders:
        raise ConfigError(
            f"{short(path)} holds no folder; each class of images has one of its own: {short(path)}/cat/1.png."
        )
    if TRAIN not in folders:
        return "", ""
    validation = [name for name in VALIDATIONS if name in folders]
    if len(validation) > 1:
        raise ConfigError(
            f"{short(path)} has both {' and '.join(validation)}; one of them holds what is held out."
        )
    return TRAIN, "".join(validation)


def _folders(path: Path) -> tuple[str, ...]:
    folders = (entry.name for entry in os.scandir(path) if entry.is_dir())
    return tuple(sorted(name for name in folders if not name.startswith((".", "__"))))


def _digests(files: Sequence[InputFile], path: Path, bad: str) -> list[str]:
    """The digest of each file, by the index in the cache, made now if it is not there; an empty one of a damaged image.

    ConfigError for a damaged image where `bad` is refuse, and where the cache has no room.
    """
    name = os.path.basename(os.path.realpath(path))
    listing = "\n".join(
        [RULES, *(f"{file.name}\t{file.size}\t{file.modified}" for file in files)]
    )
    directory = (
        cache_directory()
        / "images"
        / f"{name[:40]}-{hashlib.sha256(encoded(listing)).hexdigest()[:16]}"
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            digests, problems = _read_index(directory, len(files)) or _make_index(
                files, directory, name
            )
    except OSError as error:
        refuse_passing(error.filename or directory, error)
        raise ConfigError(
            f"what the images of {name} are cannot be noted in {directory} ({refusal_at(error)}); set XDG_CACHE_HOME "
            "to a directory with "
            "room."
        ) from None
    if not problems:
        return digests
    shown = "; ".join(
        f"{short(name)}: {problem}" for name, problem in list(problems.items())[:NAMED]
    )
    if bad == "refuse":
        raise ConfigError(
            f"of {short(path)} {len(problems):,} files cannot be taken ({shown}); mend or remove them, or set "
            "data.bad_documents to skip."
        )
    log.warning(
        "%s: %d files are skipped (%s); all are named in %s",
        path,
        len(problems),
        shown,
        directory / SKIPPED,
    )
    return [
        "" if file.name in problems else digest
        for file, digest in zip(files, digests, strict=True)
    ]


def _read_index(directory: Path, count: int) -> Index | None:
    try:
        values = json.loads((directory / INDEX).read_bytes())
        digests = list(map(str, values["digests"]))
        problems = dict(values["problems"])
        return (digests, problems) if len(digests) == count else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not whole: it is made again


def _make_index(files: Sequence[InputFile], directory: Path, name: str) -> Index:
    size = sum(file.size for file in files)
    done = 0
    log.info("looking at %d images (%.1f MB) of %s", len(files), size / 1e6, name)
    progress = logged_progress("looked at", name)
    digests: list[str] = []
    problems: dict[str, str] = {}
    # Decoding and hashing release the interpreter's lock.
    with ThreadPoolExecutor() as pool:
        for file, (digest, problem) in zip(files, pool.map(_check, files), strict=True):
            digests.append(digest)
            if problem:
                problems[file.name] = problem
            done += file.size
            progress(done, size)
    lines = "".join(f"{short(name)}\t{problem}\n" for name, problem in problems.items())
    write_atomically(directory / SKIPPED, encoded(lines))
    write_atomically(
        directory / INDEX,
        json.dumps({"digests": digests, "problems": problems}).encode(),
    )
    return digests, problems


def _check(file: InputFile) -> tuple[str, str]:
    try:
        data = retried(Path(file.path).read_bytes)
    except OSError as error:
        refuse_passing(file.path, error, UNREAD)
        return "", f"unreadable ({refusal(error)})"
    return hashlib.blake2b(data, digest_size=16).hexdigest(), problem_of(data)


def problem_of(data: bytes) -> str:
    """Returns why these bytes are not a whole image; an empty string if they are."""
    try:
        decoded(data, 3, quickly=True)
    # Pillow's decoders raise all kinds of exceptions on what is damaged.
    except Exception as error:
        return f"no whole image ({short(error)})"
    return ""


def decoded(data: bytes, channels: int, quickly: bool = False) -> np.ndarray:
    """Decodes the first picture of a file as uint8 [H, W, channels], the right way up; quickly: of JPEG in an eighth of
    its size.

    Raises whatever Pillow does on what is damaged.
    """
    from PIL import ImageOps

    with pillow("reading images").open(io.BytesIO(data)) as image:
        if quickly:
            image.draft("RGB", (max(image.width // 8, 1), max(image.height // 8, 1)))
        image.load()
        if image.mode == "F":
            raise ValueError("its numbers are floats, of no known range")
        # Both copy an image that is as it should be.
        turned = (
            ImageOps.exif_transpose(image)
            if image.getexif().get(ORIENTATION, 1) != 1
            else image
        )
        if turned.mode.startswith("I"):
            # 16 bits, which Pillow would cut off at 255.
            turned = pillow("reading images").fromarray(
                (np.asarray(turned).clip(0, 65535) >> 8).astype(np.uint8)
            )
        wanted = "L" if channels == 1 else "RGB"
        return as_pixels(turned if turned.mode == wanted else turned.convert(wanted))
