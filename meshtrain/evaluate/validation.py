"""Evaluates any checkpoint on its run's validation data, or on images of one's own: the loss that the run logged, and accuracy.

    config.yaml's section data ──open_data──► validation batches, up to eval.batches ──some rows at a time──► means over what counts

The batches are those of the run, in its own order, and nothing random is done to images; a run evaluates a whole batch on its mesh,
and here some rows of it after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.config import Config, replaced
from meshtrain.data import SplitBatches, open_data
from meshtrain.data.batches import digests
from meshtrain.data.images.image_batches import ImageBatches, open_images
from meshtrain.data.loader import Batch
from meshtrain.errors import ConfigError, say, short
from meshtrain.evaluate.evaluation import averages
from meshtrain.evaluate.perplexity import exp
from meshtrain.hf_families import is_hf_directory
from meshtrain.inputs import LABELS, PATCHES, WEIGHTS
from meshtrain.model.collectives import Collectives
from meshtrain.model.loss import Vocabulary, counted, cross_entropy
from meshtrain.reader import Model

WAY_OUT = "give text with --text"
TOP = 5  # places

Progress = Callable[[int, int], None]  # batches done, of how many


@dataclass(frozen=True)
class TextLoss:
    """The loss that a run's evaluation would log of a checkpoint; of dpo the mean loss of pairs."""

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
        lines = [
            f"{self.source}: {self.counted:,} held-out {'pairs' if self.pairs else 'tokens'}",
            f"eval loss             {self.loss:.6f}",
        ]
        return lines if self.perplexity is None else [*lines, f"perplexity per token  {self.perplexity:.6g}"]


@dataclass(frozen=True)
class Accuracy:
    """The share of images whose class has the highest logit, or one of the TOP highest; and the mean loss, as a run's evaluation logs it."""

    source: str
    images: int
    loss: float
    top_1: float
    top_5: float

    def record(self) -> dict[str, Any]:
        """For --json."""
        losses = {"eval_loss": self.loss, "eval_accuracy": self.top_1, "top_5": self.top_5}
        return {"source": self.source, "images": self.images, **losses}

    def describe(self) -> list[str]:
        """For people."""
        return [
            f"{self.source}: {self.images:,} images",
            f"accuracy, top 1  {self.top_1:.4%}",
            f"accuracy, top 5  {self.top_5:.4%}",
            f"eval loss        {self.loss:.6f}",
        ]


def validation_text(path: Path, model: Model) -> SplitBatches:
    """Opens the validation batches of the run that a path names; ConfigError if it has none."""
    manifest = None if is_hf_directory(path) else StepManifest.read(model.directory)
    if manifest is None or manifest.weights_alone:
        raise ConfigError(f"{short(path)} was not trained here, so that it has no held-out text of its own; {WAY_OUT}.")
    data, validation = open_data(model.config)
    if validation is None:
        raise ConfigError(f"the run of {short(path)} holds out no text (data.validation); {WAY_OUT}.")
    if digests(model.config, data, validation).items() - manifest.data.items():
        say(f"{validation.source} is not what the run has read: the loss is not that of its evaluations.")
    return validation


def validation_images(path: Path, config: Config, other: str | None) -> tuple[ImageBatches, int]:
    """Opens the validation images of a model's run, or all images of the `other` source: (batches, how many of them to evaluate).

    ConfigError where there are none, and for classes that the model does not have.
    """
    if other is not None:
        # A run's own images say what its classes are called; an imported model numbers them in the order of the names.
        source = {"source": other} if is_hf_directory(path) else {}
        _, validation = open_images(replaced(config, data={**source, "validation_source": other}))
        assert validation is not None, "all of validation_source is validation data"
        return validation, validation.batches_per_epoch
    if is_hf_directory(path):
        raise ConfigError(
            f"{short(path)} was not trained here, so that it has no held-out images of its own; give some with --images."
        )
    _, validation = open_images(config)
    if validation is None:
        raise ConfigError(f"the run of {short(path)} holds out no images (data.validation); give some with --images.")
    return validation, config.eval.batches


def evaluate_text(
    model: Model, validation: SplitBatches, rows: int, progress: Progress = lambda done, total: None
) -> TextLoss:
    """Computes the loss of the validation batches, up to eval.batches, `rows` of a batch at a time. ConfigError where it is not finite."""
    config, train = model.config, model.config.train

    def measure(batch: Batch) -> tuple[float, float]:
        count = float(counted(jax.device_put(batch))) if WEIGHTS in batch else batch[LABELS].size
        return (model.loss(batch) if count else 0.0), count

    (loss,), count = averages(_portions(validation, config.eval.batches, rows, progress), measure)
    _check(model, loss, count)
    likelihood = train.objective == "next_token" and not train.label_smoothing and not train.z_loss
    return TextLoss(validation.source, loss, round(count), train.objective == "dpo", likelihood)


def evaluate_images(
    model: Model,
    validation: ImageBatches,
    batches: int,
    rows: int,
    progress: Progress = lambda done, total: None,
) -> Accuracy:
    """Evaluates the first `batches`, or all, `rows` images at a time. ConfigError where the loss is not finite."""
    train, classes = model.config.train, model.config.model.vocab_size
    judge = jax.jit(partial(_losses_and_places, classes, train.label_smoothing, train.z_loss))

    def measure(batch: Batch) -> tuple[list[float], float]:
        weights = batch[WEIGHTS][:, 0] if WEIGHTS in batch else np.ones(len(batch[LABELS]))
        losses, places = map(np.asarray, judge(model(batch[PATCHES]), batch[LABELS][:, 0]))
        count = float(weights.sum())
        sums = [np.sum(x * weights, dtype=np.float64) for x in (losses, places == 0, places < TOP)]
        return [float(x / max(count, 1)) for x in sums], count

    means, count = averages(_portions(validation, batches, rows, progress), measure)
    _check(model, means[0], count)
    return Accuracy(validation.source, round(count), *means)


def _portions(validation: SplitBatches, batches: int, rows: int, progress: Progress) -> Iterator[Batch]:
    for sentence in validation.fewer(batches):
        say(f"{sentence}.")
    indices = validation.one_pass(batches)
    for k in indices:
        size = validation.batch_shape(k)[0]
        for begin in range(0, size, rows):
            yield validation.batch(k, slice(begin, min(begin + rows, size)))
        progress(k + 1, len(indices))


def _check(model: Model, loss: float, count: float) -> None:
    if not count or not np.isfinite(loss):
        why = "nothing counts in its held-out batches" if not count else "its weights are damaged or it has diverged"
        raise ConfigError(f"the model of {short(model.directory)} has no loss: {why}.")


def _losses_and_places(
    classes: int, smoothing: float, z_loss: float, logits_BV: jax.Array, labels_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss of each image, and the place of its class among all by logit, from 0, [B]; of equals the first comes before."""
    logits, labels = logits_BV[:, None], labels_B[:, None]
    losses = cross_entropy(logits, labels, Vocabulary(classes, Collectives()), smoothing, z_loss)[:, 0]
    own = jnp.take_along_axis(logits_BV, labels, axis=1)
    before = (logits_BV > own) | ((logits_BV == own) & (jnp.arange(classes) < labels))
    return losses, before.sum(-1)
