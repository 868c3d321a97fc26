"""Mixtures: the shares are kept, each source is seen whole before any of it is seen again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_configs import config
from refusals import tells

from meshtrain.config import Config, ConfigError
from meshtrain.data import open_data
from meshtrain.data.mixture import BLOCK, Draw


def mixture(
    one: Path, other: Path, weights: tuple[float, ...] = (3.0, 1.0), **data: Any
) -> Config:
    return config(
        "mixture", mixture=[str(one), str(other)], weights=list(weights), **data
    )


@pytest.mark.parametrize(
    "weights", [(1.0,), (1.0, 1.0), (0.7, 0.2, 0.1), (1000.0, 1.0, 1e-6)]
)
def test_shares_are_kept_in_every_block_and_items_follow_one_another(weights):
    draw = Draw(weights, seed=1)
    assert draw.quotas.sum() == BLOCK and draw.quotas.min() >= 1
    exact = np.array(weights) / sum(weights)
    assert np.abs(draw.quotas / BLOCK - exact).max() <= len(weights) / BLOCK
    sources, indices = draw.locate(np.arange(3 * BLOCK))
    for source, quota in enumerate(draw.quotas):
        assert np.array_equal(indices[sources == source], np.arange(3 * quota))
        for block in range(3):
            assert (
                sources[block * BLOCK : (block + 1) * BLOCK] == source
            ).sum() == quota


def test_what_is_left_of_a_block_goes_to_the_source_furthest_below_its_share():
    assert [*Draw((1228.2, BLOCK - 1228.2), seed=0).quotas] == [1228, BLOCK - 1228]
    assert [*Draw((BLOCK - 1228.8, 1228.8), seed=0).quotas] == [BLOCK - 1229, 1229]


def test_any_number_can_be_asked_for_alone():
    draw = Draw((0.6, 0.4), seed=2)
    together = np.stack(draw.locate(np.arange(BLOCK - 50, BLOCK + 50)))
    alone = [
        np.stack(Draw((0.6, 0.4), seed=2).locate(np.array([n])))[:, 0]
        for n in range(BLOCK - 50, BLOCK + 50)
    ]
    assert np.array_equal(together, np.array(alone).T)


def test_sources_alternate_within_a_block():
    sources, _ = Draw((0.5, 0.5), seed=0).locate(np.arange(BLOCK))
    assert 0.45 < (np.diff(sources) != 0).mean() < 0.55


def test_rows_come_from_the_sources_in_their_shares(text, other_text):
    """The rows of each source alone are known, and with them where each row of the mixture is from."""
    rows: list[set[bytes]] = []
    for source in (text, other_text):
        alone, _ = open_data(config(source, batch=1))
        rows.append(
            {alone.batch(k)["labels"].tobytes() for k in range(alone.batches_per_epoch)}
        )
    assert not rows[0] & rows[1]
    train, _ = open_data(mixture(text, other_text))
    drawn = [
        row.tobytes() for k in range(BLOCK // 8) for row in train.batch(k)["labels"]
    ]
    assert sum(row in rows[0] for row in drawn) == 0.75 * BLOCK
    assert sum(row in rows[1] for row in drawn) == 0.25 * BLOCK
    # The epochs of a source: every row once, then every row once more
    for known in rows:
        mine = [row for row in drawn if row in known]
        for begin in range(0, len(mine) - len(known), len(known)):
            assert len(set(mine[begin : begin + len(known)])) == len(known)
        assert mine[: len(known)] != mine[len(known) : 2 * len(known)]


@pytest.mark.parametrize("batching", ["packed", "grouped", "budget"])
def test_every_batching_can_be_mixed(text, other_text, batching):
    train, _ = open_data(
        mixture(text, other_text, batching=batching, validation=0.2, last="pad")
    )
    labels = 0.0
    for k in range(200):
        batch = train.batch(k)
        assert (
            batch["tokens"].shape == train.batch_shape(k)
            and train.batch_shape(k) in train.shapes
        )
        labels += batch["weights"].sum()
    assert abs(labels / 200 / train.tokens_per_batch - 1) < 0.1


@pytest.mark.parametrize("batching", ["window", "packed", "grouped", "budget"])
def test_an_evaluation_ends_before_a_source_comes_round(text, other_text, batching):
    """The one with few held-out rows has most of the weight."""
    _, held_out = open_data(
        mixture(
            other_text, text, (20.0, 1.0), batching=batching, validation=0.3, batch=2
        )
    )
    once, epoch = held_out.one_pass(1000), held_out.batches_per_epoch

    def rows(numbers: range) -> list[bytes]:
        batches = map(held_out.batch, numbers)
        return [
            row.tobytes()
            for batch in batches
            for row in batch["tokens"][batch["weights"].any(1)]
        ]

    assert 1 < len(once) < epoch and len(set(rows(once))) == len(rows(once))
    further = range(len(once) + 1)
    assert len(set(rows(further))) < len(rows(further)) and held_out.one_pass(
        2
    ) == range(2)
    (fewer,) = held_out.fewer(1000)
    assert tells(
        fewer, f"{len(once)} batches, fewer than eval.batches 1000"
    ) and not held_out.fewer(2)


def test_a_source_too_small_for_a_row_is_reported_and_one_too_small_for_a_batch_is_padded(
    text, tmp_path
):
    (tmp_path / "tiny.txt").write_text("tiny")
    with pytest.raises(ConfigError, match=r"fewer than train\.sequence_length"):
        open_data(mixture(text, tmp_path / "tiny.txt", validation=0.0))
    for batching in ("grouped", "budget"):
        train, _ = open_data(
            mixture(text, tmp_path / "tiny.txt", batching=batching, validation=0.0)
        )
        assert tells(train.describe(), "fills no batch ... global_batch_size")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": [1.0, 0.0]}, r"data\.weights\[1\] is 0\.0; .* above 0"),
        ({"weights": [1.0, -2.0]}, r"data\.weights\[1\] is -2\.0; .* above 0"),
        ({"weights": [1.0]}, r"data\.weights has 1 .* 2 sources"),
        ({"mixture": [], "weights": []}, "names no sources; list them"),
        ({"mixture": ["stdlib", "synthetic"]}, "data.mixture names synthetic"),
        ({"source": "stdlib"}, r"set data\.source to mixture, .*leave"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(changes, said):
    values: dict[str, Any] = {
        "source": "mixture",
        "mixture": ["stdlib", "here"],
        "weights": [1.0, 2.0],
        **changes,
    }
    with pytest.raises(ConfigError, match=said):
        config(str(values.pop("source")), **values)
