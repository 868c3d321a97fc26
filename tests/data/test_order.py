"""One global order: batch k is the same rows in the same order whatever the mesh, the processes and the history of the
run; and every document of an epoch is seen exactly once.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_configs import config

from meshtrain.config import Config, to_yaml
from meshtrain.data import Loader, TextBatches, open_data

ROOT = Path(__file__).parents[2]
STEPS = 24  # more than an epoch of the packed rows
BATCHINGS = ("window", "packed", "grouped", "budget")


def chosen(batching: str, text: Path, other_text: Path) -> Config:
    """The batching, over one source or, as a fifth case, over a mixture."""
    options: dict[str, Any] = {"batching": batching, "lengths": 4, "last": "pad"}
    if batching == "mixture":
        options |= {
            "batching": "packed",
            "mixture": [str(text), str(other_text)],
            "weights": [0.7, 0.3],
        }
        return config("mixture", length=512, **options)
    return config(text, length=512, **options)


@pytest.fixture(params=[*BATCHINGS, "mixture"])
def setting(request: pytest.FixtureRequest, text: Path, other_text: Path) -> Config:
    return chosen(request.param, text, other_text)


def share(rank: int, ranks: int, rows: int) -> slice:
    """The rows of a data-parallel rank."""
    return slice(rank * rows // ranks, (rank + 1) * rows // ranks)


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


def whole(train: TextBatches, steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    return [train.batch(k) for k in range(steps)]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_rows_of_all_ranks_together_are_the_global_batch(setting, ranks):
    expected = whole(open_data(setting)[0])
    readers = [open_data(setting)[0] for _ in range(ranks)]
    for k, batch in enumerate(expected):
        rows = readers[0].batch_shape(k)[0]
        parts = [
            reader.batch(k, share(rank, ranks, rows))
            for rank, reader in enumerate(readers)
        ]
        assert equal(
            {name: np.concatenate([part[name] for part in parts]) for name in batch},
            batch,
        )


def test_each_rank_of_context_reads_its_own_places_of_a_row_and_no_more(
    setting, bytes_read
):
    ranks, train, read = 4, open_data(setting)[0], []
    for k in range(8):
        batch, (rows, length) = train.batch(k), train.batch_shape(k)
        chunks = np.array_split(np.arange(length), 2 * ranks)
        for rank in range(ranks):
            places = np.append(chunks[rank], chunks[2 * ranks - 1 - rank])
            bytes_read.clear()
            part = train.batch(k, slice(1, rows), places)
            assert equal(part, {name: x[1:, places] for name, x in batch.items()})
            counted = batch.get("weights", np.ones((rows, length)))[1:, places].sum()
            # An id has two bytes; of each stretch the token before the first label is read besides.
            read.append((sum(bytes_read), 2 * (counted + len(bytes_read))))
    assert (
        all(seen == right > 0 for seen, right in read)
        and not train.batch(0, slice(0), places)["labels"].size
    )


def test_a_run_stopped_at_five_random_steps_goes_on_with_the_same_batches_on_another_mesh(
    setting,
):
    expected = whole(open_data(setting)[0])
    stops = sorted(
        np.random.default_rng(5).choice(np.arange(1, STEPS), 5, replace=False).tolist()
    )
    for begin, end, ranks in zip(
        [0, *stops], [*stops, STEPS], (1, 8, 2, 4, 1, 8), strict=True
    ):
        # A new run: all that it knows of the last is `begin`
        train = open_data(setting)[0]
        loaders = [
            Loader(
                train,
                begin,
                lambda shape, r=rank, n=ranks: (share(r, n, shape[0]), None),
            )
            for rank in range(ranks)
        ]  # type: ignore[misc]
        for k in range(begin, end):
            parts = [next(loader) for loader in loaders]
            assert {number for number, _ in parts} == {k}
            batch = {
                name: np.concatenate([part[name] for _, part in parts])
                for name in expected[k]
            }
            assert equal(batch, expected[k])
        for loader in loaders:
            loader.close()


READ_OWN_ROWS = """
import sys, numpy as np
from meshtrain.config import load
from meshtrain.data import Loader, open_data
path, out, rank, ranks, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
train, _ = open_data(load(path))
loader = Loader(train, 0, lambda shape: (slice(rank * shape[0] // ranks, (rank + 1) * shape[0] // ranks), None))
found = {}
for _ in range(steps):
    k, batch = next(loader)
    found |= {f"{k}/{name}": array for name, array in batch.items()}
loader.close()
assert "jax" not in sys.modules
np.savez(out, **found)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("batching", ["mixture", "budget"])
def test_two_real_processes_with_nothing_cached_read_the_batches_of_one(
    batching, text, other_text, tmp_path
):
    setting = chosen(batching, text, other_text)
    (tmp_path / "config.yaml").write_text(to_yaml(setting))
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", READ_OWN_ROWS, str(tmp_path / "config.yaml")]
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path / f"{rank}.npz"), str(rank), "2", str(STEPS)],
            env=environment,
        )
        for rank in range(2)
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    parts = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    for k, batch in enumerate(whole(open_data(setting)[0])):
        for name, array in batch.items():
            assert np.array_equal(
                np.concatenate([part[f"{k}/{name}"] for part in parts]), array
            )
            assert len(parts[0][f"{k}/{name}"]) == len(array) // 2


