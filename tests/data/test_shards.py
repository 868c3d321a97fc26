"""Shards on disk: what is written is read back, and damage is reported before it is trained on."""

import contextlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from data_configs import config, write_random_shards
from refusals import tells

from meshtrain.config import ConfigError
from meshtrain.data import open_data, shards
from meshtrain.data.manifest import PADDING, ShardManifest, read_manifest
from meshtrain.data.shards import Corpus, TokenFile, open_corpus
from meshtrain.data.unit import ShardWriter

DOCUMENTS = [[[1, 2, 3], []], [[4]], [[5, 6, 7, 8, 9], [10, 11]]]  # by shard
END = 12
# The end-of-document token that each shard begins with left out but once.
STREAM = [12, 1, 2, 3, 12, 12, 4, 12, 5, 6, 7, 8, 9, 12, 10, 11, 12]


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, ShardManifest]:
    written = []
    for number, documents in enumerate(DOCUMENTS):
        writer = ShardWriter(tmp_path, f"train-{number:05d}", END, np.dtype("<u2"))
        for document in documents:
            writer.add(np.array(document, np.uint32))
            writer.end_document()
            writer.flush()
        shard = writer.close()
        assert shard is not None
        written.append(shard)
    manifest = ShardManifest(
        "byte",
        "0",
        13,
        END,
        "uint16",
        0.0,
        {"train": tuple(written), "validation": ()},
        {},
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    return tmp_path, manifest


def read_all(corpus: Corpus, start: int, n: int) -> tuple[list[int], list[int]]:
    _, first, lengths = corpus.cut(np.array([start]), np.array([n]))
    tokens, labels = corpus.read(first, lengths)
    return tokens.tolist(), labels.tolist()


def test_every_document_is_predicted_from_an_end_token_to_an_end_token(prepared):
    corpus = open_corpus(*prepared, "train", verify=True)
    assert (corpus.documents, corpus.labels) == (5, len(STREAM) - 1)
    for start in range(corpus.labels):
        # Across the borders of shards too
        for n in range(1, corpus.labels - start + 1):
            assert read_all(corpus, start, n) == (
                STREAM[start : start + n],
                STREAM[start + 1 : start + n + 1],
            )


def test_a_manifest_is_read_back_as_it_was_written(prepared):
    directory, manifest = prepared
    assert read_manifest(directory) == manifest
    assert read_manifest(directory).digest == manifest.digest


def shards_of(directory: Path, count: int) -> Corpus:
    """Shard k has the tokens k k k k."""
    files = [
        TokenFile(directory / str(number), np.dtype("<u2"), 4)
        for number in range(count)
    ]
    for number, file in enumerate(files):
        np.full(4, number, "<u2").tofile(file.path)
    return Corpus(files, [])


def test_many_stretches_are_read_one_behind_another_and_padding_is_zeros(prepared):
    corpus = open_corpus(*prepared, "train", verify=True)
    first, lengths = np.array([7, PADDING, 0, 5, 5]), np.array([6, 3, 4, 2, 1])
    tokens, labels = corpus.read(first, lengths)
    begins = np.cumsum(lengths) - lengths
    for begin, start, n in zip(
        begins.tolist(), first.tolist(), lengths.tolist(), strict=True
    ):
        whole = [0] * (n + 1) if start == PADDING else STREAM[start : start + n + 1]
        assert (
            tokens[begin : begin + n].tolist(),
            labels[begin : begin + n].tolist(),
        ) == (
            whole[:-1],
            whole[1:],
        )


def test_a_stretch_is_cut_at_every_border_that_it_reaches_over(prepared):
    corpus = open_corpus(*prepared, "train", verify=True)  # shards of 5, 2 and 9 labels
    counts, first, lengths = corpus.cut(
        np.array([4, 0, 5, 3, 9]), np.array([1, 5, 2, 7, 7])
    )
    assert counts.tolist() == [1, 1, 1, 3, 1]
    assert first.tolist() == [4, 0, 5, 3, 5, 7, 9]
    assert lengths.tolist() == [1, 5, 2, 2, 2, 3, 7]


def test_more_shards_than_may_be_open_are_read_all_the_same(tmp_path, monkeypatch):
    opened = lru_cache(maxsize=3)(shards.descriptor.__wrapped__)
    monkeypatch.setattr(shards, "descriptor", opened)
    corpus, before = shards_of(tmp_path, 10), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        tokens, _ = corpus.read(3 * np.arange(10), np.ones(10, int))
        assert tokens.tolist() == list(range(10))
    assert opened.cache_info().misses == 20
    assert len(os.listdir("/proc/self/fd")) == before + 3


def test_threads_that_close_each_others_files_never_read_the_wrong_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        shards, "descriptor", lru_cache(maxsize=2)(shards.descriptor.__wrapped__)
    )
    corpus = shards_of(tmp_path, 8)

    def read_often(seed: int) -> bool:
        numbers = np.random.default_rng(seed).integers(0, 8, 1500)
        tokens, _ = corpus.read(3 * numbers, np.full(1500, 3))
        return np.array_equal(tokens, np.repeat(numbers, 3))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read_often, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_a_shard_cut_short_while_it_is_read_is_an_error(prepared):
    corpus = open_corpus(*prepared, "train", verify=True)
    damage(prepared[0], "truncated")
    with pytest.raises(OSError, match=r"train-00002\.tokens was cut short"):
        read_all(corpus, 0, corpus.labels)


