"""Configs that read images, and folders of them, for the tests of image data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshtrain.config import Config, ConfigError, load
from meshtrain.data import open_data


def image_config(
    source: Path | str,
    *,
    size: int = 8,
    patch: int = 2,
    channels: int = 1,
    classes: int = 10,
    batch: int = 6,
    seed: int = 0,
    images: dict[str, Any] | None = None,
    **data: Any,
) -> Config:
    """A config that reads `source` in batches of `batch` images."""
    model = {
        "family": "vit",
        "image_size": size,
        "patch_size": patch,
        "channels": channels,
        "vocab_size": classes,
    }
    sections = {
        "model": {**model, "layers": 1, "d_model": 16, "heads": 2},
        "data": {"source": str(source), "images": images or {}, **data},
    }
    return load(
        {**sections, "train": {"global_batch_size": batch}, "run": {"seed": seed}}
    )


def refusal(source: Path | str, **more: Any) -> str:
    """The sentence with which a config of images is refused."""
    with pytest.raises(ConfigError) as error:
        open_data(image_config(source, **more))
    return str(error.value)


def write_images(
    folder: Path,
    classes: dict[str, int],
    size: tuple[int, int] = (12, 10),
    seed: int = 0,
) -> None:
    """So many PNG files of random pixels, width x height, for each class."""
    draw = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