def documents_seen(train: TextBatches, epoch: int) -> Counter[int]:
    """How often each document is met in an epoch: they begin with their number."""
    found: Counter[int] = Counter()
    for k in range(
        epoch * train.batches_per_epoch, (epoch + 1) * train.batches_per_epoch
    ):
        batch = train.batch(k)
        real = batch["weights"] > 0
        starts = np.argwhere(
            (batch["tokens"] == train.tokenizer.end_of_document) & real
        )
        for row, column in starts:
            found[
                int(
                    train.tokenizer.decode(
                        batch["labels"][row, column : column + 5]
                    ).split()[0]
                )
            ] += 1
    return found


def labels_seen(train: TextBatches, epoch: int) -> Counter[int]:
    """How often each id is a label with weight in an epoch."""
    found: Counter[int] = Counter()
    for k in range(
        epoch * train.batches_per_epoch, (epoch + 1) * train.batches_per_epoch
    ):
        batch = train.batch(k)
        found.update(batch["labels"][batch["weights"] > 0].tolist())
    return found


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_document_and_every_token_is_seen_exactly_once_an_epoch(
    batching, epoch, text
):
    train, _ = open_data(
        config(text, length=64, batching=batching, last="pad", validation=0.0)
    )
    texts = [path.read_bytes() for path in sorted(text.iterdir())]
    assert labels_seen(train, epoch) == Counter(b"".join(texts)) + Counter(
        {256: len(texts)}
    )
    # A window may begin with the end of a document, after its first token
    if batching != "window":
        assert documents_seen(train, epoch) == Counter(range(len(texts)))


@pytest.mark.parametrize("batching", BATCHINGS)
def test_each_epoch_and_each_seed_has_an_order_of_its_own(batching, text):
    def order(seed: int, epoch: int) -> list[bytes]:
        train, _ = open_data(config(text, seed=seed, batching=batching, last="pad"))
        first = epoch * train.batches_per_epoch
        return [
            train.batch(k)["labels"].tobytes()
            for k in range(first, first + train.batches_per_epoch)
        ]

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert orders[0] == order(0, 0)
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (
                sum(a == b for a, b in zip(one, other, strict=True)) <= len(one) // 10
            )


@pytest.mark.parametrize("batching", BATCHINGS)
def test_drop_leaves_out_only_what_does_not_fill_a_batch(batching, text):
    train, _ = open_data(config(text, batching=batching, last="drop", validation=0.0))
    everything = sum(path.stat().st_size + 1 for path in text.iterdir())
    seen = 0
    for k in range(train.batches_per_epoch):
        batch = train.batch(k)
        weights = batch.get("weights", np.ones_like(batch["labels"]))
        assert weights.any(1).all()  # no row of padding alone
        seen += int(weights.sum())
    most_rows = max(rows for rows, _ in train.shapes)
    assert 0 <= everything - seen < (most_rows + 1) * 64


def test_the_order_is_the_same_in_every_version(tmp_path):
    """Written down once: a run that is resumed after an upgrade must meet the rest of its epoch."""
    lines = "".join(
        json.dumps({"text": "abcdefghij"[: 1 + i % 10] + str(i)}) + "\n"
        for i in range(40)
    )
    (tmp_path / "some.jsonl").write_text(lines)
    found = {}
    for batching in BATCHINGS:
        options = {"batching": batching, "validation": 0.0, "seed": 3}
        train, _ = open_data(
            config(tmp_path / "some.jsonl", length=16, batch=2, **options)
        )
        found[batching] = [
            train.tokenizer.decode(row[row > 0]) for row in train.batch(5)["labels"]
        ]
    assert found == {
        "window": ["gh7abcdefghi8a", "abcdefg6abcdef"],
        "packed": ["abcdefghi8ab31", "abcde14abcde34"],
        "grouped": ["abcdefghij29", "ab11"],
        "budget": ["abcdefghij29", "ab11"],
    }
