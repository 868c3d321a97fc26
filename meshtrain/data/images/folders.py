"""A folder of images, a folder for each class:

    FOLDER/cat/1.png                    or      FOLDER/train/cat/1.png
           cat/new/2.jpg                               train/dog/2.jpg
           dog/1.jpg                                   validation/cat/3.png      (val/ will do)

A class is the name of its folder, in the order of names. Without a validation folder a share of the images is held out, by name.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshtrain.config import Config
from meshtrain.data.images.index import indexed, known_as, read
from meshtrain.data.images.pillow import pillow
from meshtrain.data.images.source import HELD_OUT, ImageSource
from meshtrain.data.inputs import File, find
from meshtrain.data.unit import encoded, held_out
from meshtrain.errors import ConfigError, short

TRAIN, VALIDATION = "train", ("validation", "val")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
NAMED = 5  # classes and files in a sentence
log = logging.getLogger(__name__)


class Files:
    """Images in files, each decoded when it is wanted."""

    def __init__(self, paths: Sequence[str], labels: np.ndarray, channels: int) -> None:
        self.paths, self.labels, self.channels = paths, labels, channels

    def pixels(self, index: int) -> np.ndarray:
        return read(self.paths[index], self.channels)


def open_folder(path: Path, config: Config) -> ImageSource:
    """ConfigError for a folder without classes, a class without images, and images that are none where data.bad_documents refuses."""
    pillow("reading images")
    if config.model.channels not in (1, 3):
        raise ConfigError(
            f"model.channels is {config.model.channels}, but images of files have 1 (grey) or 3 (red, green, blue)."
        )
    held, train = _layout(path)
    if held is not None and config.data.validation is not None:
        raise ConfigError(
            f"data.validation is {config.data.validation}, but {short(path)} has a folder {held} of its own; leave the key out."
        )
    found = find([str(path)], _is_image, what="images")
    if found.left_out:
        log.warning("%s: left out: %s", path, found.describe_left_out())
    # Names begin with the folder's own.
    placed = [(file, file.name.split("/")[1:]) for file in found.files]
    kept = _whole([file for file, _ in placed], path, config.data.bad_documents)
    classes = _folders(path / train)
    number = {name: label for label, name in enumerate(classes)}
    share = HELD_OUT if config.data.validation is None else config.data.validation
    paths: list[str] = []
    labels: list[int] = []
    names: list[str] = []
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    strays = 0
    for (file, parts), digest in zip(placed, kept, strict=True):
        if train:
            split, parts = {train: "train", held: "validation"}.get(parts[0], ""), parts[1:]
        else:
            split = "validation" if held_out(file.name, share) else "train"
        if not split or len(parts) < 2:
            strays += 1
        elif not digest:
            continue
        elif parts[0] not in number:
            raise ConfigError(
                f"{short(path / str(held))} has a class {short(parts[0])} that {short(path / train)} has not."
            )
        else:
            if train and held is None and held_out("/".join(parts), share):
                split = "validation"
            splits[split].append(len(paths))
            paths.append(file.path)
            labels.append(number[parts[0]])
            names.append(f"{'/'.join(parts)}\t{digest}")
    said = [] if not strays else [f"{strays:,} images that stand in no class's folder are left out"]
    if len(kept) > len(paths) + strays:
        said.append(f"{len(kept) - len(paths) - strays:,} files that are no whole image are left out")
    if empty := [name for name in classes if number[name] not in set(labels)]:
        raise ConfigError(f"the class {short(empty[0])} of {short(path)} has no image; remove its folder, or fill it.")
    indices = {split: np.array(which, np.int64) for split, which in splits.items()}
    content = hashlib.sha256(encoded("\n".join(names))).hexdigest()
    pictures = Files(paths, np.array(labels, np.int32), config.model.channels)
    return ImageSource(str(path), pictures, indices, classes, content, tuple(said))


def _layout(path: Path) -> tuple[str | None, str]:
    """The names of the folders of held-out images and of those to train on, where there are any."""
    folders = _folders(path)
    if TRAIN not in folders:
        if not folders:
            raise ConfigError(
                f"{short(path)} holds no folder; each class of images has one of its own: {short(path)}/cat/1.png."
            )
        return None, ""
    held = [name for name in VALIDATION if name in folders]
    if len(held) > 1:
        raise ConfigError(f"{short(path)} has both {' and '.join(held)}; one of them holds what is held out.")
    return (held[0] if held else None), TRAIN


def _folders(path: Path) -> tuple[str, ...]:
    return tuple(
        sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith((".", "__")))
    )


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _whole(files: Sequence[File], path: Path, bad: str) -> Sequence[str]:
    """The digest of each file; nothing of one that is no whole image."""
    index = indexed(files, known_as(path))
    if not index.problems:
        return index.digests
    named = "; ".join(f"{short(name)}: {problem}" for name, problem in list(index.problems.items())[:NAMED])
    if bad == "refuse":
        raise ConfigError(
            f"of {short(path)} {len(index.problems):,} files cannot be taken ({named}); mend or remove them, or set data.bad_documents to skip."
        )
    log.warning("%s: %d files are skipped (%s); all are named in %s", path, len(index.problems), named, index.where)
    return ["" if file.name in index.problems else digest for file, digest in zip(files, index.digests, strict=True)]
