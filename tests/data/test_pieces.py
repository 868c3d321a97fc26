"""The table of pieces: every label of every document in exactly one piece, sorted by length."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from data_configs import config
from mounts import exit_code_of, may_mount, mount, own_mounts

from meshtrain.config import ConfigError
from meshtrain.data import open_data, pieces
from meshtrain.data.pieces import DocumentPieces, open_pieces
from meshtrain.data.shards import Corpus
from meshtrain.files import temporary_beside


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return open_data(config(text))[0].batches.rows.corpus  # type: ignore[union-attr]


@pytest.mark.parametrize("longest", [1, 2, 7, 64, 10_000])
def test_pieces_cover_every_label_once_and_cut_only_at_the_longest(
    corpus, tmp_path, longest
):
    table = open_pieces(corpus, longest, tmp_path / "table")
    numbers = np.arange(len(table.first))
    lengths, first = table.lengths(numbers), table.first.astype(int)
    assert (
        np.array_equal(lengths, np.sort(lengths))
        and lengths.min() >= 1
        and lengths.max() <= longest
    )
    assert np.array_equal(np.bincount(lengths, minlength=longest + 1), table.counts)
    order = np.argsort(first)
    assert np.array_equal(
        first[order], np.cumsum(lengths[order]) - lengths[order]
    )  # one after the other, without gaps
    assert lengths.sum() == corpus.labels
    edges = np.concatenate(
        [np.diff(offsets.astype(int)) for offsets in corpus.offsets]
    ).cumsum()
    assert set(edges) <= set(
        (first + lengths).tolist()
    )  # no piece reaches over the end of a document
    cut = ~np.isin(first + lengths, edges)
    assert (lengths[cut] == longest).all()


def test_the_table_does_not_depend_on_how_many_documents_are_taken_at_once(
    corpus, tmp_path, monkeypatch
):
    def table(at_once: int) -> DocumentPieces:
        monkeypatch.setattr(pieces, "DOCUMENTS_AT_ONCE", at_once)
        return open_pieces(corpus, 64, tmp_path / str(at_once))

    whole, bit_by_bit = table(10**6), table(7)
    assert np.array_equal(whole.ends, bit_by_bit.ends) and np.array_equal(
        whole.first, bit_by_bit.first
    )


def test_the_table_is_made_once(corpus, tmp_path):
    open_pieces(corpus, 64, tmp_path / "table")
    made = (tmp_path / "table").stat()
    open_pieces(corpus, 64, tmp_path / "table")
    assert (tmp_path / "table").stat() == made
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "table"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\1" + data[1:],
        lambda data: data[:50] + bytes([data[50] ^ 4]) + data[51:],
        lambda data: data[:-1] + bytes([data[-1] ^ 128]),
        lambda data: data[:-8],
        lambda data: data[:-3],
        lambda data: data + bytes(8),
        lambda data: data[32:],
        lambda data: b"",
    ],
    ids=[
        "digest",
        "counts",
        "places",
        "truncated",
        "cut within a number",
        "longer",
        "of an older version",
        "empty",
    ],
)
def test_a_damaged_table_is_reported_and_made_again(corpus, tmp_path, damage, caplog):
    path = tmp_path / "table"
    good = open_pieces(corpus, 64, path)
    ends, first, whole = good.ends, good.first.copy(), path.read_bytes()
    path.write_bytes(damage(whole))
    again = open_pieces(corpus, 64, path)
    assert np.array_equal(again.ends, ends) and np.array_equal(again.first, first)
    assert path.read_bytes() == whole
    (said,) = caplog.messages
    assert f"{path} is damaged; it is made again" in said


def test_the_table_of_another_corpus_is_not_taken_for_this_ones(corpus, tmp_path):
    open_pieces(corpus + corpus, 64, tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "table")
    found, made = (
        open_pieces(corpus, 64, tmp_path / name) for name in ("table", "new")
    )
    assert len(found.first) == len(made.first)


def test_what_is_no_file_gives_way_to_the_table_and_a_directory_is_reported(
    corpus, tmp_path
):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "directory" / "with").mkdir(parents=True)
    for name in ("pipe", "link"):
        open_pieces(corpus, 64, tmp_path / name)
        assert stat.S_ISREG((tmp_path / name).lstat().st_mode)
    with pytest.raises(
        ConfigError, match=r"directory cannot be written .*\(is a directory\)"
    ):
        open_pieces(corpus, 64, tmp_path / "directory")


def test_what_a_killed_process_left_of_a_table_is_removed(corpus, tmp_path):
    left = temporary_beside(tmp_path / "table")
    left.write_bytes(b"half")
    (tmp_path / ".mine").write_bytes(b"kept")
    open_pieces(corpus, 64, tmp_path / "table")
    assert not left.exists() and (tmp_path / ".mine").exists()


def test_a_full_disk_is_reported_and_nothing_of_the_table_is_left(corpus, tmp_path):
    if not may_mount():
        pytest.skip("this process may not mount")
    cache = tmp_path / "cache"
    cache.mkdir()

    def on_a_small_disk() -> None:
        own_mounts()
        mount("tmpfs", cache, options="size=8k")
        with pytest.raises(
            ConfigError, match=r"\(no space left on device\); set XDG_CACHE_HOME"
        ):
            open_pieces(corpus, 1, cache / "table")  # eight bytes a label: 200 kB
        os._exit(len([p for p in cache.iterdir() if p.name != ".lock"]))

    assert exit_code_of(on_a_small_disk) == 0


def test_a_cache_that_cannot_be_written_is_reported(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        open_pieces(corpus, 64, tmp_path / "file" / "table")
