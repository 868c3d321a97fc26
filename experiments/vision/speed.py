"""How fast images come on one core, beside what no loader can do without, in one run.

    python -m experiments.vision.speed [--seconds 4]

  digits   8 x 8 pixels from memory, batches of 120. Bare: NumPy takes the same images, normalises and cuts them into patches.
  photos   500 x 375 JPEG files to 224 x 224, batches of 32. Bare: Pillow decodes, cuts out, resizes, mirrors, does the same number of
           operations of the same table, all a call after the other, and NumPy normalises and cuts them into patches.

Turns of both in alternation; images a second of the fastest turn of each, and their ratio.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from meshtrain.config import Config, load
from meshtrain.data import SplitBatches, open_data
from meshtrain.data.images.pixels import patches
from meshtrain.data.images.policies import OPERATIONS, RANDAUGMENT

TURNS = 3
PHOTOS, WIDTH, HEIGHT, SIZE = 64, 500, 375, 224
CHANGES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "shift": {"shift": 1},
    "crop, flip": {"crop": 0.08, "flip": 0.5},
    "mixup, cutmix": {"mixup": 0.8, "cutmix": 1.0},
    "crop, flip, randaugment 2": {"crop": 0.08, "flip": 0.5, "policy": "randaugment"},
    "crop, flip, randaugment 2, mixup, cutmix": {
        "crop": 0.08,
        "flip": 0.5,
        "policy": "randaugment",
        "mixup": 0.8,
        "cutmix": 1.0,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row, in 3 turns of each side (default: 4)")
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    made = Table()
    for column in ("images", "changed by", "images/s", "bare", "ratio"):
        made.add_column(column, justify="left" if column in ("images", "changed by") else "right")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
        for name in ("as they are", "shift", "mixup, cutmix"):
            row(made, "digits", name, config("digits", 8, 2, 1, 120, CHANGES[name]), bare_digits, chosen.seconds)
        write_photos(Path(directory, "photos"))
        for name in (
            "as they are",
            "crop, flip",
            "crop, flip, randaugment 2",
            "crop, flip, randaugment 2, mixup, cutmix",
        ):
            given = config(f"{directory}/photos", SIZE, 16, 3, 32, CHANGES[name])
            row(made, "photos", name, given, bare_photos, chosen.seconds)
    Console(width=110).print(made)


def config(source: str, size: int, patch: int, channels: int, batch: int, images: dict[str, Any]) -> Config:
    model = {"family": "vit", "image_size": size, "patch_size": patch, "channels": channels, "vocab_size": 10}
    data = {"source": source, "images": images, "validation": 0.0}
    return load({"model": model, "data": data, "train": {"global_batch_size": batch}})


def write_photos(folder: Path) -> None:
    """Smooth colours with some noise, so that a file has about as many bytes as a photo of this size."""
    draw = np.random.default_rng(0)
    for number in range(PHOTOS):
        place = folder / f"{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        pixels = smooth + draw.normal(0, 8, smooth.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.jpg", quality=90)


def row(made: Table, images: str, name: str, given: Config, bare: Callable[..., Any], seconds: float) -> None:
    train, _ = open_data(given)
    size = given.train.global_batch_size
    sides: dict[str, Callable[[int], Any]] = {"ours": train.batch, "bare": bare(train, given)}
    best = dict.fromkeys(sides, 0.0)
    for _ in range(TURNS):
        for side, batch in sides.items():
            began, k = time.process_time(), 0
            while (spent := time.process_time() - began) < seconds / TURNS / 2:
                batch(k)
                k += 1
            best[side] = max(best[side], k * size / spent)
    ours, other = best["ours"], best["bare"]
    made.add_row(images, name, f"{ours:,.0f}", f"{other:,.0f}", f"{ours / other:.2f}")


def normalised(pixels: np.ndarray, patch: int) -> np.ndarray:
    return patches((pixels.astype(np.float32) / 255 - 0.5) / 0.5, patch)


def bare_digits(train: SplitBatches, given: Config) -> Callable[[int], Any]:
    rows = train.batches.rows  # type: ignore[attr-defined]
    pixels, labels, size = rows.pictures.images, rows.pictures.labels, given.train.global_batch_size
    order = np.random.default_rng(0).permutation(len(labels))

    def batch(k: int) -> Any:
        chosen = order[np.arange(k * size, (k + 1) * size) % len(order)]
        return normalised(pixels[chosen], given.model.patch_size), labels[chosen]

    return batch


def bare_photos(train: SplitBatches, given: Config) -> Callable[[int], Any]:
    rows = train.batches.rows  # type: ignore[attr-defined]
    paths, size, images = rows.pictures.paths, given.train.global_batch_size, given.data.images
    draw = np.random.default_rng(0)

    def one(path: str) -> np.ndarray:
        image = Image.open(path).convert("RGB")
        side = int(min(image.size) * (draw.uniform(0.4, 1) if images.crop < 1 else 1))
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(0, 0, side, side))
        if images.flip and draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for _ in range(images.operations if images.policy == "randaugment" else 0):
            image = OPERATIONS[RANDAUGMENT[draw.integers(14)]](image, 0.3, 1)
        return np.asarray(image)

    def batch(k: int) -> Any:
        return normalised(np.stack([one(paths[(k * size + r) % len(paths)]) for r in range(size)]), 16)

    return batch


if __name__ == "__main__":
    main()
