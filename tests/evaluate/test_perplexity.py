"""Perplexity: what the documents cost by hand, whatever the batch; words and bytes of the text; what is not text is a
sentence.
"""

import json
import math

import numpy as np
import pytest
from short_runs import canonical_numbers, place

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.data.documents import documents
from meshtrain.data.input_files import find
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.evaluate.perplexity import (
    TEXT_LINES,
    Counts,
    described,
    perplexity,
    rows_of,
)
from meshtrain.evaluate.scoring import Scorer

TEXTS = {
    "a.txt": "Läufe über die Brücke, und zurück. " * 3,
    "b.md": "x",
    "c.txt": "\n \n",
}


def byte_model(vocab_size: int = 259):
    """A model of bytes with no special numbers in it."""
    sizes = {
        "layers": 2,
        "d_model": 24,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 40,
        "vocab_size": vocab_size,
    }
    program = mt.Program(mt.load({"model": sizes, "parallel": {"zero_stage": 0}}))
    return mt.reader.Model(
        program, place(program.layout, canonical_numbers(program.layout)), 0, "made up"
    )


@pytest.fixture(scope="module")
def model():
    return byte_model()


@pytest.fixture
def text(tmp_path):
    for name, content in TEXTS.items():
        (tmp_path / name).write_text(content)
    return [str(tmp_path)]


def measured(model, paths, length=32, stride=16, rows=4):
    return perplexity(
        Scorer(model, rows),
        ByteTokenizer(),
        documents(find(paths).files, "text"),
        length,
        stride,
    )


def by_hand(model, text: str, length: int, stride: int) -> float:
    """Nats of a document, each token from logits of the model for the context that it is promised, in float64."""
    ids = [256, *text.encode()]
    nats, at = 0.0, 1
    while at < len(ids):
        end = min(at + (length if at == 1 else stride), len(ids))
        row = ids[max(end - 1 - length, 0) : end]
        # in a row as long as the longest, so that one program is compiled: none sees what comes after it
        padded = np.pad(row[:-1], (0, length - len(row) + 1))
        logits = np.asarray(model(padded[None])[0, : len(row) - 1], np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        count = end - at
        nats -= log_p[np.arange(len(row) - 1 - count, len(row) - 1), row[-count:]].sum()
        at = end
    return nats


@pytest.mark.thorough
def test_nats_are_those_of_the_logits_and_words_and_bytes_those_of_the_text(
    model, text
):
    counts = measured(model, text)
    nats = sum(by_hand(model, each, 32, 16) for each in TEXTS.values())
    assert counts.nats == pytest.approx(nats, rel=1e-6)
    whole = "".join(TEXTS.values())
    assert (counts.documents, counts.bytes, counts.words) == (
        3,
        len(whole.encode()),
        19,
    )
    assert counts.tokens == counts.bytes > len(whole), "an umlaut is two tokens"
    record = counts.record()
    assert record["nats_per_token"] == pytest.approx(nats / counts.bytes)
    assert record["perplexity"] == pytest.approx(math.exp(nats / counts.bytes))
    assert record["word_perplexity"] == pytest.approx(math.exp(nats / 19))
    assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / counts.bytes)


@pytest.mark.thorough
def test_the_batch_changes_nothing(model, text):
    assert measured(model, text, rows=3).nats == pytest.approx(
        measured(model, text).nats, rel=1e-6
    )


@pytest.mark.thorough
def test_more_context_is_another_number(model, text):
    """So the stride is heeded: the two cannot agree by accident."""
    far, near = measured(model, text, 32, 4), measured(model, text, 32, 32)
    assert far.tokens == near.tokens and abs(far.nats - near.nats) > 1e-3


def test_text_of_white_space_has_no_words(model, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n")
    counts = measured(model, [str(tmp_path)])
    assert counts.record()["word_perplexity"] is None and counts.tokens == 2
    assert "perplexity per word   -" in described(counts.record(), TEXT_LINES)


def test_what_is_no_document_is_counted_and_the_rest_is_scored(model, tmp_path):
    records = [
        json.dumps({"text": "one"}),
        json.dumps({"other": 1}),
        "not JSON",
        json.dumps({"text": "two"}),
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(records))
    counts = measured(model, [str(tmp_path / "some.jsonl")])
    assert (counts.documents, counts.tokens) == (2, 6) and counts.skipped == {
        "without text": 1,
        "not JSON": 1,
    }


def test_nothing_to_score_is_a_sentence(model, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no token to score \(1 skipped: 1 empty\)"):
        measured(model, [str(tmp_path / "empty.txt")])


def test_text_that_the_vocabulary_cannot_hold_is_a_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("abc ü")
    says = r"a\.txt has the token 195 .* byte, .* 0 to 127"
    with pytest.raises(ConfigError, match=says):
        measured(byte_model(128), [str(tmp_path / "a.txt")])


def test_more_than_a_number_can_hold_is_infinite():
    record = Counts(nats=1e6, tokens=10, words=1, bytes=10).record()
    assert record["perplexity"] == record["word_perplexity"] == math.inf


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 30, 31])
@pytest.mark.parametrize(
    ("length", "stride"),
    [(1, 1), (5, 1), (5, 3), (5, 5), (8, 1), (8, 3), (8, 5), (8, 8)],
)
def test_each_token_is_scored_once_with_the_context_that_there_is(n, length, stride):
    tokens = np.arange(100, 100 + n)
    whole = [7, *tokens]
    scored, rows = [], list(rows_of(tokens, 7, length, stride))
    for row in rows:
        at = len(scored) + 1
        # what stands before what is scored is what stands there in the document
        assert row.tokens.tolist() == whole[at - row.begin : at + row.scored]
        assert len(row.tokens) - 1 <= length and row.tokens.dtype == np.int32
        assert row.begin >= min(at, length - stride + 1)
        scored += row.tokens[row.begin :].tolist()
    assert scored == tokens.tolist()
    assert n <= length or len(rows[-1].tokens) - 1 == length
    assert len(rows) == 1 + max(0, -(-(n - length) // stride))


def test_a_document_without_a_token_has_no_row():
    assert list(rows_of(np.array([], np.int64), 7, 8, 4)) == []


def test_the_drawing_is_what_is_made():
    rows = [
        (row.tokens.tolist(), row.scored) for row in rows_of(np.arange(10), -1, 5, 2)
    ]
    assert rows == [
        ([-1, 0, 1, 2, 3, 4], 5),
        ([1, 2, 3, 4, 5, 6], 2),
        ([3, 4, 5, 6, 7, 8], 2),
        ([4, 5, 6, 7, 8, 9], 1),
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 20])
def test_behind_several_beginning_tokens_each_token_is_scored_once(length):
    scored = []
    for row in rows_of(np.arange(10), (-2, -1), length, min(2, length)):
        assert len(row.tokens) - 1 <= length
        scored += row.tokens[row.begin :].tolist()
    assert scored == list(range(10))
