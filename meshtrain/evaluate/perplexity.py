"""Perplexity of a model on text: how well it predicts each token of each document from the tokens before it.

    files ──data.input_files──► documents ──tokenizer──► tokens ──rows_of──► rows ──scoring──► nats ──► Perplexity

A document stands by itself, behind what documents begin with; nothing is scored but its own tokens. The sum of -log p,
in nats, is divided by a count: tokens, which depend on the tokenizer, or words and bytes, which do not.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshtrain.data.documents import Document
from meshtrain.data.prepare import describe_skipped
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.unit import cut
from meshtrain.errors import ConfigError, short
from meshtrain.evaluate.scoring import Scorer, TokenRow

BATCHES = 32  # of rows that are sorted by length together


TEXT_LINES = (
    ("documents", "documents", ","), ("tokens", "tokens", ","), ("words", "words", ","), ("bytes", "bytes", ","),
    ("nats_per_token", "nats per token", ".6f"), ("perplexity", "perplexity per token", ".6g"),
    ("word_perplexity", "perplexity per word", ".6g"), ("bits_per_byte", "bits per byte", ".6f"),
)  # fmt: skip


@dataclass
class Counts:
    """The nats (-log p, summed) that a text costs a model, and what to divide them by."""

    nats: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    documents: int = 0
    skipped: Counter[str] = field(
        default_factory=Counter
    )  # documents by the problem that they have

    def record(self) -> dict[str, Any]:
        """Returns all that is said of the text; `word_perplexity` is None where it has no words (what white space
        parts).
        """
        return {
            "nats_per_token": self.nats / self.tokens,
            "perplexity": exp(self.nats / self.tokens),
            "word_perplexity": exp(self.nats / self.words) if self.words else None,
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
            "documents": self.documents,
            "tokens": self.tokens,
            "words": self.words,
            "bytes": self.bytes,
            "skipped": dict(self.skipped),
        }


def described(
    record: dict[str, Any], lines: Sequence[tuple[str, str, str]], width: int = 20
) -> list[str]:
    """Returns a line for each (name in the record, label, format), labels padded to a width; a dash for None."""
    values = [
        (label, "-" if record[name] is None else format(record[name], form))
        for name, label, form in lines
    ]
    return [f"{label:<{width}}  {value}" for label, value in values]


def begin_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a document stands behind: what documents begin with (BOS), else the end of the one before
    it.
    """
    return tokenizer.begin or (tokenizer.end_of_document,)


def exp(x: float) -> float:
    """Returns e^x, or infinity if it overflows."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def rows_of(
    tokens: np.ndarray, begin: int | Sequence[int], length: int, stride: int
) -> Iterator[TokenRow]:
    """Cuts a document's tokens [n], behind the tokens `begin`, into rows of at most `length` places so that each token
    is scored once.

        tokens      b 0 1 2 3 4 5 6 7 8 9            b: what a document begins with; it is not scored
        row 0       b 0 1 2 3|                       length 5, stride 2: a row puts in 5 tokens and scores the token
        scored        0 1 2 3 4                      after each, unless an earlier row has scored it
        row 1           1 2 3 4 5|
        scored                  5 6                  at least length - stride = 3 tokens of context, if there are any
        row 2               3 4 5 6 7|
        scored                      7 8
        row 3                 4 5 6 7 8|
        scored                        9              the last has all the context that a row holds

    The last row is moved back so that it is full. 1 <= stride <= length; a document without tokens has no row.
    """
    head = np.atleast_1d(begin)
    document = np.concatenate([head, tokens]).astype(np.int32)
    scored = begun = len(head)
    while scored < len(document):
        # The first row scores all that it can.
        step = max(length + 1 - scored, 1) if scored == begun else stride
        end = min(scored + step, len(document))
        first = max(end - 1 - length, 0)
        yield TokenRow(document[first:end], scored - first)
        scored = end


def perplexity(
    scorer: Scorer,
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    length: int,
    stride: int,
    progress: Callable[[Counts], None] = lambda _: None,
) -> Counts:
    """Scores the documents in rows of `length` tokens, `stride` from one row to the next.

    Unreadable documents (empty, damaged, not UTF-8) are counted by their problem.

    ConfigError where no token is left, for a document with a token beyond the model's vocabulary, and where the model
    gives NaN.
    """
    counts = Counts()
    waiting: list[TokenRow] = []
    begin = begin_of(tokenizer)
    most = BATCHES * scorer.rows

    def flush() -> None:
        counts.nats += sum(
            -float(scores.logprobs.sum(dtype=np.float64)) for scores in scorer(waiting)
        )
        counts.tokens += sum(row.scored for row in waiting)
        waiting.clear()
        progress(counts)

    for document in documents:
        if document.problem:
            counts.skipped[document.kind] += 1
            continue
        counts.documents += 1
        counts.words += len(document.text.split())
        counts.bytes += len(document.text.encode())
        tokens = _encoded(document, tokenizer, scorer.model.config.model.vocab_size)
        for row in rows_of(tokens, begin, length, stride):
            waiting.append(row)
            if len(waiting) == most:
                flush()
    if waiting:
        flush()
    if not counts.tokens:
        skipped = f" ({describe_skipped(counts.skipped)})" if counts.skipped else ""
        raise ConfigError(f"the text holds no token to score{skipped}.")
    return counts


def _encoded(document: Document, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    tokens = np.concatenate(
        [ids.astype(np.int32) for ids in tokenizer.encode(list(cut(document.text)))]
    )
    if len(tokens) and tokens.max() >= vocab_size:
        raise ConfigError(
            f"the document {short(document.name)} has the token {tokens.max()} of the tokenizer {tokenizer.name}, but "
            "the model's are 0 to "
            f"{vocab_size - 1}; the tokenizer is of another model."
        )
    return tokens
