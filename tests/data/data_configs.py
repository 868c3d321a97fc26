"""Configs that read a source, for the tests of the data."""

from pathlib import Path
from typing import Any

from meshtrain.config import Config, decode


def config(source: Path | str, *, length: int = 64, batch: int = 8, seed: int = 0, **data: Any) -> Config:
    """A config that reads `source` in batches of `batch` rows of `length`."""
    train = {"sequence_length": length, "global_batch_size": batch}
    return decode({"data": {"source": str(source), **data}, "train": train, "run": {"seed": seed}})
