"""An error of reading leaves no document out, and has no shards made again."""

import errno
import os

import numpy as np
import pytest
from refusing_disk import refusing

from meshtrain.config import ConfigError
from meshtrain.data.documents import documents
from meshtrain.data.images.folders import _check
from meshtrain.data.input_files import InputFile, find
from meshtrain.data.manifest import read_manifest
from meshtrain.data.prepare import prepare
from meshtrain.data.shards import TokenFile, descriptor, digest_of_file, open_corpus
from meshtrain.data.unit import PrepareOptions, read_record
from meshtrain.errors import Unreadable

PASSING = (errno.EIO, errno.ESTALE, errno.EMFILE)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} mesh of devices. " * 9)
    return find([str(tmp_path / "text")]).files


@pytest.fixture
def shards(text, tmp_path):
    return tmp_path / "shards", prepare(
        text, tmp_path / "shards", PrepareOptions(validation=0.0)
    )


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("number", PASSING)
def test_a_document_is_read_after_an_error_that_passes_and_never_left_out(
    call, number, text
):
    expected = [document.text for document in documents(text, "text")]
    with refusing(call, "b.txt", number, times=2):
        assert [document.text for document in documents(text, "text")] == expected
    with (
        refusing(call, "b.txt", number),
        pytest.raises(Unreadable, match=r"b\.txt cannot be read now"),
    ):
        list(documents(text, "text"))


def test_lines_that_cannot_be_read_now_are_not_left_out(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with refusing("read", "lines.jsonl", errno.EIO), pytest.raises(Unreadable):
        list(documents(find([str(tmp_path / "lines.jsonl")]).files, "text"))


def test_a_document_that_this_user_may_not_read_is_still_left_out_by_name(text):
    with refusing("open", "b.txt", errno.EACCES):
        kinds = [document.kind for document in documents(text, "text")]
    assert kinds == ["", "unreadable", ""]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_is_said_of_a_disk_is_no_finding_about_a_document_or_an_image(
    number, text, tmp_path
):
    (tmp_path / "a.png").write_bytes(b"x")
    with (
        refusing("open", "b.txt", number),
        pytest.raises(Unreadable, match="cannot be read now"),
    ):
        list(documents(text, "text"))
    with (
        refusing("open", "a.png", number),
        pytest.raises(Unreadable, match="cannot be read now"),
    ):
        _check(InputFile(str(tmp_path / "a.png"), "a.png", 1, 0))


def test_an_image_that_cannot_be_read_now_is_not_noted_as_bad(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    file = InputFile(str(tmp_path / "a.png"), "a.png", 1, 0)
    with refusing("open", "a.png", errno.EIO), pytest.raises(Unreadable):
        _check(file)


def test_a_preparation_that_could_not_read_is_finished_by_the_next(
    text, shards, tmp_path
):
    _, expected = shards
    other = tmp_path / "other"
    with refusing("open", "c.txt", errno.EIO), pytest.raises(Unreadable):
        prepare(text, other, PrepareOptions(validation=0.0))
    assert (
        prepare(text, other, PrepareOptions(validation=0.0)).digest == expected.digest
    )


@pytest.mark.parametrize(
    "name", ["manifest.json", "train-00000.tokens", "train-00000.offsets"]
)
@pytest.mark.parametrize("call", ["open", "read", "stat"])
def test_shards_are_opened_after_an_error_that_passes_and_are_not_altered_for_one_that_stays(
    call, name, shards
):
    directory, manifest = shards
    open_all = lambda: open_corpus(
        directory, read_manifest(directory), "train", verify=True
    )
    with refusing(call, name, errno.EIO, times=1):
        assert open_all().documents == manifest.count("train", "documents")
    with (
        refusing(call, name, errno.ESTALE),
        pytest.raises((Unreadable, OSError)) as refused,
    ):
        open_all()
    assert not isinstance(refused.value, ConfigError)


def test_a_finished_unit_whose_record_cannot_be_read_now_is_not_done_again(shards):
    directory, _ = shards
    assert read_record(directory, 0, np.dtype("<u2")) is not None
    with refusing("open", "00000.json", errno.EIO), pytest.raises(Unreadable):
        read_record(directory, 0, np.dtype("<u2"))


def test_a_cache_that_cannot_be_read_now_is_not_made_again(text, tmp_path, monkeypatch):
    from meshtrain.config import load
    from meshtrain.data.from_config import open_data

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = load(
        {
            "data": {"source": str(tmp_path / "text")},
            "model": {"vocab_size": 257},
            "train": {"sequence_length": 8},
        }
    )
    open_data(settings)
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.tokens")
    }
    for call in ("open", "read", "stat"):
        with refusing(call, "manifest.json", errno.EIO), pytest.raises(Unreadable):
            open_data(settings)
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.tokens")
    }


def test_a_short_read_of_a_shard_is_read_on(tmp_path, monkeypatch):
    path, pread = tmp_path / "x.tokens", os.pread
    path.write_bytes(bytes(range(100)))
    monkeypatch.setattr(
        "os.pread", lambda number, size, at: pread(number, min(size, 7), at)
    )
    file = descriptor(TokenFile(path, np.dtype("<u2"), 50))
    assert file.read(50, 10) == bytes(range(10, 60))
    assert file.read(50, 90) == bytes(range(90, 100))


def test_a_shard_is_read_while_training_after_an_error_that_passes(
    tmp_path, monkeypatch
):
    path, pread, left = tmp_path / "x.tokens", os.pread, [2]
    path.write_bytes(bytes(100))

    def refused(number, size, at):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return pread(number, size, at)

    monkeypatch.setattr("meshtrain.files.PAUSES", (0.0,) * 3)
    monkeypatch.setattr("os.pread", refused)
    assert descriptor(TokenFile(path, np.dtype("<u2"), 50)).read(10, 0) == bytes(10)


def test_the_digest_of_a_file_that_cannot_be_read_is_no_digest(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    with refusing("open", "x", errno.EIO), pytest.raises(Unreadable):
        digest_of_file(tmp_path / "x")
