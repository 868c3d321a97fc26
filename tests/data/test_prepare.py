"""Preparing: the same bytes whatever the workers and the interruptions, bad documents named, nothing else
overwritten.
"""

import bz2
import filecmp
import gzip
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import tells

from meshtrain.config import ConfigError
from meshtrain.data import documents
from meshtrain.data.input_files import find
from meshtrain.data.manifest import SPLITS, ShardManifest
from meshtrain.data.prepare import prepare, refusal_at
from meshtrain.data.shards import open_corpus
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.data.tokenizer_file import train_bpe
from meshtrain.data.unit import PrepareOptions, cut, held_out
from meshtrain.files import temporary_beside

ROOT = Path(__file__).parents[2]


def run(source: Path, output: Path, workers: int = 1, **options: Any) -> ShardManifest:
    return prepare(
        find([str(source)]).files, output, PrepareOptions(**options), workers
    )


def same(one: Path, other: Path) -> bool:
    names = sorted(p.relative_to(one).as_posix() for p in one.rglob("*") if p.is_file())
    assert names == sorted(
        p.relative_to(other).as_posix() for p in other.rglob("*") if p.is_file()
    )
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def texts(directory: Path, manifest: ShardManifest, split: str) -> list[str]:
    """The documents as they can be read back."""
    corpus, found = open_corpus(directory, manifest, split, verify=True), []
    for file, offsets in zip(corpus.tokens, corpus.offsets, strict=True):
        tokens = np.fromfile(file.path, file.dtype)
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            assert tokens[begin - 1] == tokens[end - 1] == manifest.end_of_document
            found.append(ByteTokenizer().decode(tokens[begin : end - 1]))
    return found


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LEAST_UNIT", 5000)


def test_every_document_is_there_once_in_order_in_one_split(
    text, tmp_path, small_units
):
    manifest = run(text, tmp_path / "out", validation=0.2)
    assert len(manifest.shards["train"]) > 3
    expected: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in sorted(text.iterdir()):
        out = held_out(f"documents/{path.name}", 0.2)
        expected["validation" if out else "train"].append(path.read_text())
    for split in SPLITS:
        assert len(expected[split]) > 10
        assert texts(tmp_path / "out", manifest, split) == expected[split]


@pytest.mark.thorough
def test_three_workers_write_the_same_bytes_as_one(text, tmp_path, small_units):
    run(text, tmp_path / "one", validation=0.2)
    run(text, tmp_path / "three", workers=3, validation=0.2)
    assert same(tmp_path / "one", tmp_path / "three")


def test_the_manifest_tells_the_same_wherever_the_text_lies(text, tmp_path):
    copy = tmp_path / "elsewhere" / text.name
    copy.mkdir(parents=True)
    for path in text.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert run(text, tmp_path / "one") == run(copy, tmp_path / "two")


def test_the_held_out_share_is_about_what_was_asked_for():
    names = [f"folder/{i}.txt" for i in range(20_000)]
    for share in (0.0, 0.01, 0.2):
        assert (
            abs(sum(held_out(name, share) for name in names) / len(names) - share)
            < 0.005
        )


def test_a_file_whose_name_is_not_utf8_or_several_lines_is_read_all_the_same_and_is_a_line_of_the_log(
    tmp_path,
):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / os.fsdecode(b"\xff.txt")).write_text("good")
    for name in (b"\xfe.txt", b"a\nb\tc\\.txt", b"\xff\r.txt"):
        (folder / os.fsdecode(name)).write_bytes(b"")
    assert texts(
        tmp_path / "out", run(folder, tmp_path / "out", validation=0.0), "train"
    ) == ["good"]
    log = sorted((tmp_path / "out" / "skipped.log").read_bytes().splitlines())
    assert log == [
        b"text/a\\nb\\tc\\\\.txt\tempty",
        b"text/\xfe.txt\tempty",
        b"text/\xff\\r.txt\tempty",
    ]


