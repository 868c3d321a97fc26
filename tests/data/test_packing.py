"""Packing: every piece in exactly one row, rows nearly full, nothing crosses from one document to the next."""

import numpy as np
import pytest
from data_configs import config

from meshtrain.data import open_data
from meshtrain.data.packing import pack


def random_counts(size: int, pieces: int, seed: int) -> np.ndarray:
    lengths = (
        np.random.default_rng(seed).lognormal(np.log(size / 8), 1.0, pieces).astype(int)
        % size
        + 1
    )
    return np.bincount(lengths, minlength=size + 1)


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(1, 5), (8, 1), (8, 1000), (64, 37), (1024, 5000), (1024, 10**6)],
)
def test_a_plan_holds_exactly_the_pieces_and_no_row_overflows(size, pieces):
    counts = random_counts(size, pieces, seed=pieces)
    held = np.zeros_like(counts)
    for kind in pack(counts, size):
        assert (
            kind.rows > 0
            and 0 < sum(length * copies for length, copies in kind.content) <= size
        )
        for length, copies in kind.content:
            held[length] += kind.rows * copies
    assert np.array_equal(held, counts)


@pytest.mark.parametrize("pieces", [1000, 10**5, 10**7])
def test_a_plan_is_nearly_full_and_does_not_grow_with_the_corpus(pieces):
    counts = random_counts(1024, pieces, seed=3)
    plan = pack(counts, 1024)
    tokens = int((counts * np.arange(1025)).sum())
    assert tokens / (1024 * sum(kind.rows for kind in plan)) > 0.99
    assert len(plan) < 3 * 1024


@pytest.mark.parametrize(
    ("counts", "rows"),
    [({5: 2, 3: 4, 2: 2}, 4), ({6: 1, 4: 1, 2: 3}, 2), ({8: 3}, 3), ({1: 9}, 2)],
)
def test_small_cases_need_as_few_rows_as_can_be(counts, rows):
    assert (
        sum(
            kind.rows
            for kind in pack(np.array([counts.get(n, 0) for n in range(9)]), 8)
        )
        == rows
    )


def test_the_standard_library_fills_97_percent_of_rows_of_1024():
    train, _ = open_data(config("stdlib", length=1024, batching="packed", last="pad"))
    rows = train.batches_per_epoch * 8
    assert train.tokens_per_batch * train.batches_per_epoch / (rows * 1024) >= 0.97


def test_segments_and_positions_follow_the_documents_and_padding_counts_nothing(text):
    train, _ = open_data(config(text, batching="packed", last="pad"))
    for k in range(train.batches_per_epoch):
        batch = train.batch(k)
        for row in range(8):
            names = "tokens", "labels", "segments", "positions", "weights"
            tokens, labels, segments, positions, weights = (
                batch[name][row] for name in names
            )
            real = segments > 0
            assert np.array_equal(weights, real.astype(np.float32))
            used = int(real.sum())
            assert real[:used].all()  # padding stands at the end
            assert not tokens[used:].any() and not labels[used:].any()
            begins = np.flatnonzero(np.diff(segments[:used], prepend=0))
            assert segments[begins].tolist() == list(range(1, len(begins) + 1))
            for begin, end in zip(begins, [*begins[1:], used], strict=True):
                assert positions[begin:end].tolist() == list(range(end - begin))
                assert np.array_equal(tokens[begin + 1 : end], labels[begin : end - 1])
                assert (
                    train.tokenizer.end_of_document not in labels[begin : end - 1]
                )  # one document a segment


def test_which_documents_share_a_row_changes_with_the_epoch(other_text):
    train, _ = open_data(config(other_text, length=256, batching="packed", last="pad"))

    def rows(epoch: int) -> set[bytes]:
        first = epoch * train.batches_per_epoch
        batches = map(train.batch, range(first, first + train.batches_per_epoch))
        return {row.tobytes() for batch in batches for row in batch["labels"]}

    assert rows(0) != rows(1)
