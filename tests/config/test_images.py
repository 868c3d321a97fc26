"""What goes together of images and of text, and what does not."""

from typing import Any

import pytest

from meshtrain.config import load
from meshtrain.errors import ConfigError

VIT: dict[str, Any] = {
    "model": {"family": "vit", "image_size": 8, "patch_size": 2, "channels": 1},
    "data": {"source": "digits"},
}


LLAMA = {"model": {"family": "llama"}}


def merged(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The changes of a config of images; of one of text themselves."""
    base = {} if changes.get("model") == LLAMA["model"] else VIT
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in base | changes}


def test_a_family_of_images_has_its_format_objective_positions_and_batching() -> None:
    config = load(VIT)
    assert (config.data.format, config.train.objective, config.data.batching) == (
        "images",
        "classify",
        "window",
    )
    assert config.train.sequence_length == 17
    assert load(merged({"model": {"pool": "mean"}})).train.sequence_length == 16
    load(
        merged(
            {
                "train": {"label_smoothing": 0.1},
                "data": {"images": {"mean": [0.1], "std": [0.2], "mixup": 0.8}},
            }
        )
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"format": "chat"}}, "data.format is chat, but model.family vit reads images"),
        (
            {"train": {"objective": "dpo"}},
            "train.objective is dpo, but model.family vit reads images",
        ),
        (
            {"data": {"source": "stdlib"}},
            "data.source is stdlib, which holds no images; name a folder of them, arrays, or synthetic or digits",
        ),
        (
            {"data": {"validation_source": "stdlib"}},
            "data.validation_source is stdlib, which holds no images",
        ),
        (
            {"data": {"source": "synthetic", "validation_source": "x"}},
            "with data.source synthetic the held-out images are drawn too",
        ),
        ({"data": {"batching": "packed"}}, "data.batching is packed, but images have none"),
        ({"data": {"template": "x.jinja"}}, "data.template is x.jinja, but images have none"),
        ({"data": {"tokenizer": "t.json"}}, "data.tokenizer is t.json, but images have none"),
        ({"data": {"source": "mixture", "mixture": ["a"], "weights": [1.0]}}, "data.mixture is"),
        (
            {"model": {"patch_size": 3}},
            "model.patch_size 3 does not divide model.image_size 8; legal are 1, 2, 4, 8",
        ),
        (
            {"train": {"sequence_length": 20}},
            "train.sequence_length is 20, but an image has 17 positions",
        ),
        (
            {"data": {"images": {"mean": [0.1, 0.2]}}},
            "data.images.mean has 2 numbers, but model.channels is 1",
        ),
        ({"data": {"images": {"std": [0.1, 0.2, 0.3]}}}, "data.images.std has 3 numbers"),
        ({"data": {"images": {"shift": 8}}}, "data.images.shift is 8, which moves"),
        (
            {"model": {"channels": 2}, "data": {"images": {"policy": "randaugment"}}},
            "data.images.policy is randaugment, but model.channels is 2",
        ),
        ({"data": {"images": {"policy": "randaug"}}}, "did you mean randaugment"),
        (
            LLAMA | {"data": {"format": "images"}},
            "data.format is images, but model.family llama reads text; of images is vit",
        ),
        (
            LLAMA | {"train": {"objective": "classify"}},
            "train.objective is classify, but model.family llama reads text",
        ),
        (
            LLAMA | {"data": {"source": "digits"}},
            "data.source is digits, which holds images, but model.family llama reads text",
        ),
        (
            LLAMA | {"data": {"source": "stdlib", "images": {"flip": 0.5}}},
            "the section data.images asks for something, but model.family llama reads text",
        ),
    ],
)
def test_what_no_images_or_no_text_go_with_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(merged(changes))
    assert said in str(error.value)
