"""Configs that read a source, and shards made without a preparation, for the tests of the data."""

from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config import Config, load
from meshtrain.data.manifest import ShardManifest
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.data.unit import ShardWriter


def config(
    source: Path | str, *, length: int = 64, batch: int = 8, seed: int = 0, **data: Any
) -> Config:
    """A config that reads `source` in batches of `batch` rows of `length`."""
    train = {"sequence_length": length, "global_batch_size": batch}
    return load(
        {"data": {"source": str(source), **data}, "train": train, "run": {"seed": seed}}
    )


def write_random_shards(
    directory: Path, shards: int, documents: int, mean: int
) -> None:
    """Shards of the byte tokenizer: documents of random bytes, of log-normal length."""
    draw, written = np.random.default_rng(0), []
    for number in range(shards):
        writer = ShardWriter(directory, f"train-{number:05d}", 256, np.dtype("<u2"))
        for n in (
            np.ceil(draw.lognormal(np.log(mean), 0.8, documents)).astype(int).tolist()
        ):
            writer.add(draw.integers(0, 256, n, np.uint16))
            writer.end_document()
        shard = writer.close()
        assert shard is not None
        written.append(shard)
    digest = load_tokenizer("byte").digest
    parts = {"train": tuple(written), "validation": ()}
    manifest = ShardManifest("byte", digest, 257, 256, "uint16", 0.0, parts, {})
    (directory / "manifest.json").write_text(manifest.to_json())
