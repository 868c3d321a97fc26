"""Datasets of Hugging Face as sources: every layout on disk, offline; splits, columns, an interrupted copy, refusals."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from covering import thorough_but
from refusals import tells

from meshtrain.config import ConfigError, load
from meshtrain.data import hub_datasets, open_data
from meshtrain.data.__main__ import main
from meshtrain.data.hub_datasets import HubDataset, files_of
from meshtrain.sources import is_dataset

datasets = pytest.importorskip("datasets")

TEXTS = [f"{n} and {n} are {n + n}: \u00e9\u4e16" for n in range(60)]
MESSAGES = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]
    for n in range(20)
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns(split: str = "train") -> dict[str, list]:
    return {
        "text": [f"{split} {text}" for text in TEXTS],
        "other": [f"other {text}" for text in TEXTS],
        "number": list(range(len(TEXTS))),
    }


def saved(to: Path) -> None:
    datasets.Dataset.from_dict(columns()).save_to_disk(str(to), num_shards=3)


def saved_splits(to: Path) -> None:
    splits = {
        name: datasets.Dataset.from_dict(columns(name)) for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(str(to))


def parquet(to: Path) -> None:
    (to / "data").mkdir(parents=True)
    for name in ("train", "test"):
        rows = datasets.Dataset.from_dict(columns(name))
        for part in range(2):
            shard = rows.shard(2, part, contiguous=True)
            shard.to_parquet(to / "data" / f"{name}-0000{part}-of-00002.parquet")
    (to / "README.md").write_text("---\nlicense: mit\n---\n# A dataset\n")


def json_lines(to: Path) -> None:
    to.mkdir()
    for name in ("train", "test"):
        datasets.Dataset.from_dict(columns(name)).to_json(to / f"{name}.jsonl")


LAYOUTS = {
    "save_to_disk": saved,
    "save_to_disk, splits": saved_splits,
    "parquet": parquet,
    "json lines": json_lines,
}


def texts(source: str, field: str = "text", contents: str = "text") -> list:
    paths = sorted(Path(files_of(source, contents, field)).iterdir())
    key = field if contents == "text" else "messages"
    return [
        json.loads(line)[key]
        for path in paths
        for line in path.read_text().splitlines()
    ]


@pytest.mark.parametrize(
    "layout", thorough_but(LAYOUTS, lambda layout: layout == "parquet")
)
def test_every_layout_on_disk_is_read_in_its_order(here, layout):
    LAYOUTS[layout](here / "mine")
    assert texts("hf:mine") == [f"train {text}" for text in TEXTS]
    assert texts("hf:./mine:train:other") == [f"other {text}" for text in TEXTS]
    if layout != "save_to_disk":
        assert texts("hf:mine:test") == [f"test {text}" for text in TEXTS]


@pytest.mark.thorough
def test_prepared_shards_and_training_have_the_same_documents_and_digest(here, capsys):
    parquet(here / "mine")
    assert (
        main(["prepare", "--input", "hf:mine", "--output", "shards", "--workers", "1"])
        == 0
    )
    assert "documents" in capsys.readouterr().out
    values = {
        "model": {"vocab_size": 257},
        "train": {"global_batch_size": 2, "sequence_length": 32},
    }
    prepared, _ = open_data(load(values | {"data": {"source": "shards"}}))
    opened, _ = open_data(load(values | {"data": {"source": "hf:mine"}}))
    assert opened.digest == prepared.digest
    np.testing.assert_array_equal(
        opened.batch(3)["tokens"], prepared.batch(3)["tokens"]
    )
    # elsewhere, under another time, they are the same
    shutil.copytree(here / "mine", here / "folder" / "mine")
    (here / "folder" / "config.yaml").write_text(
        json.dumps(values | {"data": {"source": "hf:mine"}})
    )
    elsewhere = load(here / "folder" / "config.yaml")
    assert elsewhere.data.source == f"hf:{here / 'folder' / 'mine'}"
    assert open_data(elsewhere)[0].digest == prepared.digest


def test_conversations_are_taken_whole_or_from_a_column(here):
    rows = datasets.Dataset.from_dict(
        {"messages": MESSAGES, "extra": [None] * len(MESSAGES)}
    )
    rows.save_to_disk(str(here / "chats"))
    assert texts("hf:chats", contents="chat") == MESSAGES
    rows.rename_column("messages", "turns").save_to_disk(str(here / "renamed"))
    assert texts("hf:renamed:train:turns", contents="chat") == MESSAGES
    with pytest.raises(ConfigError, match="names a column, but pairs"):
        files_of("hf:renamed:train:turns", "pairs", "text")


def test_a_copy_that_was_interrupted_goes_on_and_a_whole_one_is_not_read_again(
    here, monkeypatch
):
    parquet(here / "mine")
    monkeypatch.setattr(hub_datasets, "PART", 300)
    written: list[Path] = []
    write = hub_datasets.write_atomically

    def interrupted(path, content):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(hub_datasets, "write_atomically", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files_of("hf:mine", "text", "text")
    stamps = [path.stat().st_mtime_ns for path in written]
    assert texts("hf:mine") == [f"train {text}" for text in TEXTS]
    assert [path.stat().st_mtime_ns for path in written] == stamps
    monkeypatch.setattr(hub_datasets, "_open", None)
    assert len(texts("hf:mine")) == len(TEXTS)
    # another content is another copy
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.chdir(here)
    datasets.Dataset.from_dict(columns("new")).to_parquet(
        here / "mine" / "data" / "train-00000-of-00002.parquet"
    )
    assert texts("hf:mine")[0] == f"new {TEXTS[0]}"


def test_names_are_read_in_parts():
    assert HubDataset.read("hf:org/name:test:body") == HubDataset(
        "hf:org/name:test:body", "org/name", "test", "body"
    )
    assert HubDataset.read("hf:org/name").split == "train"
    assert (
        is_dataset("hf:x")
        and not is_dataset("hf://datasets/x")
        and not is_dataset("stdlib")
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("hf:", ["write hf:NAME[:SPLIT[:COLUMN]]"]),
        ("hf:a:b:c:d", ["write hf:NAME[:SPLIT[:COLUMN]]"]),
        ("hf:./nowhere", ["no directory"]),
        ("hf:mine:tst", ["no split 'tst'", "did you mean test?"]),
        ("hf:mine:train:txt", ["no column 'txt'", "did you mean text?"]),
        (
            "hf:org/name",
            ["hf download org/name --repo-type dataset --local-dir name", "hf:name"],
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(here, source, says):
    parquet(here / "mine")
    with pytest.raises(ConfigError) as error:
        files_of(source, "text", "text")
    assert tells(str(error.value), *says) and "\n" not in str(error.value)


def test_without_the_library_the_sentence_has_the_extra(here, monkeypatch):
    parquet(here / "mine")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError) as error:
        files_of("hf:mine", "text", "text")
    assert tells(str(error.value), "library datasets", "not installed", "[datasets]")
