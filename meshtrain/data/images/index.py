"""What the files of a folder are found to be, once: whole images or not, and a digest of each, kept in the user's cache.

An epoch is the same on every process only if all agree on which files are images, so each is decoded once before the first step. The
next time the files have to be no more than looked at, as long as their names, sizes and dates are the same.

    CACHE/images/NAME-HASH/index.json     a digest for each file, or what is wrong with it
    CACHE/images/NAME-HASH/skipped.log    those that are no images, a line each
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshtrain.data.cache import cache_directory, saying
from meshtrain.data.images.pillow import pillow
from meshtrain.data.images.pixels import as_pixels
from meshtrain.data.inputs import File
from meshtrain.data.prepare import refusal_at
from meshtrain.data.unit import encoded
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import locked, write_atomically

INDEX, SKIPPED = "index.json", "skipped.log"
ORIENTATION = 0x0112  # of Exif: 1 is upright
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Index:
    """Of each file its digest, or what is wrong with it."""

    digests: tuple[str, ...]
    problems: dict[str, str]  # by name
    where: Path  # the bad ones are named


def indexed(files: Sequence[File], name: str) -> Index:
    """The index of these files, made now if it is not there; ConfigError where the cache has no room."""
    listing = "\n".join(f"{file.name}\t{file.size}\t{file.modified}" for file in files)
    directory = cache_directory() / "images" / f"{name[:40]}-{hashlib.sha256(encoded(listing)).hexdigest()[:16]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            return _read(directory, len(files)) or _make(files, directory, name)
    except OSError as error:
        raise ConfigError(
            f"what the images of {name} are cannot be noted in {directory} ({refusal_at(error)}); set XDG_CACHE_HOME to a directory with "
            "room."
        ) from None


def _read(directory: Path, count: int) -> Index | None:
    try:
        values = json.loads((directory / INDEX).read_bytes())
        digests, problems = tuple(map(str, values["digests"])), dict(values["problems"])
        return Index(digests, problems, directory / SKIPPED) if len(digests) == count else None
    except (OSError, ValueError, KeyError, TypeError):
        # Not there, or not whole: it is made again.
        return None


def _make(files: Sequence[File], directory: Path, name: str) -> Index:
    size, done = sum(file.size for file in files), 0
    log.info("looking at %d images (%.1f MB) of %s", len(files), size / 1e6, name)
    told, digests = saying("looked at", name), []
    problems: dict[str, str] = {}
    # Decoding and hashing release the interpreter's lock.
    with ThreadPoolExecutor() as pool:
        for file, (digest, problem) in zip(files, pool.map(_look, files), strict=True):
            digests.append(digest)
            if problem:
                problems[file.name] = problem
            done += file.size
            told(done, size)
    named = "".join(f"{short(name)}\t{problem}\n" for name, problem in problems.items())
    write_atomically(directory / SKIPPED, encoded(named))
    write_atomically(directory / INDEX, json.dumps({"digests": digests, "problems": problems}).encode())
    return Index(tuple(digests), problems, directory / SKIPPED)


def _look(file: File) -> tuple[str, str]:
    """The digest of a file, and what is wrong with it as an image."""
    try:
        data = Path(file.path).read_bytes()
    except OSError as error:
        return "", f"unreadable ({refusal(error)})"
    return hashlib.blake2b(data, digest_size=16).hexdigest(), problem_of(data)


def problem_of(data: bytes) -> str:
    """Why these bytes are no whole image; nothing if they are one."""
    try:
        decoded(data, 3, quickly=True)
    # Pillow's decoders raise of all kinds on what is damaged, and there is no more to any of them than this.
    except Exception as error:
        return f"no whole image ({short(error)})"
    return ""


def decoded(data: bytes, channels: int, quickly: bool = False) -> np.ndarray:
    """The first picture of a file as uint8 [H, W, channels], the right way up; quickly: of JPEG in an eighth of its size.

    Raises whatever Pillow does on what is damaged.
    """
    from PIL import ImageOps

    with pillow("reading images").open(io.BytesIO(data)) as image:
        if quickly:
            image.draft("RGB", (image.width // 8, image.height // 8))
        image.load()
        if image.mode == "F":
            raise ValueError("its numbers are floats, of no known range")
        # Both copy an image that is as it should be.
        turned = ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION, 1) != 1 else image
        if turned.mode.startswith("I"):
            # 16 bits, which Pillow would cut off at 255.
            turned = pillow("reading images").fromarray((np.asarray(turned).clip(0, 65535) >> 8).astype(np.uint8))
        wanted = "L" if channels == 1 else "RGB"
        return as_pixels(turned if turned.mode == wanted else turned.convert(wanted))


def read(path: str, channels: int) -> np.ndarray:
    """A file that was found to be whole when the data was opened; ConfigError if it is not any more."""
    try:
        return decoded(Path(path).read_bytes(), channels)
    # See `problem_of`.
    except Exception as error:
        raise ConfigError(
            f"the image {short(path)} could be read when the data was opened, and cannot be now ({short(error)})."
        ) from None


def known_as(path: Path) -> str:
    """What a folder is called in the cache and in the log."""
    return os.path.basename(os.path.realpath(path))
