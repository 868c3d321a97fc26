"""Folders of images: their layouts and classes, and files that are no images."""

import builtins
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_configs import image_config, write_images
from PIL import Image
from refusals import tells

from meshtrain.data import open_data
from meshtrain.data.images.folders import decoded, problem_of
from meshtrain.data.images.image_batches import ImageBatches
from meshtrain.errors import ConfigError, install_command


def opened(folder: Path, **more: Any) -> tuple[ImageBatches, ImageBatches | None]:
    return open_data(image_config(folder, **{"channels": 3, "batch": 2, **more}))  # type: ignore[return-value]


def refusal(folder: Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        opened(folder, **more)
    return str(error.value)


def names(batches: ImageBatches) -> list[str]:
    """Class and file of each image of a split."""
    rows = batches.batches.rows  # type: ignore[attr-defined]
    paths = [Path(rows.pictures.paths[i]) for i in rows.indices]
    assert [batches.classes[rows.pictures.labels[i]] for i in rows.indices] == [
        path.parent.name for path in paths
    ]
    return sorted(f"{path.parent.name}/{path.name}" for path in paths)


@pytest.mark.parametrize("validation", ["validation", "val"])
def test_a_folder_with_train_and_validation_has_its_own_split(tmp_path, validation):
    write_images(tmp_path / "train", {"dog": 3, "cat": 2})
    write_images(tmp_path / validation, {"cat": 3}, seed=1)
    train, held = opened(tmp_path)
    assert train.classes == ("cat", "dog") and held is not None
    assert names(train) == [
        "cat/0.png",
        "cat/1.png",
        "dog/0.png",
        "dog/1.png",
        "dog/2.png",
    ]
    assert names(held) == ["cat/0.png", "cat/1.png", "cat/2.png"]
    assert "2 classes (cat, dog)" in train.describe()
    assert tells(
        refusal(tmp_path, validation=0.1),
        f"a folder {validation} ... leave the key out",
    )
    write_images(tmp_path / validation, {"fox": 1})
    assert "has a class fox that" in refusal(tmp_path)
    (tmp_path / "val").mkdir(exist_ok=True)
    (tmp_path / "validation").mkdir(exist_ok=True)
    assert "has both validation and val" in refusal(tmp_path)


@pytest.mark.parametrize("inside", ["", "train"])
def test_without_held_out_images_a_share_is_held_out_by_name(tmp_path, inside):
    write_images(tmp_path / inside, {"a": 30, "b": 30}, size=(4, 4))
    train, held = opened(tmp_path, size=4, validation=0.3)
    assert held is not None
    both = names(train) + names(held)
    assert len(set(both)) == 60 and 8 <= len(names(held)) <= 28
    (tmp_path / inside / "a" / "0.png").unlink()
    (tmp_path / inside / "a" / "1.png").unlink()
    _, after = opened(tmp_path, size=4, validation=0.3)
    assert after is not None and set(names(after)) == set(names(held)) - {
        "a/0.png",
        "a/1.png",
    }


def test_folders_within_a_class_belong_to_it_and_what_is_hidden_or_no_image_does_not(
    tmp_path,
):
    write_images(tmp_path, {"cat": 1, "cat/more": 1, ".cache": 1, "dog": 1})
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    Image.new("RGB", (4, 4)).save(tmp_path / "stray.png")
    train, _ = opened(tmp_path, validation=0.0)
    assert train.classes == ("cat", "dog") and len(train.batches.rows.indices) == 3  # type: ignore[attr-defined]
    assert re.search(r"1 images .* no class's folder .* left out$", train.describe())


def test_a_class_without_images_and_a_folder_without_classes_are_refused(tmp_path):
    assert tells(refusal(tmp_path), "holds no folder; each class ... one")
    (tmp_path / "empty").mkdir()
    assert "no images: it has no files" in refusal(tmp_path)
    write_images(tmp_path, {"full": 2})
    assert (
        "the class empty of" in (said := refusal(tmp_path)) and "has no image" in said
    )


def damage(folder: Path) -> None:
    """A good image and four bad files."""
    write_images(folder, {"a": 3, "b": 3}, size=(40, 40))
    whole = (folder / "a" / "0.png").read_bytes()
    (folder / "a" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "a" / "empty.png").write_bytes(b"")
    (folder / "b" / "text.jpg").write_text("no image")
    Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    ).save(folder / "b" / "x.jpeg")
    cut = (folder / "b" / "x.jpeg").read_bytes()
    (folder / "b" / "x.jpeg").write_bytes(cut[: len(cut) * 3 // 4])


def test_files_that_are_no_whole_images_are_skipped_and_named(tmp_path, caplog):
    damage(tmp_path)
    train, _ = opened(tmp_path, validation=0.0)
    assert names(train) == [f"{c}/{i}.png" for c in "ab" for i in range(3)]
    assert tells(train.describe(), "4 files ... no whole image ... left out")
    said = caplog.text
    assert "4 files are skipped" in said and "cut.png: no whole image" in said
    log = Path(said.split("all are named in ")[1].split("\n")[0])
    assert sorted(
        line.split("\t")[0].rsplit("/", 1)[1] for line in log.read_text().splitlines()
    ) == [
        "cut.png",
        "empty.png",
        "text.jpg",
        "x.jpeg",
    ]


def test_files_that_are_no_whole_images_are_refused_by_choice(tmp_path):
    damage(tmp_path)
    said = refusal(tmp_path, validation=0.0, bad_documents="refuse")
    assert (
        "4 files cannot be taken" in said
        and "cut.png" in said
        and "data.bad_documents" in said
    )


def test_files_are_looked_at_once_as_long_as_they_stay_as_they_are(
    tmp_path, monkeypatch
):
    write_images(tmp_path / "once", {"a": 3, "b": 3})
    looked: list[str] = []
    from meshtrain.data.images import folders

    look = folders._check
    monkeypatch.setattr(
        folders, "_check", lambda file: looked.append(file.name) or look(file)
    )
    before = opened(tmp_path / "once", validation=0.0)[0].digest
    assert len(looked) == 6
    assert (
        opened(tmp_path / "once", validation=0.0)[0].digest == before
        and len(looked) == 6
    )
    write_images(tmp_path / "once", {"b": 4}, seed=3)
    assert (
        opened(tmp_path / "once", validation=0.0)[0].digest != before
        and len(looked) == 13
    )


def test_an_index_that_is_damaged_is_made_again(tmp_path, cache):
    write_images(tmp_path / "again", {"a": 3})
    before = opened(tmp_path / "again", validation=0.0)[0].digest
    (found,) = (cache / "meshtrain" / "images").glob("again-*/index.json")
    for content in (b"", b"[]", b'{"digests": ["x"], "problems": {}}'):
        found.write_bytes(content)
        assert opened(tmp_path / "again", validation=0.0)[0].digest == before


def test_a_cache_without_room_is_a_sentence(tmp_path, monkeypatch):
    write_images(tmp_path / "data", {"a": 3})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME to a directory with room" in refusal(
        tmp_path / "data", validation=0.0
    )


def test_pictures_of_every_kind_are_read_as_grey_or_colours_the_right_way_up(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    image = Image.fromarray(colours)
    saved: dict[str, Image.Image] = {
        "a.png": image,
        "a.bmp": image,
        "a.tiff": image,
        "a.ppm": image,
        "grey.png": image.convert("L"),
        "alpha.png": image.convert("RGBA"),
        "palette.png": image.quantize(16),
        "one.png": image.convert("1"),
        "cmyk.tiff": image.convert("CMYK"),
        "a.gif": image.quantize(16),
    }
    for name, picture in saved.items():
        picture.save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        assert np.array_equal(decoded(data, 3), np.asarray(picture.convert("RGB"))), (
            name
        )
        assert np.array_equal(
            decoded(data, 1)[..., 0], np.asarray(picture.convert("L"))
        ), name
    deep = (colours[..., 0].astype(np.uint16) << 8) + 77
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.array_equal(
        decoded((tmp_path / "deep.png").read_bytes(), 1)[..., 0], colours[..., 0]
    )
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "turned.png", exif=turned)
    assert np.array_equal(
        decoded((tmp_path / "turned.png").read_bytes(), 3), np.rot90(colours, -1)
    )


def test_without_pillow_a_sentence_names_the_extra(tmp_path, monkeypatch):
    write_images(tmp_path, {"a": 3})
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert tells(refusal(tmp_path), "Pillow", install_command("vision"))


def test_a_jpeg_of_fewer_than_eight_pixels_a_side_is_an_image():
    stream = io.BytesIO()
    Image.new("RGB", (5, 40)).save(stream, "JPEG")
    assert problem_of(stream.getvalue()) == ""
