"""Grouping by length: few lengths, little padding, full batches, every piece once."""

import itertools

import numpy as np
import pytest
from data_configs import config

from meshtrain.data import open_data
from meshtrain.data.grouping import budget_rows, choose_lengths, make_groups
from meshtrain.data.pieces import DocumentPieces


def padded(counts: np.ndarray, lengths: tuple[int, ...]) -> int:
    """Tokens of all pieces, each padded to the next of the lengths."""
    return sum(
        int(count) * min(n for n in lengths if n >= length)
        for length, count in enumerate(counts)
        if count
    )


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_lengths_chosen_need_the_least_padding_of_all_choices(most):
    counts = np.bincount(
        np.random.default_rng(0).integers(1, 49, 200) ** 2 // 48, minlength=49
    )
    counts[0] = 0
    chosen = choose_lengths(counts, most, 8)
    every = [
        (*some, 48)
        for n in range(most)
        for some in itertools.combinations(range(8, 48, 8), n)
    ]
    assert len(chosen) <= most and chosen[-1] == 48 and all(n % 8 == 0 for n in chosen)
    assert padded(counts, chosen) == min(padded(counts, lengths) for lengths in every)


def test_lengths_are_multiples_even_where_the_longest_is_not():
    lengths = choose_lengths(np.arange(101), 4, 16)
    assert (
        lengths[-1] == 100
        and all(n % 16 == 0 for n in lengths[:-1])
        and len(lengths) == 4
    )


def test_very_long_rows_are_chosen_from_a_bounded_number_of_lengths():
    lengths = choose_lengths(np.ones(131_073), 8, 16)
    assert (
        len(lengths) == 8
        and lengths[-1] == 131_072
        and all(n % 16 == 0 for n in lengths)
    )


def test_a_budget_gives_more_rows_to_shorter_lengths_and_is_never_exceeded():
    rows = [budget_rows(16 * 1024, length, 4) for length in (64, 100, 300, 1000, 1024)]
    assert rows == [256, 160, 52, 16, 16]


@pytest.mark.parametrize("pad", [False, True])
def test_groups_fill_all_their_batches_but_the_last(pad):
    counts = np.array([0, 5, 0, 9, 1, 30, 2, 0, 11])
    pieces = DocumentPieces(np.cumsum(counts), np.zeros(counts.sum(), np.uint64))
    groups = make_groups(pieces, (2, 4, 6, 8), (4, 4, 4, 4), pad)
    at = 0
    for group in groups:
        assert group.begin == at
        assert pieces.lengths(np.arange(group.begin, group.end)).max() <= group.length
        at = group.end
        size = group.end - group.begin
        assert group is groups[-1] or size == group.batches * group.rows
    assert at == 58
    assert groups[-1].batches == (4 if pad else 3)


def random_batches_padding(train_pieces: DocumentPieces, size: int, seed: int) -> float:
    """The share of padding when batches are drawn at random and padded to their longest."""
    lengths = train_pieces.lengths(
        np.random.default_rng(seed).permutation(len(train_pieces.first))
    )
    batches = lengths[: len(lengths) // size * size].reshape(-1, size)
    return 1 - batches.sum() / (batches.max(1) * size).sum()


@pytest.mark.parametrize("length", [1024, 8192])
@pytest.mark.parametrize("batching", ["grouped", "budget"])
def test_padding_is_at_most_a_third_of_that_of_random_batches(batching, length):
    train, _ = open_data(config("stdlib", length=length, batching=batching))
    grouped = train.batches
    assert train.padding <= random_batches_padding(grouped.pieces, 8, seed=0) / 3  # type: ignore[union-attr]


@pytest.mark.parametrize("batching", ["grouped", "budget"])
def test_every_batch_has_a_shape_of_the_known_set(text, batching):
    train, _ = open_data(
        config(
            text,
            batching=batching,
            lengths=4,
            length_multiple=8,
            rows_multiple=2,
            last="pad",
        )
    )
    seen = set()
    for k in range(train.batches_per_epoch):
        batch = train.batch(k)
        assert {array.shape for array in batch.values()} == {train.batch_shape(k)}
        seen.add(train.batch_shape(k))
    assert seen == set(train.shapes) and 1 < len(seen) <= 4
    tokens = {rows * length for rows, length in seen}
    if batching == "budget":
        assert any(rows % 8 for rows, _ in seen) and not any(
            rows % 2 for rows, _ in seen
        )
        assert max(tokens) <= 8 * 64 and min(tokens) > 8 * 64 / 2
    else:
        assert {rows for rows, _ in seen} == {8}


@pytest.mark.parametrize("batching", ["grouped", "budget"])
def test_which_documents_share_a_batch_changes_with_the_epoch(text, batching):
    train, _ = open_data(config(text, batching=batching, last="pad"))

    def batches(epoch: int) -> set[frozenset[bytes]]:
        numbers = range(
            epoch * train.batches_per_epoch, (epoch + 1) * train.batches_per_epoch
        )
        return {
            frozenset(row.tobytes() for row in train.batch(k)["labels"])
            for k in numbers
        }

    assert len(batches(0) & batches(1)) < len(batches(0)) / 4


def test_padding_stands_behind_the_document_with_no_weight(text):
    train, _ = open_data(config(text, batching="grouped", last="pad"))
    for k in range(train.batches_per_epoch):
        batch = train.batch(k)
        used = batch["weights"].sum(1).astype(int)
        for row, n in enumerate(used):
            assert (
                batch["weights"][row, :n].all() and not batch["tokens"][row, n:].any()
            )
            assert np.array_equal(
                batch["tokens"][row, 1:n], batch["labels"][row, : max(n - 1, 0)]
            )


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_tokens_per_batch_is_the_mean_over_an_epoch(text, last):
    train, _ = open_data(config(text, batching="budget", last=last))
    labels = sum(
        train.batch(k)["weights"].sum() for k in range(train.batches_per_epoch)
    )
    assert abs(train.tokens_per_batch * train.batches_per_epoch / labels - 1) < (
        1e-9 if last == "pad" else 0.02
    )


@pytest.mark.parametrize("batching", ["window", "packed", "grouped", "budget"])
def test_tokens_and_padding_of_a_batch_are_those_that_it_has(batching):
    train, _ = open_data(config("stdlib", length=128, batching=batching, last="pad"))
    last = train.batches_per_epoch - 1
    for k in (0, 1, last):
        batch = train.batch(k)
        there = batch["weights"].sum() if "weights" in batch else batch["labels"].size
        assert (train.tokens(k), train.padding_tokens(k)) == (
            there,
            batch["labels"].size - there,
        )
