"""From a config to batches of images: what is opened, held out, refused, and by what it is known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_configs import image_config, write_images

from meshtrain.data import open_data
from meshtrain.data.digests import digests
from meshtrain.errors import ConfigError


def refusal(source: Path | str, **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        open_data(image_config(source, **more))
    return str(error.value)


def test_digits_are_1437_to_train_on_and_360_held_out_always_the_same() -> None:
    train, held = open_data(image_config("digits", batch=36))
    assert held is not None and train.describe() == "digits: 39 batches an epoch of 36 images; 10 classes"
    assert held.batches_per_epoch == 10 and "weights" not in held.batch(0)
    pixels = [held.batch(k)["patches"].tobytes() for k in range(10)]
    other, again = open_data(image_config("digits", batch=36, seed=5))
    assert again is not None and again.digest == held.digest and other.digest == train.digest != held.digest
    rows = lambda found: sorted(row.tobytes() for k in range(10) for row in found.batch(k)["patches"])  # noqa: E731
    assert rows(again) == rows(held) and pixels != [again.batch(k)["patches"].tobytes() for k in range(10)]
    classes = np.bincount(np.concatenate([held.batch(k)["labels"][:, 0] for k in range(10)]), minlength=10)
    assert classes.min() >= 20 and classes.sum() == 360


def test_digits_have_the_share_held_out_that_is_asked_for() -> None:
    _, held = open_data(image_config("digits", validation=0.1, batch=10))
    assert held is not None and len(held.batches.rows.indices) == 180  # type: ignore[attr-defined]


def test_drawn_images_follow_from_the_seed_and_fill_the_classes() -> None:
    given = {"size": 6, "patch": 3, "channels": 2, "classes": 7, "batch": 200}
    train, held = open_data(image_config("synthetic", **given))
    again, other = (open_data(image_config("synthetic", seed=seed, **given))[0] for seed in (0, 1))
    batch = train.batch(4)
    assert held is not None and batch["patches"].shape == (200, 4, 18) and train.digest == ""
    assert np.array_equal(again.batch(4)["patches"], batch["patches"])
    assert not any(np.array_equal(b.batch(4)["patches"], batch["patches"]) for b in (other, held))
    assert set(batch["labels"][:, 0].tolist()) == set(range(7))
    assert batch["patches"].min() == -1 and batch["patches"].max() == 1


def test_more_classes_than_the_model_has_are_refused_with_their_number(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 3, "b": 3, "c": 3})
    said = refusal(tmp_path, channels=3, classes=2)
    assert "model.vocab_size 2 is less than the 3 classes of data.source" in said and said.endswith("give at least 3.")
    open_data(image_config(tmp_path, channels=3, classes=3))


def test_too_few_images_are_told_with_their_number(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 3, "b": 2})
    said = refusal(tmp_path, channels=3, validation=0.0, batch=6)
    assert (
        "holds 5 images for train, fewer than train.global_batch_size 6; give a smaller batch, or data.last: pad"
        in said
    )
    assert open_data(image_config(tmp_path, channels=3, validation=0.0, batch=6, last="pad"))[1] is None
    from meshtrain.config import load

    asked = load(image_config(tmp_path, channels=3, validation=0.0, batch=5), ["eval.every=1"])
    with pytest.raises(
        ConfigError, match=r"eval\.every is 1, but of held-out images .* holds no image for validation; hold out"
    ):
        open_data(asked)


def test_a_source_that_is_not_there_is_reported_with_the_nearest_spelling(tmp_path: Path) -> None:
    assert refusal("digit").endswith("or synthetic or digits; did you mean digits?")
    (tmp_path / "a.png").write_bytes(b"")
    assert "is a file, but none of arrays" in refusal(tmp_path / "a.png")


def test_held_out_images_may_be_a_source_of_their_own_with_the_same_classes(tmp_path: Path) -> None:
    write_images(tmp_path / "one", {"a": 4, "b": 4})
    write_images(tmp_path / "two", {"a": 2, "b": 3}, seed=1)
    write_images(tmp_path / "three", {"a": 2, "c": 3}, seed=2)
    write_images(tmp_path / "four", {"b": 2}, seed=3)
    given = image_config(tmp_path / "one", channels=3, validation=0.0, batch=4, validation_source=str(tmp_path / "two"))
    train, held = open_data(given)
    assert held is not None and len(held.batches.rows.indices) == 5  # type: ignore[attr-defined]
    assert digests(given, train, held).keys() == {"digest", "validation_digest"}
    more = {"channels": 3, "validation": 0.0, "batch": 4}
    assert "has a class c that data.source has not" in refusal(
        tmp_path / "one", validation_source=str(tmp_path / "three"), **more
    )
    assert "its labels mean others" in refusal(tmp_path / "one", validation_source=str(tmp_path / "four"), **more)


def test_the_digest_names_what_is_read_and_not_where_it_lies(tmp_path: Path) -> None:
    import shutil

    write_images(tmp_path / "one", {"a": 4, "b": 4})
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "one", copy_function=shutil.copy)

    def digest(folder: Path) -> str:
        return open_data(image_config(folder, channels=3, validation=0.0))[0].digest

    before, copy = digest(tmp_path / "one"), tmp_path / "elsewhere" / "one"
    assert digest(copy) == before and len(before) == 16
    write_images(tmp_path / "other", {"a": 1}, seed=9)
    shutil.copy(tmp_path / "other" / "a" / "0.png", copy / "a" / "2.png")
    altered = digest(copy)
    assert altered != before
    shutil.move(copy / "a" / "3.png", copy / "b" / "9.png")
    assert digest(copy) not in (before, altered)
