"""How well a model of images names the classes of images that it has not learned from.

    the run's held-out images,        ──► patches ──► logits [B, classes] ──► loss, and in which place the right class comes
    or those of a folder or of arrays

The images are as a run reads them when it evaluates: nothing random is done to them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.config import Config, replaced
from meshtrain.config.theirs import is_theirs
from meshtrain.data.images.opened import ImageBatches, open_images
from meshtrain.errors import ConfigError, short
from meshtrain.inputs import LABELS, PATCHES, WEIGHTS
from meshtrain.model.collectives import Collectives
from meshtrain.model.loss import Vocabulary, cross_entropy
from meshtrain.reader import Model

TOP = 5  # places


@dataclass(frozen=True)
class Named:
    """Of how many images the right class was the likeliest, or among the TOP likeliest; and the mean loss, as a run's evaluation has it."""

    source: str
    images: int
    loss: float
    top_1: float
    top_5: float

    def record(self) -> dict[str, Any]:
        """For --json."""
        told = {"images": self.images, "eval_loss": self.loss, "eval_accuracy": self.top_1, "top_5": self.top_5}
        return {"source": self.source, **told}

    def describe(self) -> list[str]:
        """For people."""
        return [
            f"{self.source}: {self.images:,} images",
            f"accuracy, top 1  {self.top_1:.4%}",
            f"accuracy, top 5  {self.top_5:.4%}",
            f"eval loss        {self.loss:.6f}",
        ]


def images_of(path: Path, config: Config, given: str | None) -> tuple[ImageBatches, int]:
    """The held-out images of a model's run, or all of those that are `given`, and how many batches of them are to be looked at.

    ConfigError where there are none, and for classes that the model has not.
    """
    if given is None:
        if is_theirs(path):
            raise ConfigError(
                f"{short(path)} was not trained here, so that it has no held-out images of its own; give some with --images."
            )
        _, held_out = open_images(config)
        if held_out is None:
            raise ConfigError(
                f"the run of {short(path)} holds out no images (data.validation); give some with --images."
            )
        return held_out, config.eval.batches
    # A run's own images say what its classes are called; a model of others' numbers them in the order of the names.
    source = {"source": given} if is_theirs(path) else {}
    _, held_out = open_images(replaced(config, data={**source, "validation_source": given}))
    assert held_out is not None, "validation_source is all held out"
    return held_out, held_out.batches_per_epoch


def named(
    model: Model,
    held_out: ImageBatches,
    batches: int,
    rows: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Named:
    """What a model makes of the first `batches`, `rows` images at a time. ConfigError where its loss is no number."""
    train, classes = model.config.train, model.config.model.vocab_size
    judge = jax.jit(partial(_judged, classes, train.label_smoothing, train.z_loss))
    totals, count = np.zeros(3), 0.0
    for k in range(batches):
        size = held_out.batch_shape(k)[0]
        for begin in range(0, size, rows):
            batch = held_out.batch(k, slice(begin, min(begin + rows, size)))
            weights = batch[WEIGHTS][:, 0] if WEIGHTS in batch else np.ones(len(batch[LABELS]))
            losses, places = map(np.asarray, judge(model(batch[PATCHES]), batch[LABELS][:, 0]))
            totals += [np.sum(x * weights, dtype=np.float64) for x in (losses, places == 0, places < TOP)]
            count += float(weights.sum())
        progress(k + 1, batches)
    if not np.isfinite(totals[0]) or not count:
        raise ConfigError(
            f"the model of {short(model.directory)} has no loss: its weights are damaged or it has diverged."
        )
    return Named(held_out.source, round(count), *(float(x) for x in totals / count))


def _judged(
    classes: int, smoothing: float, z_loss: float, logits_BV: jax.Array, labels_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss of each image, and the place of its class among all, from 0, [B]; of equals the first comes before."""
    logits, labels = logits_BV[:, None], labels_B[:, None]
    losses = cross_entropy(logits, labels, Vocabulary(classes, Collectives()), smoothing, z_loss)[:, 0]
    own = jnp.take_along_axis(logits_BV, labels, axis=1)
    before = (logits_BV > own) | ((logits_BV == own) & (jnp.arange(classes) < labels))
    return losses, before.sum(-1)
