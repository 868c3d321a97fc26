"""Bytes and tokenizer.json files: what goes in comes out, the ids fit, nothing in a document ends it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from meshtrain.config import ConfigError
from meshtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from meshtrain.data.tokenizer_file import train_bpe

SAMPLE = "naïve mesh — 日本語\n\tdef f(x): return x\n"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe([SAMPLE * 20, "the mesh the shard the token " * 50], 300, path)
    return path


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([SAMPLE])
    assert ids.max() < tokenizer.end_of_document < tokenizer.vocab_size
    assert tokenizer.decode(ids) == SAMPLE


def test_a_trained_bpe_round_trips_in_fewer_tokens_than_bytes(bpe):
    tokenizer = load_tokenizer(str(bpe))
    (ids,) = tokenizer.encode([SAMPLE])
    assert tokenizer.decode(ids) == SAMPLE
    assert len(ids) < len(SAMPLE.encode()) and ids.max() < tokenizer.vocab_size == 300


def test_training_twice_gives_the_same_file(bpe, tmp_path):
    train_bpe(
        [SAMPLE * 20, "the mesh the shard the token " * 50],
        300,
        tmp_path / "again.json",
    )
    assert (tmp_path / "again.json").read_bytes() == bpe.read_bytes()


def test_a_document_that_quotes_the_end_token_does_not_end_there(bpe):
    tokenizer = load_tokenizer(str(bpe))
    (ids,) = tokenizer.encode(["before <|endoftext|> after"])
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == "before <|endoftext|> after"


def test_truncation_and_padding_in_the_file_are_switched_off(bpe, tmp_path):
    cutting = tokenizers.Tokenizer.from_file(str(bpe))
    cutting.enable_truncation(3)
    cutting.enable_padding(length=50)
    cutting.save(str(tmp_path / "cutting.json"))
    ours, plain = (
        load_tokenizer(str(tmp_path / "cutting.json")),
        load_tokenizer(str(bpe)),
    )
    assert np.array_equal(ours.encode([SAMPLE, "x"])[0], plain.encode([SAMPLE])[0])
    assert len(ours.encode([SAMPLE, "x"])[1]) == 1


def test_without_an_end_token_one_id_more_is_used(tmp_path):
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 4}, "[UNK]")
    )
    words.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(str(tmp_path / "words.json"))
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (5, 6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bite", "did you mean byte"),
        (
            "/no/such/tokenizer.json",
            "no tokenizer file /no/such/tokenizer.json; give byte or a tokenizer.json",
        ),
        ("broken.json", r"broken\.json is not a tokenizer\.json"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(name)


def of_model(**values):
    given = {"type": "BPE", "vocab": {"a": 0}, "merges": [], **values}
    return json.dumps({"version": "1.0", "model": given})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        "\udcff\udcfe",
        of_model(vocab={"a": -1}),
        of_model(merges=["x y"]),
    ],
)
def test_a_file_that_holds_no_tokenizer_is_refused(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match="tokenizer") as refused:
        load_tokenizer(str(path)).encode(["text"])
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("gone"),
    ],
    ids=["a directory", "a pipe", "a link to itself", "a link to nothing"],
)
def test_what_is_no_file_is_no_tokenizer_and_not_waited_for(make, tmp_path):
    make(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be from 257"):
        train_bpe(["text"], 256, tmp_path / "small.json")


def broken(path: Path, **parts) -> Path:
    """A tokenizer.json of words whose parts are replaced."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    content = json.loads(words.to_str()) | parts
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(?:x|xx)+\\z(?<!b)"])
def test_a_pattern_that_makes_the_library_panic_is_a_sentence(pattern, tmp_path):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = load_tokenizer(
        str(broken(tmp_path / "tokenizer.json", pre_tokenizer=split))
    )
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json cannot .*tokens .*\(.*retry-limit"
    ):
        tokenizer.encode(["x" * 40 + "b"])


def test_a_panic_is_a_sentence_and_an_interrupt_is_none(tmp_path):
    tokenizer = load_tokenizer(str(broken(tmp_path / "tokenizer.json")))

    class PanicException(BaseException):
        """As pyo3 raises it."""

    for raised in (PanicException("called Option::unwrap()"), KeyboardInterrupt()):

        class Library:
            def __getattr__(self, name, raised=raised):
                raise raised

        tokenizer._tokenizer = Library()
        kind = ConfigError if isinstance(raised, PanicException) else KeyboardInterrupt
        for call in (
            tokenizer.encode,
            tokenizer.decode,
            tokenizer.spell,
            lambda t: tokenizer.encode_marked(t, [[]]),
        ):
            with pytest.raises(kind):
                call(["a"])


def test_a_text_that_has_no_token_where_none_is_unknown_is_a_sentence(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    tokenizer = load_tokenizer(str(broken(tmp_path / "tokenizer.json", model=model)))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json cannot .*tokens .*\(.*\[UNK\]"
    ):
        tokenizer.encode(["zebra"])
    with pytest.raises(ConfigError, match=r"cannot make tokens of a text"):
        tokenizer.encode_marked(["zebra"], [[(0, 2)]])
