"""Batches of images: pure functions of seed, step and row, whoever reads which part of them, and what they hold."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from image_configs import image_config, refusal, write_images
from refusals import tells

from meshtrain.config import Config, load
from meshtrain.data import SplitBatches, open_data
from meshtrain.data.batches import digests
from meshtrain.data.images.pixels import unpatched
from meshtrain.errors import ConfigError

EVERYTHING = {
    "crop": 0.5,
    "flip": 0.5,
    "policy": "randaugment",
    "shift": 1,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mixed": 0.8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 images of two classes."""
    path = tmp_path_factory.mktemp("images") / "folder"
    write_images(path, {"cat": 12, "dog": 11})
    return path


def changed(source: Path | str, **more) -> Config:
    return image_config(source, channels=3, images=EVERYTHING, validation=0.0, **more)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def part(batch: dict[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    return {name: x[rows] for name, x in batch.items()}


def pictures(batches: SplitBatches, k: int, **rows) -> np.ndarray:
    """The pixels of a batch, 0 to 255."""
    images = unpatched(batches.batch(k, **rows)["patches"], 2)
    return np.rint((images * 0.5 + 0.5) * 255).astype(int)


@pytest.mark.parametrize(
    ("policy", "last"), [("randaugment", "pad"), ("autoaugment", "drop")]
)
def test_rows_of_a_batch_are_those_of_the_whole_batch_whoever_reads_them(
    policy, last, folder
):
    for size in (6, 5):
        images = EVERYTHING | {"policy": policy}
        given = image_config(
            folder, channels=3, batch=size, images=images, validation=0.0, last=last
        )
        train, _ = open_data(given)
        for k in (0, train.batches_per_epoch - 1, 7):
            batch = train.batch(k)
            assert {"patches", "labels", "labels_b", "mix"} <= batch.keys()
            for rows in (
                slice(0, 1),
                slice(1, 2),
                slice(1, size),
                slice(2, 4),
                slice(size - 1, size),
                slice(0, 0),
            ):
                fresh, _ = open_data(given)
                assert same(fresh.batch(k, rows), part(batch, rows)), (size, k, rows)


def test_a_batch_follows_from_seed_and_step_and_every_one_differs(folder):
    train, _ = open_data(changed(folder))
    again, _ = open_data(changed(folder))
    other, _ = open_data(changed(folder, seed=1))
    per = train.batches_per_epoch
    batches = [train.batch(k) for k in range(2 * per)]
    assert all(same(again.batch(k), batches[k]) for k in reversed(range(2 * per)))
    assert not any(
        np.array_equal(batches[0]["patches"], batch["patches"]) for batch in batches[1:]
    )
    assert not np.array_equal(other.batch(0)["patches"], batches[0]["patches"])


def test_an_epoch_holds_every_image_once_in_an_order_of_its_own(folder):
    train, _ = open_data(
        image_config(folder, size=10, channels=3, validation=0.0, last="pad", batch=6)
    )
    assert train.batches_per_epoch == 4
    epochs = []
    for epoch in range(2):
        batches = [train.batch(k) for k in range(4 * epoch, 4 * epoch + 4)]
        assert (
            sum(int(batch["weights"].sum()) for batch in batches) == 23
            and not batches[3]["weights"][5:].any()
        )
        rows = [
            row.tobytes()
            for batch in batches
            for row in batch["patches"][batch["weights"][:, 0] > 0]
        ]
        assert len(set(rows)) == 23
        epochs.append(rows)
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


@pytest.mark.parametrize("last", ["pad", "drop"])
def test_mixed_images_are_what_their_labels_and_shares_say(folder, last):
    """Nothing else is random here, so each row can be told from the unmixed batch of the same seed."""
    shape = {"size": 10, "channels": 3, "validation": 0.0, "batch": 5, "last": last}
    plain, _ = open_data(image_config(folder, **shape))
    mixup, _ = open_data(image_config(folder, images={"mixup": 0.8}, **shape))
    cutmix, _ = open_data(image_config(folder, images={"cutmix": 1.0}, **shape))
    for k in (0, 3, 4, 9):
        x, rows = plain.batch(k), 3 if last == "pad" and k in (4, 9) else 5
        beside = [r ^ 1 if r ^ 1 < rows else r - 1 for r in range(rows)]
        for mixed in (mixup.batch(k), cutmix.batch(k)):
            assert np.array_equal(mixed["labels"], x["labels"])
            assert np.array_equal(mixed["labels_b"][:rows], x["labels"][beside])
            assert ((mixed["mix"] >= 0) & (mixed["mix"] <= 1)).all()
        share = mixup.batch(k)["mix"][:rows, :, None]
        blend = share * x["patches"][:rows] + (1 - share) * x["patches"][:rows][beside]
        np.testing.assert_allclose(mixup.batch(k)["patches"][:rows], blend, atol=1e-6)
        three = cutmix.batch(k)["patches"], x["patches"], x["patches"][:rows][beside]
        found, first, second = (unpatched(y[:rows], 2) for y in three)
        left = (found == first).all(-1)
        assert (left | (found == second).all(-1)).all()
        np.testing.assert_allclose(
            left.mean((1, 2)), cutmix.batch(k)["mix"][:rows, 0], atol=1e-6
        )


def test_held_out_images_are_not_changed_and_none_is_left_out(folder):
    given = image_config(
        folder,
        size=10,
        channels=3,
        images={**EVERYTHING, "crop": 0.3},
        validation=0.3,
        batch=4,
    )
    plain = image_config(folder, size=10, channels=3, validation=0.3, batch=4)
    (_, held), (_, untouched) = open_data(given), open_data(plain)
    many = held.batches_per_epoch
    for k in range(many):
        assert same(held.batch(k), untouched.batch(k)) and "mix" not in held.batch(k)
    count = sum(
        int(held.batch(k).get("weights", np.ones(4)).sum()) for k in range(many)
    )
    assert count == len(held.batches.rows.indices) and count % 4  # type: ignore[attr-defined]


def test_rows_that_fill_a_batch_up_for_the_mesh_are_empty(folder):
    uneven = load(changed(folder, batch=5), ["train.uneven_batch=pad", "mesh.data=4"])
    train, alone = open_data(uneven)[0], open_data(changed(folder, batch=5))[0]
    assert train.batch_shape(0) == (8, 17) and train.tokens(0) == 5 * 17
    batch = train.batch(0)
    assert same(
        {name: x[:5] for name, x in batch.items() if name != "weights"}, alone.batch(0)
    )
    assert (
        batch["weights"].tolist() == [[1.0]] * 5 + [[0.0]] * 3
        and not batch["patches"][5:].any()
    )
    assert same(train.batch(0, slice(4, 8)), part(batch, slice(4, 8)))


def test_many_threads_make_of_large_images_what_one_makes(folder, monkeypatch):
    given = image_config(
        folder,
        size=64,
        patch=16,
        channels=3,
        images=EVERYTHING,
        validation=0.0,
        batch=8,
    )
    threaded = open_data(given)[0].batch(3)
    monkeypatch.setattr("meshtrain.data.images.image_batches.LARGE", 1000)
    assert same(open_data(given)[0].batch(3), threaded)


def test_an_image_that_vanishes_while_a_run_goes_on_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    train, _ = open_data(
        image_config(tmp_path / "copy", channels=3, validation=0.0, batch=23)
    )
    (tmp_path / "copy" / "dog" / "4.png").unlink()
    with pytest.raises(ConfigError, match=r"dog/4\.png .* cannot be now"):
        train.batch(0)


@pytest.mark.thorough
def test_digits_are_1437_to_train_on_and_360_held_out_always_the_same():
    train, held = open_data(image_config("digits", batch=36))
    assert held is not None and re.fullmatch(
        r"digits: 39 batches .* 36 images; 10 classes", train.describe()
    )
    assert held.batches_per_epoch == 10 and "weights" not in held.batch(0)
    pixels = [held.batch(k)["patches"].tobytes() for k in range(10)]
    other, again = open_data(image_config("digits", batch=36, seed=5))
    assert (
        again is not None
        and again.digest == held.digest
        and other.digest == train.digest != held.digest
    )
    rows = lambda found: sorted(
        row.tobytes() for k in range(10) for row in found.batch(k)["patches"]
    )
    assert rows(again) == rows(held) and pixels != [
        again.batch(k)["patches"].tobytes() for k in range(10)
    ]
    classes = np.bincount(
        np.concatenate([held.batch(k)["labels"][:, 0] for k in range(10)]), minlength=10
    )
    assert classes.min() >= 20 and classes.sum() == 360


@pytest.mark.thorough
def test_digits_have_the_share_held_out_that_is_asked_for():
    _, held = open_data(image_config("digits", validation=0.1, batch=10))
    assert held is not None and len(held.batches.rows.indices) == 180  # type: ignore[attr-defined]


def test_drawn_images_follow_from_the_seed_and_fill_the_classes():
    given = {"size": 6, "patch": 3, "channels": 2, "classes": 7, "batch": 200}
    train, held = open_data(image_config("synthetic", **given))
    again, other = (
        open_data(image_config("synthetic", seed=seed, **given))[0] for seed in (0, 1)
    )
    batch = train.batch(4)
    assert (
        held is not None
        and batch["patches"].shape == (200, 4, 18)
        and train.digest == ""
    )
    assert np.array_equal(again.batch(4)["patches"], batch["patches"])
    assert not any(
        np.array_equal(b.batch(4)["patches"], batch["patches"]) for b in (other, held)
    )
    assert set(batch["labels"][:, 0].tolist()) == set(range(7))
    assert batch["patches"].min() == -1 and batch["patches"].max() == 1


def test_more_classes_than_the_model_has_are_refused_with_their_number(tmp_path):
    write_images(tmp_path, {"a": 3, "b": 3, "c": 3})
    said = refusal(tmp_path, channels=3, classes=2)
    assert tells(said, "model.vocab_size 2 ... 3 classes ... data.source")
    assert said.endswith("give at least 3.")
    open_data(image_config(tmp_path, channels=3, classes=3))


def test_images_that_fill_no_batch_are_padded_and_none_held_out_is_refused(tmp_path):
    write_images(tmp_path, {"a": 3, "b": 2})
    train, held = open_data(image_config(tmp_path, channels=3, validation=0.0, batch=6))
    assert (
        held is None
        and train.batches_per_epoch == 1
        and train.batch(0)["weights"].sum() == 5
    )
    assert tells(train.describe(), "no batch ... global_batch_size 6 ... padded")
    asked = load(
        image_config(tmp_path, channels=3, validation=0.0, batch=5), ["eval.every=1"]
    )
    says = r"eval\.every is 1, .* no image .* hold"
    with pytest.raises(ConfigError, match=says):
        open_data(asked)


def test_a_source_that_is_not_there_is_reported_with_the_nearest_spelling(tmp_path):
    assert re.search(r"synthetic or digits; .* mean digits\?$", refusal("digit"))
    (tmp_path / "a.png").write_bytes(b"")
    assert "is a file, but none of arrays" in refusal(tmp_path / "a.png")


def test_held_out_images_may_be_a_source_of_their_own_with_the_same_classes(tmp_path):
    write_images(tmp_path / "one", {"a": 4, "b": 4})
    write_images(tmp_path / "two", {"a": 2, "b": 3}, seed=1)
    write_images(tmp_path / "three", {"a": 2, "c": 3}, seed=2)
    write_images(tmp_path / "four", {"b": 2}, seed=3)
    given = image_config(
        tmp_path / "one",
        channels=3,
        validation=0.0,
        batch=4,
        validation_source=str(tmp_path / "two"),
    )
    train, held = open_data(given)
    assert held is not None and len(held.batches.rows.indices) == 5  # type: ignore[attr-defined]
    assert digests(given, train, held).keys() == {"digest", "validation_digest"}
    for name, says in (
        ("three", "class c that data.source has not"),
        ("four", "its labels mean others"),
    ):
        own = {
            "channels": 3,
            "validation": 0.0,
            "batch": 4,
            "validation_source": str(tmp_path / name),
        }
        assert says in refusal(tmp_path / "one", **own)


def test_the_digest_names_what_is_read_and_not_where_it_lies(tmp_path):
    write_images(tmp_path / "one", {"a": 4, "b": 4})
    shutil.copytree(
        tmp_path / "one", tmp_path / "elsewhere" / "one", copy_function=shutil.copy
    )

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
