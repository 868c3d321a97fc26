"""Images in arrays: names and shapes that are taken and refused, and what is read of them."""

from pathlib import Path

import numpy as np
import pytest
from image_configs import image_config, refusal
from refusals import tells

from meshtrain.data import open_data
from meshtrain.data.images.image_sources import open_arrays

DRAW = np.random.default_rng(0)
GREY = DRAW.integers(0, 256, (20, 8, 8), dtype=np.uint8)
COLOURS = DRAW.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
LABELS = np.arange(20) % 4


def write(path: Path, kind: str, **arrays: np.ndarray) -> Path:
    if kind == "folder":
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
        return path
    write_arrays = np.savez if kind == "plain" else np.savez_compressed
    write_arrays(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


@pytest.mark.parametrize("kind", ["plain", "compressed", "folder"])
@pytest.mark.parametrize(
    "names",
    [
        ("images", "labels"),
        ("x", "y"),
        ("train_images", "train_labels"),
        ("x_train", "y_train"),
    ],
)
def test_arrays_are_read_as_they_are_under_the_names_that_people_give_them(
    tmp_path, kind, names
):
    path = write(
        tmp_path / "data",
        kind,
        **dict(zip(names, (COLOURS, LABELS[:, None]), strict=True)),
        other=np.ones(3),
    )
    source = open_arrays(path, image_config(path, channels=3))
    assert all(np.array_equal(source.pictures.pixels(i), COLOURS[i]) for i in range(20))
    assert source.pictures.labels.tolist() == LABELS.tolist() and source.classes == (
        "0",
        "1",
        "2",
        "3",
    )
    mapped = isinstance(source.pictures.parts[0].images, np.memmap)  # type: ignore[attr-defined]
    assert mapped == (kind == "folder")


def test_arrays_are_read_in_both_orders_and_all_number_types(tmp_path):
    floats = (GREY / 255).astype(">f4")
    path = write(
        tmp_path / "data",
        "folder",
        images=np.asfortranarray(floats),
        labels=LABELS.astype(np.uint8),
    )
    source = open_arrays(path, image_config(path))
    assert all(
        np.array_equal(source.pictures.pixels(i)[..., 0], GREY[i]) for i in range(20)
    )


def test_held_out_arrays_beside_those_to_train_on_are_the_validation_split(tmp_path):
    path = write(
        tmp_path / "data",
        "plain",
        x_train=GREY[:15],
        y_train=LABELS[:15],
        x_test=GREY[15:],
        y_test=LABELS[15:],
    )
    train, held = open_data(image_config(path, batch=5))
    assert held is not None and (train.batches_per_epoch, held.batches_per_epoch) == (
        3,
        1,
    )
    found = {row.tobytes() for row in held.batch(0)["patches"]}
    whole, _ = open_data(
        image_config(
            write(tmp_path / "all", "plain", x=GREY[15:], y=LABELS[15:]),
            batch=5,
            validation=0.0,
        )
    )
    assert {row.tobytes() for row in whole.batch(0)["patches"]} == found
    assert tells(refusal(path, validation=0.2), "x_test ... leave the key out")


def test_a_share_of_arrays_is_held_out_to_the_image(tmp_path):
    path = write(tmp_path / "data", "folder", images=GREY, labels=LABELS)
    train, held = open_data(image_config(path, batch=5, validation=0.25))
    assert held is not None and (train.batches_per_epoch, held.batches_per_epoch) == (
        3,
        1,
    )
    rows = {
        row.tobytes()
        for b in (train, held)
        for k in range(b.batches_per_epoch)
        for row in b.batch(k)["patches"]
    }
    assert len(rows) == 20


def test_the_digest_follows_from_the_content(tmp_path):
    first = open_data(
        image_config(write(tmp_path / "a", "folder", images=GREY, labels=LABELS))
    )[0].digest
    assert (
        open_data(
            image_config(write(tmp_path / "b", "folder", images=GREY, labels=LABELS))
        )[0].digest
        == first
    )
    other = GREY.copy()
    other[3, 4, 5] ^= 1
    assert (
        open_data(
            image_config(write(tmp_path / "c", "folder", images=other, labels=LABELS))
        )[0].digest
        != first
    )
    assert open_data(image_config(tmp_path / "a", validation=0.3))[0].digest != first


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"images": GREY}, "no pair of images and labels"),
        (
            {"images": GREY[0], "labels": LABELS},
            "shape [8, 8]; it must be [n, height, width]",
        ),
        (
            {"images": GREY.astype(np.int64), "labels": LABELS},
            "are int64; they must be uint8",
        ),
        (
            {"images": GREY, "labels": LABELS[:5]},
            "int64[5]; for 20 images ... 20 whole numbers",
        ),
        ({"images": GREY, "labels": LABELS / 2}, "are float64[20]"),
        ({"images": GREY, "labels": LABELS - 1}, "the class -1; classes ... from 0"),
        ({"images": GREY / 16, "labels": LABELS}, "floats must be from 0 to 1"),
        (
            {"images": np.full((4, 8, 8), np.nan), "labels": LABELS[:4]},
            "has numbers from nan to nan",
        ),
        (
            {"images": COLOURS.transpose(0, 3, 1, 2), "labels": LABELS},
            "channels first; they must come last",
        ),
        (
            {"images": COLOURS[..., :2], "labels": LABELS},
            "2 channels, but model.channels is 1; give 2",
        ),
        ({"images": GREY, "labels": LABELS.astype(object)}, "holds no arrays"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "folder"])
def test_arrays_that_are_no_images_with_classes_are_refused(
    tmp_path, kind, arrays, said
):
    assert tells(refusal(write(tmp_path / "data", kind, **arrays)), said)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.95])
def test_a_file_that_is_cut_off_is_refused(tmp_path, keep):
    path = write(tmp_path / "data", "plain", images=GREY, labels=LABELS)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert "holds no arrays" in refusal(path)