def overwrite(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(bytes(4))


def with_old_times(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("alter", [overwrite, with_old_times])
def test_a_shard_overwritten_in_place_while_it_is_read_ends_the_next_read(
    prepared, alter
):
    directory, manifest = prepared
    for verify in (True, False):
        corpus = open_corpus(directory, manifest, "train", verify)
        assert read_all(corpus, 0, 4) == (STREAM[:4], STREAM[1:5])
        time.sleep(0.02)  # the kernel's clock of files has steps of up to 10 ms
        content = (directory / "train-00000.tokens").read_bytes()
        alter(directory / "train-00000.tokens")
        corpus.watch.due = 0.0
        with pytest.raises(OSError, match=r"train-00000\.tokens was altered while"):
            read_all(corpus, 0, 4)
        (directory / "train-00000.tokens").write_bytes(content)


def test_a_shard_whose_content_is_as_prepared_is_read_on_whatever_its_inode_says(
    prepared,
):
    directory, manifest = prepared
    corpus, path = (
        open_corpus(directory, manifest, "train", verify=True),
        directory / "train-00000.tokens",
    )
    read_all(corpus, 0, 4)
    for alter in (
        path.touch,
        lambda: path.chmod(0o600),
        lambda: path.write_bytes(path.read_bytes()),
        path.unlink,
        lambda: path.write_bytes(b"another file of this name"),
    ):
        time.sleep(0.02)
        alter()
        corpus.watch.due = 0.0
        assert read_all(corpus, 0, 4) == (STREAM[:4], STREAM[1:5])


def test_a_shard_that_cannot_be_opened_is_named_by_its_file(tmp_path):
    write_random_shards(tmp_path, shards=2, documents=40, mean=50)
    shard = tmp_path / "train-00001.tokens"
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(ConfigError) as refused:
        open_data(config(tmp_path))
    assert tells(str(refused.value), "data.source", shard.name, "cannot be read")


def test_two_corpora_are_read_as_one(prepared):
    corpus = open_corpus(*prepared, "train", verify=True)
    both = corpus + corpus
    assert (both.documents, both.labels) == (10, 2 * corpus.labels)
    assert read_all(both, 14, 4) == ([10, 11, 12, 1], [11, 12, 1, 2])


def damage(directory: Path, how: str) -> None:
    path = directory / "train-00002.tokens"
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"xx")
    elif how == "altered":
        path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "a link to nothing":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        offsets = directory / "train-00002.offsets"
        offsets.write_bytes(b"\x02" + offsets.read_bytes()[1:])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "train-00002.tokens is missing"),
        ("truncated", "19 bytes instead of 20: .* truncated"),
        ("longer", "22 bytes instead of 20: .* not what was"),
        ("altered", "train-00002.tokens has been altered"),
        ("offsets", "train-00002.offsets has been altered"),
        ("a directory", "train-00002.tokens"),
        ("a pipe", "train-00002.tokens"),
        ("a link to nothing", "train-00002.tokens"),
    ],
)
def test_a_damaged_shard_is_refused_by_name_and_one_of_another_size_even_without_digests(
    prepared, how, said
):
    directory, manifest = prepared
    damage(directory, how)
    for verify in (True, False):
        altered = "altered" in said
        with (
            contextlib.nullcontext()
            if altered and not verify
            else pytest.raises(ConfigError, match=said)
        ):
            open_corpus(directory, manifest, "train", verify)


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)],
    ids=["a directory", "a pipe", "a link to itself"],
)
def test_what_is_no_file_in_the_place_of_a_manifest_is_refused(make, tmp_path):
    make(tmp_path / "manifest.json")
    with pytest.raises(ConfigError, match="manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no prepared shards"),
        ("{", "not the manifest of prepared shards"),
        ('{"format": 1}', "not the manifest of prepared shards"),
        ('{"format": 99}', "has format 99; this version reads 1"),
        ("[" * 100_000, "not the manifest of prepared shards"),
        ("\\ud800", "not the manifest of prepared shards"),
    ],
)
def test_a_directory_without_a_manifest_of_ours_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dtype", "bananas", "dtype is 'bananas'"),
        ("name", "../train-00000", "a shard's name is a path"),
        ("shards", {"train": []}, "validation"),
        ("shards", None, ""),
        ("name", "a\0b", "name"),
    ],
)
def test_a_manifest_whose_values_make_no_sense_is_refused(prepared, key, value, said):
    path = prepared[0] / "manifest.json"
    values = json.loads(path.read_bytes())
    place = values if key in values else values["shards"]["train"][0]
    place[key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=rf"not the manifest of prepared shards \(.*{said}"
    ):
        read_manifest(prepared[0])


@pytest.mark.parametrize(
    ("key", "count"),
    [("tokens", "many"), ("tokens", -5), ("tokens", 10**6), ("documents", "many")],
)
def test_a_count_that_is_not_the_files_own_is_refused(prepared, key, count):
    path = prepared[0] / "manifest.json"
    values = json.loads(path.read_bytes())
    values["shards"]["train"][0][key] = count
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError):
        open_corpus(prepared[0], read_manifest(prepared[0]), "train", verify=True)
