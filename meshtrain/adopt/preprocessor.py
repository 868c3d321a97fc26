"""preprocessor_config.json of a Hugging Face directory: how pixels become what a model of images reads; our section data.images says it.

    theirs                                        ours
    image_mean, image_std, do_normalize           data.images.mean, data.images.std
    size {height, width}, or a number             data.images.resize stretch
    size {shortest_edge}, do_center_crop          data.images.resize crop

Pixels are from 0 to 1 before the mean is taken, here and there (rescale_factor 1 / 255). No JAX.
"""

import json
import math
from pathlib import Path
from typing import Any

from meshtrain.config import Config
from meshtrain.config.theirs import read_json
from meshtrain.errors import ConfigError, short

PREPROCESSOR = "preprocessor_config.json"
BILINEAR = 2  # of Pillow, as images are resized here


def section(directory: Path) -> dict[str, Any]:
    """The section data.images that a directory asks for; {} where it says nothing of pixels. ConfigError for what is not computed here."""
    path = directory / PREPROCESSOR
    if not path.is_file():
        return {}
    given = read_json(path)
    scale = given.get("rescale_factor", 1 / 255)
    if given.get("do_rescale") is False or not isinstance(scale, float) or not math.isclose(scale, 1 / 255):
        raise ConfigError(
            f"{short(path)}: pixels that are not from 0 to 1 are not computed here; rescale_factor must be 1 / 255."
        )
    size = given.get("size")
    found: dict[str, Any] = {"resize": "crop" if isinstance(size, dict) and "shortest_edge" in size else "stretch"}
    if given.get("do_normalize") is False:
        return found | {"mean": [0.0], "std": [1.0]}
    for ours in ("mean", "std"):
        if (values := given.get(f"image_{ours}")) is not None:
            found[ours] = values if isinstance(values, list) else [values]
    return found


def written(config: Config) -> str:
    """preprocessor_config.json of a resolved config's images."""
    images, model = config.data.images, config.model
    channels = {name: list(getattr(images, name) or (0.5,)) for name in ("mean", "std")}
    by_channel = {f"image_{name}": values * (model.channels // len(values)) for name, values in channels.items()}
    side = model.image_size
    cut = {"do_center_crop": True, "crop_size": {"height": side, "width": side}, "size": {"shortest_edge": side}}
    whole = {"size": {"height": side, "width": side}}
    given = {
        "image_processor_type": "ViTImageProcessor", "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True,
        "resample": BILINEAR,
    }  # fmt: skip
    return json.dumps(given | by_channel | (cut if images.resize == "crop" else whole), indent=2) + "\n"
