"""Batches that are located ahead: the same whoever asks in whatever order, and as quick as copying what they hold."""

from pathlib import Path

import numpy as np
import pytest
from data_configs import config, write_random_shards

from meshtrain.config import Config
from meshtrain.data import TextBatches, open_data
from meshtrain.data.manifest import PADDING
from meshtrain.data.token_rows import arrange_rows


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of short documents, 2 million tokens."""
    directory = tmp_path_factory.mktemp("shards")
    write_random_shards(directory, shards=3, documents=8_000, mean=80)
    return directory


def stream(directory: Path) -> np.ndarray:
    """All tokens: each shard begins with the end that the one before ended with."""
    parts = [
        np.fromfile(path, "<u2") for path in sorted(directory.glob("train-*.tokens"))
    ]
    return np.concatenate([parts[0], *(part[1:] for part in parts[1:])]).astype(
        np.int32
    )


def slowly(train: TextBatches, directory: Path, k: int) -> dict[str, np.ndarray]:
    """Batch k, a label at a time, from where its rows say that they lie."""
    tokens, rows_of = stream(directory), train.batches.rows  # type: ignore[union-attr]
    rows, length = train.batch_shape(k)
    epoch, index = divmod(k, train.batches_per_epoch)
    batch = {
        name: np.zeros((rows, length), np.int32)
        for name in ("tokens", "labels", "segments", "positions")
    }
    batch["weights"] = np.zeros((rows, length), np.float32)
    for row in range(min(rows, rows_of.count - index * rows)):
        places, at = (
            rows_of.locate(np.array([epoch * rows_of.count + index * rows + row])),
            0,
        )
        for segment, (first, n) in enumerate(
            zip(places.first.tolist(), places.lengths.tolist(), strict=True), start=1
        ):
            for position in range(n if first != PADDING else 0):
                values = (
                    tokens[first + position],
                    tokens[first + position + 1],
                    segment,
                    position,
                    1,
                )
                for name, value in zip(batch, values, strict=True):
                    batch[name][row, at + position] = value
            at += n
        assert at == length
    return batch


@pytest.mark.parametrize("batching", ["window", "packed"])
@pytest.mark.parametrize(("length", "size"), [(64, 3), (257, 2)])
def test_a_batch_is_what_lies_where_its_rows_say_a_label_at_a_time(
    batching, length, size, shards
):
    settings = config(
        shards, length=length, batch=size, batching=batching, last="pad", verify=False
    )
    train, _ = open_data(settings)
    last = train.batches_per_epoch - 1
    for k in (0, 1, last, last + 1, 5 * last):
        found, expected = train.batch(k), slowly(train, shards, k)
        for name, x in found.items():
            assert x.dtype == expected[name].dtype and np.array_equal(
                x, expected[name]
            ), (name, k)


def small(batching: str, text: Path, other_text: Path) -> Config:
    options = {"batching": batching, "last": "pad", "lengths": 4}
    if batching == "mixture":
        mixed = {
            "batching": "packed",
            "mixture": [str(text), str(other_text)],
            "weights": [0.7, 0.3],
        }
        return config("mixture", length=256, **{**options, **mixed})
    if batching == "synthetic":
        return config("synthetic", length=256)
    return config(text, length=256, **options)


@pytest.mark.parametrize(
    "batching", ["window", "packed", "grouped", "budget", "mixture", "synthetic"]
)
def test_a_batch_is_the_same_whatever_was_asked_for_before(batching, text, other_text):
    settings = small(batching, text, other_text)
    train, _ = open_data(settings)
    many = min(2 * train.batches_per_epoch + 1, 70)  # beyond what is located at a time
    expected = [train.batch(k) for k in range(many)]
    fresh, _ = open_data(settings)
    for k in np.random.default_rng(0).permutation(many).tolist():
        for rows in (slice(None), slice(1, None, 2), slice(0, 0)):
            found = fresh.batch(k, rows)
            assert found.keys() == expected[k].keys()
            assert all(
                np.array_equal(x, expected[k][name][rows]) for name, x in found.items()
            )


def test_rows_are_filled_up_behind_their_stretches_and_empty_stretches_dropped():
    rows = arrange_rows(
        6, np.array([2, 1, 1]), np.array([10, 20, 0, 30]), np.array([4, 1, 0, 6])
    )
    assert rows.first.tolist() == [10, 20, PADDING, PADDING, 30]
    assert rows.lengths.tolist() == [4, 1, 1, 6, 6]
    assert rows.segments.tolist() == [1, 2, 0, 0, 1]
    assert rows.edges.tolist() == [0, 3, 4, 5]
    assert (rows[1:].first.tolist(), rows[1:].edges.tolist()) == (
        [PADDING, 30],
        [0, 1, 2],
    )
    assert rows[3:].edges.tolist() == [0]
