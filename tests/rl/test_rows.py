"""Rows hold each text once, and weigh what the model drew."""

import numpy as np
import pytest

import meshtrain as mt
from meshtrain.rl.rows import Learned, pack, place_in_rows, rows_of

RANDOM = np.random.default_rng(0)


def text(given: int, drawn: int) -> Learned:
    mask = np.arange(given + drawn) >= given
    numbers = RANDOM.normal(size=given + drawn).astype(np.float32)
    tokens = RANDOM.integers(1, 60, given + drawn).astype(np.int32)
    return Learned(tokens, mask, numbers, 2 * numbers)


def config_of(**rl: object) -> mt.Config:
    return mt.load(
        {
            "train": {
                "objective": "grpo",
                "global_batch_size": 8,
                "sequence_length": 12,
            },
            "rl": {"prompts": "x", "reward": "exact", "group": 4, "answers": 4, **rl},
        }
    )


TEXTS = [text(3, 4), text(5, 1), text(2, 2), text(8, 4), text(1, 3)]


def test_each_text_stands_once_with_what_was_drawn_behind_what_was_given() -> None:
    batch = pack(TEXTS, config_of(), 11)
    found = {}
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            here = batch["segments"][row] == segment
            assert (batch["positions"][row, here] == np.arange(here.sum())).all()
            found[batch["tokens"][row, here].tobytes()] = {
                k: x[row, here] for k, x in batch.items()
            }
    assert len(found) == len(TEXTS)
    for each in TEXTS:
        row = found[each.tokens[:-1].tobytes()]
        drawn = each.drawn[1:]
        assert (row["labels"] == each.tokens[1:]).all()
        assert (row["weights"] == drawn).all()
        assert (row["drawn"] == np.where(drawn, each.logprobs[1:], 0)).all()
        assert (row["advantages"] == np.where(drawn, each.advantages[1:], 0)).all()


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_an_average_says_what_a_label_counts(average: str) -> None:
    batch = pack(TEXTS, config_of(average=average), 11)
    labels = sum(int(each.drawn.sum()) for each in TEXTS)
    # A step divides by the number of labels.
    total = batch["weights"].sum() / labels
    lengths = [int(each.drawn.sum()) for each in TEXTS]
    wanted = {"token": 1.0, "sequence": 1.0, "constant": np.mean(lengths) / 4}[average]
    assert total == pytest.approx(wanted)


def test_a_text_alone_has_a_row_of_its_own() -> None:
    batch = pack(TEXTS, config_of(), 12, alone=True)
    assert batch["segments"].max() == 1
    assert ((batch["segments"] > 0).any(1)).sum() == len(TEXTS)


def test_rows_are_of_few_numbers_which_the_mesh_divides() -> None:
    config = mt.load(
        {
            "mesh": {"data": 2},
            "parallel": {"microbatches": 2},
            "train": {
                "objective": "grpo",
                "global_batch_size": 64,
                "sequence_length": 12,
            },
            "rl": {"prompts": "x", "reward": "exact", "group": 4, "answers": 4},
        }
    )
    numbers = {rows_of(config, needed, 6) for needed in range(33)}
    assert numbers == {8, 16, 24, 32}


def test_no_row_has_more_than_it_can_hold() -> None:
    lengths = [7, 5, 4, 3, 3, 1]
    places = place_in_rows(lengths, 8)
    sums = np.bincount(places, weights=lengths)
    assert sums.max() <= 8
    assert len(sums) == 3