def test_an_interrupted_run_goes_on_where_it_was(text, tmp_path, small_units):
    run(text, tmp_path / "whole")
    done: list[int] = []

    def stop(at: int, total: int) -> None:
        done.append(at)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(find([str(text)]).files, tmp_path / "out", PrepareOptions(), 1, stop)
    assert not (tmp_path / "out" / "manifest.json").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.tokens")}
    assert len(kept) == 2
    again: list[int] = []
    prepare(
        find([str(text)]).files,
        tmp_path / "out",
        PrepareOptions(),
        1,
        lambda at, total: again.append(at),
    )
    assert again[0] == done[-1] > 0
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.thorough
def test_a_killed_run_with_workers_goes_on_to_the_same_bytes(text, tmp_path):
    big = tmp_path / "big.jsonl"
    big.write_text(
        "".join(f'{{"text": "{i}{"." * 180}"}}\n' for i in range(63_000))
    )  # three units of 4 MiB
    command = [
        sys.executable,
        "-m",
        "meshtrain.data",
        "prepare",
        "--input",
        str(big),
        "--workers",
        "2",
        "--output",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, str(tmp_path / "out")], env=environment, start_new_session=True
    )
    while (
        not list((tmp_path / "out" / "units").glob("*.json")) and process.poll() is None
    ):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out" / "manifest.json").exists()
    run(big, tmp_path / "out")
    run(big, tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "out")


def test_what_was_altered_cut_or_removed_is_made_again_and_what_is_not_ours_is_left(
    text, tmp_path, small_units
):
    run(text, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    for name in ("train-00000.tokens", "train-00001.offsets", "units/00002.json"):
        data = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (tmp_path / "out" / "train-00003.tokens").unlink()
    (tmp_path / "out" / "manifest.json").unlink()
    os.truncate(tmp_path / "out" / "train-00004.tokens", 2)
    os.truncate(tmp_path / "out" / "units/00001.json", 9)
    for directory in (tmp_path / "out", tmp_path / "out" / "units"):
        temporary_beside(directory / "train-00000.tokens").write_bytes(b"half")
    (tmp_path / "out" / ".gitignore").write_text("*.tokens")
    run(text, tmp_path / "out")
    assert (tmp_path / "out" / ".gitignore").read_text() == "*.tokens"
    (tmp_path / "out" / ".gitignore").unlink()
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["units/00000.json", "units/00000.skipped", ".lock", "train-00000.tokens"]
)
def test_a_pipe_in_the_place_of_a_file_is_never_waited_for(text, tmp_path, name):
    manifest = run(text, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    os.mkfifo(tmp_path / "out" / name)
    assert run(text, tmp_path / "out") == manifest
    open_corpus(tmp_path / "out", manifest, "train", verify=True)


def test_a_directory_in_the_place_of_a_file_is_named(text, tmp_path):
    (tmp_path / "out" / "units").mkdir(parents=True)
    run(text, tmp_path / "out")
    (tmp_path / "out" / "train-00000.tokens").unlink()
    (tmp_path / "out" / "train-00000.tokens").mkdir()
    with pytest.raises(OSError) as error:
        run(text, tmp_path / "out")
    assert refusal_at(error.value) == "is a directory: train-00000.tokens"


@pytest.mark.parametrize("content", ["[1, 2", "[]", "{"])
def test_a_damaged_plan_is_reported(content, text, tmp_path):
    run(text, tmp_path / "out")
    (tmp_path / "out" / "plan.json").write_text(content)
    with pytest.raises(
        ConfigError,
        match=r"(plan\.json .*damaged, .* remove that|; remove it, or)",
    ):
        run(text, tmp_path / "out")


def test_other_text_options_or_tokenizer_never_mix_with_what_is_there(
    text, other_text, tmp_path, monkeypatch
):
    run(text, tmp_path / "out")
    with pytest.raises(ConfigError, match="made from different input"):
        run(other_text, tmp_path / "out")
    with pytest.raises(ConfigError, match="made from different options"):
        run(text, tmp_path / "out", validation=0.1)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match="made from different rules of reading"),
    ):
        patch.setattr("meshtrain.data.prepare.RULES", 1)
        run(text, tmp_path / "out")
    train_bpe(["some text"], 260, tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="made from different tokenizer"):
        run(text, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_directory_that_holds_something_else_is_left_alone(text, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"is not empty \(thesis\.tex\)"):
        run(text, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two good documents among three bad ones."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text("good")
    (folder / "b.txt").write_bytes(b"\xff\xfe")
    (folder / "c.txt").write_bytes(b"")
    (folder / "d.jsonl").write_text('{"text": "good too"}\n{"title": "none"}\n')
    return folder


def test_bad_documents_are_counted_named_and_skipped(mixed, tmp_path):
    manifest = run(mixed, tmp_path / "out", validation=0.0)
    assert texts(tmp_path / "out", manifest, "train") == ["good", "good too"]
    assert manifest.skipped == {"empty": 1, "not UTF-8": 1, "without text": 1}
    named = [
        line.split("\t")[0]
        for line in (tmp_path / "out" / "skipped.log").read_text().splitlines()
    ]
    assert named == ["mixed/b.txt", "mixed/c.txt", "mixed/d.jsonl#21"]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_documents_are_refused_by_choice(mixed, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(documents, "LEAST_UNIT", 1)
    with pytest.raises(
        ConfigError, match=r"mixed/\S+ is (not UTF-8|empty|without text)"
    ):
        run(mixed, tmp_path / "out", workers=workers, bad="refuse")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "a.txt",
            b"",
            "no documents: 1 skipped: 1 empty; ... a.txt, ... empty.",
        ),
        ("a.xz", lzma.compress(b"words"), "1 skipped: 1 not text; ... a.xz"),
        ("a.bz2", bz2.compress(b"words"), "1 skipped: 1 not text; ... a.bz2"),
        (
            "a.zip",
            b"PK\3\4\0words",
            "1 skipped: 1 not text; ... a.zip, ... (a NUL at byte 4).",
        ),
        ("a.jsonl", b"\n\n", "the input has no documents."),
    ],
)
def test_an_input_of_bad_documents_alone_is_refused(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError) as error:
        run(tmp_path / name, tmp_path / "out")
    assert tells(str(error.value), said)


