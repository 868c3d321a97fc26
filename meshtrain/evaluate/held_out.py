"""A run's own held-out text: the loss that its evaluations told of, computed again of a checkpoint, on any mesh.

    config.yaml's section data ──open_data──► held-out batches 0 .. eval.batches ──some rows at a time──► mean over what counts

The batches are those of the run, in its own order; a run evaluates a whole batch on its mesh, and here some rows of it after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config
from meshtrain.config.theirs import is_theirs
from meshtrain.data import open_data
from meshtrain.data.digests import digests
from meshtrain.data.split import SplitBatches
from meshtrain.errors import ConfigError, say, short
from meshtrain.evaluate.perplexity import exp
from meshtrain.model.dpo import counted
from meshtrain.reader import Model

WAY_OUT = "give text with --text"


@dataclass(frozen=True)
class HeldOut:
    """What a run's evaluation would say of a checkpoint; of dpo the mean loss of pairs."""

    source: str
    loss: float
    counted: int  # labels that count, or pairs
    pairs: bool
    likelihood: bool  # whether the loss is a plain mean of -log p

    @property
    def perplexity(self) -> float | None:
        """None where the loss has more in it than likelihood: label smoothing, z loss, preferences."""
        return exp(self.loss) if self.likelihood else None

    def record(self) -> dict[str, Any]:
        """For --json."""
        what = "pairs" if self.pairs else "tokens"
        return {"text": self.source, "eval_loss": self.loss, "perplexity": self.perplexity, what: self.counted}

    def describe(self) -> list[str]:
        """For people."""
        told = [
            f"{self.source}: {self.counted:,} held-out {'pairs' if self.pairs else 'tokens'}",
            f"eval loss             {self.loss:.6f}",
        ]
        return told if self.perplexity is None else [*told, f"perplexity per token  {self.perplexity:.6g}"]


def held_out_of(path: Path, model: Model) -> SplitBatches:
    """The held-out batches of the run that a path names; ConfigError if it has none."""
    manifest = None if is_theirs(path) else Manifest.read(model.directory)
    if manifest is None or manifest.weights_alone:
        raise ConfigError(f"{short(path)} was not trained here, so that it has no held-out text of its own; {WAY_OUT}.")
    data, found = open_data(model.config)
    if found is None:
        raise ConfigError(f"the run of {short(path)} holds out no text (data.validation); {WAY_OUT}.")
    if digests(model.config, data, found).items() - manifest.data.items():
        say(f"{found.source} is not what the run has read: the loss is not that of its evaluations.")
    return found


def evaluated(
    model: Model, held_out: SplitBatches, rows: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> HeldOut:
    """The loss of the first eval.batches held-out batches, `rows` of a batch at a time. ConfigError where it is no number."""
    config, total, count = model.config, 0.0, 0.0
    for k in range(config.eval.batches):
        size = held_out.batch_shape(k)[0]
        for begin in range(0, size, rows):
            batch = held_out.batch(k, slice(begin, min(begin + rows, size)))
            # what counts in a batch differs, so that a mean of means would be that of no text
            counts = float(counted(jax.device_put(batch))) if "weights" in batch else batch["labels"].size
            if counts:
                total += model.loss(batch) * counts
                count += counts
        progress(k + 1, config.eval.batches)
    if not count or not np.isfinite(total):
        why = "nothing counts in its held-out batches" if not count else "its weights are damaged or it has diverged"
        raise ConfigError(f"the model of {short(model.directory)} has no loss: {why}.")
    return HeldOut(held_out.source, total / count, round(count), config.train.objective == "dpo", _likelihood(config))


def _likelihood(config: Config) -> bool:
    train = config.train
    return train.objective == "next_token" and not train.label_smoothing and not train.z_loss
