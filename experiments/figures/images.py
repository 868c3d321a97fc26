"""Images: how fast they come on one core, beside what no loader can do without.

digits    8 x 8 pixels from memory, batches of 120. Bare: NumPy takes the same images, normalises and cuts them into patches.
photos    500 x 375 JPEG files to 224 x 224, batches of 32. Bare: Pillow decodes, cuts out, resizes, mirrors and does as many operations
          of the same table, one call after the other, and NumPy normalises and cuts them into patches.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.bench import Table
from meshtrain.config import Config, load
from meshtrain.data import SplitBatches, open_data
from meshtrain.data.images.pixels import patches
from meshtrain.data.images.policies import OPERATIONS, RANDAUGMENT

SECONDS = 0.7  # of processor time in each turn
PHOTOS, WIDTH, HEIGHT, SIZE = 64, 500, 375, 224
CROPPED = {"crop": 0.08, "flip": 0.5}
MIXED = {"mixup": 0.8, "cutmix": 1.0}
OF_DIGITS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "shift": {"shift": 1},
    "mixup, cutmix": MIXED,
}
OF_PHOTOS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "crop, flip": CROPPED,
    "crop, flip, randaugment 2": CROPPED | {"policy": "randaugment"},
    "crop, flip, randaugment 2, mixup, cutmix": CROPPED
    | MIXED
    | {"policy": "randaugment"},
}


def images(*, rounds: int = 3) -> None:
    """Prints images a second of the fastest turn of ours and of the bare loop."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table = Table(
        "images",
        "changed by                              ",
        "  ours",
        "   bare",
        "ratio",
    )
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
        cases = [
            ("digits", name, _config("digits", 8, 2, 1, 120, changes))
            for name, changes in OF_DIGITS.items()
        ]
        _write_photos(Path(directory, "photos"))
        for name, changes in OF_PHOTOS.items():
            cases.append(
                (
                    "photos",
                    name,
                    _config(f"{directory}/photos", SIZE, 16, 3, 32, changes),
                )
            )
        for kind, name, config in cases:
            train, _ = open_data(config)
            bare = {"digits": _bare_digits, "photos": _bare_photos}[kind](train, config)
            sides = {"ours": train.batch, "bare": bare}
            best = dict.fromkeys(sides, 0.0)
            for _ in range(rounds):
                for side, batch in sides.items():
                    best[side] = max(
                        best[side],
                        config.train.global_batch_size * _batches_a_second(batch),
                    )
            table.row(
                kind,
                name,
                f"{best['ours']:,.0f}",
                f"{best['bare']:,.0f}",
                f"{best['ours'] / best['bare']:.2f}",
            )


def _batches_a_second(batch: Callable[[int], Any]) -> float:
    """Returns the batches of a second of processor time."""
    began = time.process_time()
    k = 0
    while time.process_time() - began < SECONDS:
        batch(k)
        k += 1
    return k / (time.process_time() - began)


def _config(
    source: str,
    size: int,
    patch: int,
    channels: int,
    batch: int,
    changes: dict[str, Any],
) -> Config:
    model = {
        "family": "vit",
        "image_size": size,
        "patch_size": patch,
        "channels": channels,
        "vocab_size": 10,
    }
    data = {"source": source, "images": changes, "validation": 0.0}
    return load({"model": model, "data": data, "train": {"global_batch_size": batch}})


def _write_photos(folder: Path) -> None:
    """Writes smooth colours with some noise, so that a file has about as many bytes as a photo of this size."""
    draw = np.random.default_rng(0)
    for number in range(PHOTOS):
        place = folder / f"{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(
            coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32
        )
        pixels = smooth + draw.normal(0, 8, smooth.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
            place / f"{number}.jpg", quality=90
        )


def _normalised(pixels: np.ndarray, patch: int) -> np.ndarray:
    return patches((pixels.astype(np.float32) / 255 - 0.5) / 0.5, patch)


def _bare_digits(train: SplitBatches, config: Config) -> Callable[[int], Any]:
    pictures = train.batches.rows.pictures  # type: ignore[attr-defined]
    size = config.train.global_batch_size
    order = np.random.default_rng(0).permutation(len(pictures.labels))
    images = np.stack([pictures.pixels(index) for index in range(len(pictures.labels))])

    def batch(k: int) -> Any:
        chosen = order[np.arange(k * size, (k + 1) * size) % len(order)]
        return _normalised(images[chosen], config.model.patch_size), pictures.labels[
            chosen
        ]

    return batch


def _bare_photos(train: SplitBatches, config: Config) -> Callable[[int], Any]:
    paths = train.batches.rows.pictures.paths  # type: ignore[attr-defined]
    size = config.train.global_batch_size
    changes = config.data.images
    draw = np.random.default_rng(0)

    def one(path: str) -> np.ndarray:
        image = Image.open(path).convert("RGB")
        side = int(min(image.size) * (draw.uniform(0.4, 1) if changes.crop < 1 else 1))
        image = image.resize(
            (SIZE, SIZE), Image.Resampling.BILINEAR, box=(0, 0, side, side)
        )
        if changes.flip and draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for _ in range(changes.operations if changes.policy == "randaugment" else 0):
            image = OPERATIONS[RANDAUGMENT[draw.integers(14)]](image, 0.3, 1)
        return np.asarray(image)

    def batch(k: int) -> Any:
        return _normalised(
            np.stack(
                [one(paths[(k * size + row) % len(paths)]) for row in range(size)]
            ),
            16,
        )

    return batch