@pytest.mark.thorough
def test_a_damaged_archive_gives_the_same_bytes_whatever_the_workers(
    text, tmp_path, small_units
):
    folder = tmp_path / "mixed"
    shutil.copytree(text, folder)
    data = gzip.compress(
        "".join(f'{{"text": "{i}"}}\n' for i in range(20_000)).encode(), mtime=0
    )
    (folder / "0050.jsonl.gz").write_bytes(data[: len(data) // 2])
    (folder / "0051.jsonl").write_text("[" * 100_000 + '\n{"text": "good"}\n')
    manifest = run(folder, tmp_path / "one", validation=0.2)
    run(folder, tmp_path / "three", workers=3, validation=0.2)
    assert same(tmp_path / "one", tmp_path / "three")
    assert manifest.skipped == {"not JSON": 1, "unreadable": 1}
    assert sum(manifest.count(split, "documents") for split in SPLITS) == 151
    with pytest.raises(
        ConfigError, match=r"mixed/005\S+ is (unreadable|not JSON) \(.*; mend it"
    ):
        run(folder, tmp_path / "refused", bad="refuse")


def test_a_large_vocabulary_is_stored_in_four_bytes(text, tmp_path):
    vocabulary = {f"w{i}": i for i in range(70_000)} | {"[UNK]": 70_000}
    words = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (tmp_path / "words.json").write_text(json.dumps(words))
    manifest = run(
        text, tmp_path / "out", tokenizer=str(tmp_path / "words.json"), validation=0.0
    )
    corpus = open_corpus(tmp_path / "out", manifest, "train", verify=True)
    tokens, _ = corpus.read(np.array([0]), np.array([corpus.starts[1]]))
    assert tokens.dtype == np.dtype("<u4") and tokens.max() == 70_001
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "words.json"
    ).read_bytes()


def test_long_texts_are_cut_at_line_ends_and_lose_nothing():
    text = "a line of text\n" * 100 + "x" * 500 + "\nend"
    pieces = list(cut(text, 100))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 100 for piece in pieces)
    assert sum(piece.endswith("\n") for piece in pieces) >= 15
