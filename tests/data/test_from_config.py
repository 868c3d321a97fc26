"""From a config to batches, and one plain sentence for each thing that cannot be."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_configs import config
from refusals import tells

from meshtrain.config import Config, ConfigError, DataConfig, load
from meshtrain.data import open_data
from meshtrain.data.cache import open_files
from meshtrain.data.input_files import find
from meshtrain.data.manifest import read_manifest
from meshtrain.data.prepare import prepare
from meshtrain.data.shards import Source
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.tokenizer_file import train_bpe
from meshtrain.data.unit import PrepareOptions
from meshtrain.registry import Registry
from meshtrain.sources import SOURCES, SourceKind


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(["the mesh the shard the token " * 50], 300, path)
    return path


@pytest.fixture(scope="module")
def prepared(text: Path, bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "shards"
    prepare(
        find([str(text)]).files,
        directory,
        PrepareOptions(tokenizer=str(bpe), validation=0.1),
    )
    return directory


def test_the_standard_library_is_there_without_a_config():
    train, validation = open_data(load({}))
    batch = train.batch(0)
    assert batch.keys() == {"tokens", "labels"}
    assert all(
        array.shape == (16, 256) and array.dtype == np.int32 for array in batch.values()
    )
    assert (
        train.shapes == ((16, 256),)
        and train.batch_shape(3) == (16, 256)
        and train.tokens_per_batch == 4096
    )
    assert np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert "def " in train.tokenizer.decode(
        np.concatenate([train.batch(k)["tokens"].ravel() for k in range(5)])
    )
    assert validation.batches_per_epoch >= 64  # text enough to measure a loss on


def test_held_out_text_is_not_trained_on(text):
    train, validation = open_data(config(text, batch=1, validation=0.3))
    seen = [
        {b.batch(k)["labels"].tobytes() for k in range(b.batches_per_epoch)}
        for b in (train, validation)
    ]
    assert len(seen[1]) > 20 and not seen[0] & seen[1]


def test_held_out_text_may_be_a_source_of_its_own(text, other_text):
    _, validation = open_data(
        config(text, batch=1, validation_source=str(other_text), last="pad")
    )
    labels = sum(
        int(validation.batch(k)["weights"].sum())
        for k in range(validation.batches_per_epoch)
    )
    assert labels == sum(path.stat().st_size + 1 for path in other_text.iterdir())


def test_prepared_shards_are_read_with_their_tokenizer(prepared):
    train, validation = open_data(
        config(prepared, tokenizer=str(prepared / "tokenizer.json"))
    )
    assert validation is not None
    assert (
        train.tokenizer.name
        == read_manifest(prepared).tokenizer
        == f"BPE-{train.tokenizer.vocab_size}"
    )
    assert "mesh" in train.tokenizer.decode(train.batch(0)["tokens"].ravel())


def test_synthetic_tokens_follow_from_the_seed_and_fill_the_vocabulary():
    train, validation = open_data(config("synthetic", seed=4))
    again, _ = open_data(config("synthetic", seed=4))
    other, _ = open_data(config("synthetic", seed=5))
    batches = [b.batch(7)["tokens"] for b in (train, again, other, validation)]
    assert np.array_equal(batches[0], batches[1])
    assert not any(np.array_equal(batches[0], batch) for batch in batches[2:])
    many = np.concatenate([train.batch(k)["tokens"] for k in range(20)])
    assert many.min() == 0 and many.max() == 511 and len(np.unique(many)) == 512
    assert np.array_equal(
        train.batch(7, slice(2, 5))["labels"], train.batch(7)["labels"][2:5]
    )


def refusal(source: str, **data: Any) -> str:
    """The sentence with which a config is refused."""
    with pytest.raises(ConfigError) as error:
        open_data(config(source, **data))
    return str(error.value)


@pytest.mark.parametrize("batching", ["window", "packed", "grouped", "budget"])
def test_a_line_of_the_log_says_what_an_epoch_is(batching, text):
    train, _ = open_data(config(text, batching=batching, last="pad"))
    batches = [train.batch(k) for k in range(train.batches_per_epoch)]
    places, labels = (
        sum(b["weights"].size for b in batches),
        sum(int(b["weights"].sum()) for b in batches),
    )
    says = f"{text}: {len(batches)} batches an epoch of {labels / len(batches):,.0f} tokens"
    says += (
        f" in {len(train.shapes)} shapes" if batching in ("grouped", "budget") else ""
    )
    assert train.describe() == f"{says}, {1 - labels / places:.1%} padding"


@pytest.mark.parametrize("share", [{}, {"validation": 0.0}])
def test_without_held_out_text_there_are_no_validation_batches_unless_asked_for(
    share, tmp_path
):
    (tmp_path / "one.txt").write_text("words " * 1000)
    assert open_data(config(tmp_path / "one.txt", **share))[1] is None
    data = {"source": str(tmp_path / "one.txt"), **share}
    asked = load({"data": data, "train": {"sequence_length": 64}, "eval": {"every": 5}})
    with pytest.raises(ConfigError) as refused:
        open_data(asked)
    held_out = rf"{tmp_path}/one\.txt has no documents for"
    own = r"data\.validation_source, .*eval\.every to 0\."
    assert re.fullmatch(rf"eval\.every is 5, .*{held_out}.* {own}", str(refused.value))
    open_data(load(asked, ["eval.every=0"]))
    open_data(load(asked, [f"data.validation_source={tmp_path / 'one.txt'}"]))


@pytest.mark.parametrize("batching", ["window", "packed", "grouped", "budget"])
def test_each_held_out_label_is_in_one_pass_once_whatever_fills_a_batch(text, batching):
    _, held_out = open_data(config(text, validation=0.3, batch=5, batching=batching))
    assert held_out.one_pass(2) == range(2)
    everything = held_out.one_pass(1000)
    assert len(everything) == held_out.batches_per_epoch
    many, rows = 0, []
    for batch in map(held_out.batch, everything):
        many += int((batch["weights"] > 0).sum())
        rows += [row.tobytes() for row in batch["tokens"][batch["weights"].any(1)]]
    source: Any = held_out.batches
    corpus = source.rows.corpus if batching in ("window", "packed") else source.corpus
    assert many == corpus.labels and len(set(rows)) == len(rows)
    (fewer,) = held_out.fewer(1000)
    assert tells(fewer, f"{len(everything)} batches ... fewer than eval.batches 1000")
    assert not held_out.fewer(len(everything))


def test_held_out_text_shorter_than_a_row_is_one_row_of_a_padded_batch(tmp_path):
    (tmp_path / "train.txt").write_text("words " * 1000)
    (tmp_path / "short.txt").write_text("words")
    given = {
        "source": str(tmp_path / "train.txt"),
        "validation": 0.0,
        "validation_source": str(tmp_path / "short.txt"),
    }
    _, held_out = open_data(
        load({"data": given, "train": {"sequence_length": 64}, "eval": {"every": 5}})
    )
    assert held_out.batch(0)["weights"].sum() == 6 and held_out.one_pass(8) == range(1)
    (fewer,) = held_out.fewer(8)
    assert tells(fewer, "1 batch ... fewer than eval.batches 8")


def test_a_source_that_is_not_there_is_reported_with_the_nearest_spelling():
    assert "did you mean stdlib?" in refusal("stdlibs")
    assert "no such file or directory" in refusal("/no/such/folder")
    assert "data.validation_source is 'nope', but" in refusal(
        "stdlib", validation_source="nope"
    )
    assert "data.mixture is 'synthetics', but" in (
        said := refusal("mixture", mixture=["synthetics"], weights=[1.0])
    )
    assert said.endswith("text, prepared shards, or stdlib.")


def test_a_vocabulary_too_large_for_the_model_is_reported_with_its_size(text):
    with pytest.raises(
        ConfigError,
        match=r"model\.vocab_size 256 .* 257 .*data\.tokenizer byte",
    ):
        open_data(load({"data": {"source": str(text)}, "model": {"vocab_size": 256}}))


def test_shards_of_another_tokenizer_or_share_are_refused_with_the_right_one(
    prepared, bpe
):
    assert f"set data.tokenizer to {prepared}/tokenizer.json" in refusal(str(prepared))
    said = refusal(str(prepared), tokenizer=str(bpe), validation=0.2)
    assert (
        "data.validation is 0.2, but the shards" in said and "prepared with 0.1" in said
    )


def test_an_altered_shard_is_refused_unless_digests_are_not_asked_for(
    prepared, tmp_path
):
    copy = tmp_path / "shards"
    shutil.copytree(prepared, copy)
    shard = copy / "train-00000.tokens"
    shard.write_bytes(b"\1\0" + shard.read_bytes()[2:])
    tokenizer = str(prepared / "tokenizer.json")
    assert "train-00000.tokens has been altered" in refusal(
        str(copy), tokenizer=tokenizer
    )
    open_data(config(copy, tokenizer=tokenizer, verify=False))


def test_text_of_which_the_tokenizer_knows_nothing_is_refused(tmp_path):
    only = (
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"é": 0}, "merges": []}}'
    )
    (tmp_path / "tokenizer.json").write_text(only, encoding="utf-8")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text("hello world")
    said = refusal(
        str(tmp_path / "text"), length=8, tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert "documents for train, but of none" in said and "knows anything" in said


@pytest.mark.parametrize("batching", ["window", "packed", "grouped", "budget"])
def test_text_that_fills_no_batch_is_one_that_is_padded(tmp_path, batching):
    (tmp_path / "short.txt").write_text("x" * 99)
    source = str(tmp_path / "short.txt")
    train, _ = open_data(config(source, length=50, batching=batching))
    assert train.batches_per_epoch == 1 and train.batch(0)["weights"].sum() == 100
    assert tells(train.describe(), "no batch ... global_batch_size 8 ... padded")
    if batching == "window":
        said = refusal(source, length=101)
        assert tells(said, "100 tokens ... fewer ... train.sequence_length 101")


def test_the_digest_names_what_is_read_and_not_where_it_lies_or_when_it_was_written(
    text, tmp_path
):
    copy = tmp_path / "elsewhere" / text.name
    shutil.copytree(text, copy, copy_function=shutil.copy)  # with new dates

    def digest(source: Path) -> str:
        return open_data(config(source))[0].digest

    assert digest(copy) == digest(text)
    (copy / "0000.txt").write_text((copy / "0000.txt").read_text().swapcase())
    assert digest(copy) != digest(text)
    before = digest(copy)
    (copy / "0001.txt").unlink()
    assert digest(copy) != before


def test_the_digest_of_held_out_text_is_its_own(text, other_text):
    train, validation = open_data(config(text, validation=0.3, batch=1))
    assert validation is not None and validation.digest != train.digest
    same, other = open_data(
        config(text, validation=0.3, batch=1, validation_source=str(other_text))
    )
    assert (
        other is not None
        and same.digest == train.digest
        and other.digest != validation.digest
    )
    _, mirror = open_data(
        config(other_text, validation=0.3, batch=1, validation_source=str(text))
    )
    assert mirror is not None and mirror.digest not in (
        train.digest,
        validation.digest,
    )  # all of the text


def test_a_skipped_document_leaves_the_digest_as_it_is(text, tmp_path):
    copy = tmp_path / text.name
    shutil.copytree(text, copy)
    (copy / "damaged.txt").write_bytes(b"\xff")
    assert open_data(config(copy))[0].digest == open_data(config(text))[0].digest


def test_a_preparation_that_was_not_finished_is_reported(text, tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(find([str(text)]).files, tmp_path / "shards", PrepareOptions(), 1, stop)
    said = refusal(str(tmp_path / "shards"))
    assert tells(said, "not finished ... `meshtrain data prepare` again")


@pytest.mark.parametrize(
    ("data", "others", "said"),
    [
        (
            {"source": "synthetic", "batching": "packed"},
            {},
            "synthetic tokens form no documents",
        ),
        ({"batching": "pack"}, {}, "did you mean packed"),
        (
            {"batching": "budget", "rows_multiple": 3},
            {"mesh": {"data": 2}},
            "multiple of mesh.data x parallel.microbatches",
        ),
        (
            {"batching": "budget", "rows_multiple": 32},
            {},
            "at most train.global_batch_size 16",
        ),
        (
            {"batching": "grouped", "length_multiple": 3},
            {"mesh": {"tensor": 2}, "parallel": {"sequence_parallel": True}},
            r"mesh\.tensor 2 .*divide data\.length_multiple 3",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_before_anything_is_read(
    data, others, said
):
    with pytest.raises(ConfigError, match=said):
        load({"data": data, **others})


# --- kinds of source from outside


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Registry[SourceKind]:
    """Those of the package; what a test registers is gone afterwards."""
    monkeypatch.setattr(
        SOURCES,
        "_entries",
        {name: SOURCES[name] for name in ("stdlib", "synthetic", "digits")},
    )
    return SOURCES


def test_a_kind_of_source_with_documents_is_one_entry(sources, other_text):
    def open_mine(data: DataConfig, tokenizer: Tokenizer) -> Source:
        return open_files(
            find([str(other_text)]),
            "mine",
            PrepareOptions(data.tokenizer, 0.2),
            tokenizer,
            data,
        )

    assert "no such file or directory" in refusal("mine")
    sources.register(SourceKind("mine", documents=open_mine))
    train, validation = open_data(config("mine", batching="packed", last="pad"))
    assert validation is not None and train.source == "mine" and len(train.digest) == 16
    mixed, _ = open_data(
        config(
            "mixture",
            mixture=["stdlib", "mine"],
            weights=[1, 1],
            validation_source="mine",
        )
    )
    assert mixed.source == "stdlib + mine" and mixed.digest.endswith(f"+{train.digest}")
    assert re.search(r"synthetic, mine, mixture; .* mine\?$", refusal("min"))
    assert "stdlib, mine, text and prepared shards" in refusal(
        "mixture", mixture=["synthetic"], weights=[1]
    )


def test_a_kind_of_source_of_rows_is_one_entry(sources):
    class Counting:
        """Row r is r, r + 1, r + 2 ..."""

        def __init__(self, settings: Config, split: str) -> None:
            self.count, self.length = 20, settings.train.sequence_length
            self.labels = self.count * self.length

        def locate(self, items: np.ndarray) -> np.ndarray:
            return items % self.count

        def read(self, places: np.ndarray) -> dict[str, np.ndarray]:
            tokens = (places[:, None] + np.arange(self.length)).astype(np.int32)
            return {"tokens": tokens, "labels": tokens + 1}

    sources.register(SourceKind("counting", rows=Counting))
    train, validation = open_data(config("counting"))
    assert (
        validation is not None and train.digest == "" and train.batches_per_epoch == 2
    )
    assert train.batch(1)["tokens"][:, 0].tolist() == list(range(8, 16))
    assert train.describe() == "counting: 2 batches an epoch of 512 tokens"
    assert "counting tokens form no documents" in refusal("counting", batching="packed")
    said = refusal("counting", validation_source="x")
    assert tells(said, "data.source counting ... tokens are drawn")
    assert "data.mixture names counting" in refusal(
        "mixture", mixture=["counting"], weights=[1]
    )
