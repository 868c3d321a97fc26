"""What goes together of images and of text, and what does not."""

from typing import Any

import pytest
from refusals import tells

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
    return {
        name: {**base.get(name, {}), **changes.get(name, {})} for name in base | changes
    }


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
        ({"data": {"format": "chat"}}, "data.format is chat, ... family vit"),
        (
            {"train": {"objective": "dpo"}},
            "train.objective is dpo, ... family vit",
        ),
        (
            {"data": {"source": "stdlib"}},
            "data.source is stdlib, ... folder ... arrays, or synthetic or digits",
        ),
        (
            {"data": {"validation_source": "stdlib"}},
            "data.validation_source is stdlib, ... images",
        ),
        (
            {"data": {"source": "synthetic", "validation_source": "x"}},
            "data.source synthetic ... held-out images",
        ),
        ({"data": {"batching": "packed"}}, "data.batching is packed, ... images"),
        ({"data": {"template": "x.jinja"}}, "data.template is x.jinja, ... images"),
        ({"data": {"tokenizer": "t.json"}}, "data.tokenizer is t.json, ... images"),
        (
            {"data": {"source": "mixture", "mixture": ["a"], "weights": [1.0]}},
            "data.mixture is",
        ),
        (
            {"model": {"patch_size": 3}},
            "patch_size 3 ... image_size 8; legal are 1, 2, 4, 8",
        ),
        (
            {"train": {"sequence_length": 20}},
            "train.sequence_length is 20, ... 17 positions",
        ),
        (
            {"data": {"images": {"mean": [0.1, 0.2]}}},
            "data.images.mean has 2 ... channels is 1",
        ),
        (
            {"data": {"images": {"std": [0.1, 0.2, 0.3]}}},
            "data.images.std has 3 numbers",
        ),
        ({"data": {"images": {"shift": 8}}}, "data.images.shift is 8, which moves"),
        (
            {"model": {"channels": 2}, "data": {"images": {"policy": "randaugment"}}},
            "data.images.policy ... model.channels is 2",
        ),
        ({"data": {"images": {"policy": "randaug"}}}, "did you mean randaugment"),
        (
            LLAMA | {"data": {"format": "images"}},
            "data.format is images, ... llama ... vit",
        ),
        (
            LLAMA | {"train": {"objective": "classify"}},
            "train.objective is classify, ... llama",
        ),
        (
            LLAMA | {"data": {"source": "digits"}},
            "data.source is digits, ... llama",
        ),
        (
            LLAMA | {"data": {"source": "stdlib", "images": {"flip": 0.5}}},
            "section data.images ... model.family llama",
        ),
    ],
)
def test_what_no_images_or_no_text_go_with_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(merged(changes))
    assert tells(str(error.value), said)
