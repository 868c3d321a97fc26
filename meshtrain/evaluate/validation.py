"""Evaluates any checkpoint on its run's validation data, or on images of one's own: the loss that the run logged, and
accuracy.

    config.yaml's section data ──open_data──► validation batches, up to eval.batches ──some rows at a time──► means

The batches are those of the run, in its own order, and nothing random is done to images; a run evaluates a whole batch
on its mesh, and here some rows of it after the other.
"""

from collections.abc import Callable, Iterator
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
from meshtrain.evaluate.perplexity import described, exp
from meshtrain.hf_families import is_hf_directory
from meshtrain.inputs import LABELS, PATCHES, WEIGHTS
from meshtrain.model.collectives import Collectives
from meshtrain.model.loss import Vocabulary, counted, cross_entropy
from meshtrain.reader import Model

WAY_OUT = "give text with --text"
TOP = 5  # ranks

Progress = Callable[[int, int], None]  # batches done, of how many


LOSS_LINES = (
    ("eval_loss", "eval loss", ".6f"),
    ("perplexity", "perplexity per token", ".6g"),
)
IMAGE_LINES = (
    ("eval_accuracy", "accuracy, top 1", ".4%"),
    ("top_5", "accuracy, top 5", ".4%"),
    ("eval_loss", "eval loss", ".6f"),
)


def validation_text(path: Path, model: Model) -> SplitBatches:
    """Opens the validation batches of the run that a path names; ConfigError if it has none."""
    manifest = None if is_hf_directory(path) else StepManifest.read(model.directory)
    if manifest is None or manifest.weights_alone:
        raise ConfigError(
            f"{short(path)} was not trained here, so that it has no held-out text of its own; {WAY_OUT}."
        )
    if model.config.train.objective == "grpo":
        raise ConfigError(
            f"the run of {short(path)} learns from its own answers (train.objective grpo), so that it has no held-out "
            f"text; {WAY_OUT}."
        )
    data, validation = open_data(model.config)
    if validation is None:
        raise ConfigError(
            f"the run of {short(path)} holds out no text (data.validation); {WAY_OUT}."
        )
    if digests(model.config, data, validation).items() - manifest.data.items():
        say(
            f"{validation.source} is not what the run has read: the loss is not that of its evaluations."
        )
    return validation


def validation_images(
    path: Path, config: Config, other: str | None
) -> tuple[ImageBatches, int]:
    """Opens the validation images of a model's run, or all images of the `other` source: (batches, how many of them to
    evaluate).

    ConfigError where there are none, and for classes that the model does not have.
    """
    if other is not None:
        # A run's own images say what its classes are called; an imported model numbers them in the order of the names.
        source = {"source": other} if is_hf_directory(path) else {}
        _, validation = open_images(
            replaced(config, data={**source, "validation_source": other})
        )
        assert validation is not None, "all of validation_source is validation data"
        return validation, validation.batches_per_epoch
    if is_hf_directory(path):
        raise ConfigError(
            f"{short(path)} was not trained here, so that it has no held-out images of its own; give some with "
            "--images."
        )
    _, validation = open_images(config)
    if validation is None:
        raise ConfigError(
            f"the run of {short(path)} holds out no images (data.validation); give some with --images."
        )
    return validation, config.eval.batches


def evaluate_text(
    model: Model,
    validation: SplitBatches,
    rows: int,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Returns the loss that the run's evaluation would log, of the validation batches up to eval.batches, `rows` of a
    batch at a time.

    `perplexity` is None unless the loss is a likelihood: not with preferences or a custom loss. ConfigError where it is
    not finite.
    """
    config = model.config
    train = model.config.train

    def measure(batch: Batch) -> tuple[float, float]:
        count = (
            float(counted(jax.device_put(batch)))
            if WEIGHTS in batch
            else batch[LABELS].size
        )
        return (model.loss(batch) if count else 0.0), count

    (loss,), count = averages(
        _portions(validation, config.eval.batches, rows, progress), measure
    )
    _check(model, loss, count)
    likelihood = train.objective == "next_token" and train.loss is None
    what = "pairs" if train.objective == "dpo" else "tokens"
    perplexity = exp(loss) if likelihood else None
    return {
        "text": validation.source,
        "eval_loss": loss,
        "perplexity": perplexity,
        what: round(count),
    }


def describe_text(record: dict[str, Any]) -> list[str]:
    """Returns what `evaluate_text` measured, for people."""
    what = "pairs" if "pairs" in record else "tokens"
    lines = LOSS_LINES if record["perplexity"] is not None else LOSS_LINES[:1]
    return [
        f"{record['text']}: {record[what]:,} held-out {what}",
        *described(record, lines),
    ]


def evaluate_images(
    model: Model,
    validation: ImageBatches,
    batches: int,
    rows: int,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Returns the loss and accuracy of the first `batches`, or all, `rows` images at a time: the share of images whose
    class has the highest logit, or one of the TOP highest. ConfigError where the loss is not finite.
    """
    judge = jax.jit(partial(_losses_and_ranks, model.config.model.vocab_size))

    def measure(batch: Batch) -> tuple[list[float], float]:
        weights = (
            batch[WEIGHTS][:, 0] if WEIGHTS in batch else np.ones(len(batch[LABELS]))
        )
        losses, ranks = map(
            np.asarray, judge(model(batch[PATCHES]), batch[LABELS][:, 0])
        )
        count = float(weights.sum())
        sums = [
            np.sum(x * weights, dtype=np.float64)
            for x in (losses, ranks == 0, ranks < TOP)
        ]
        return [float(x / max(count, 1)) for x in sums], count

    (loss, top_1, top_5), count = averages(
        _portions(validation, batches, rows, progress), measure
    )
    _check(model, loss, count)
    results = {"eval_loss": loss, "eval_accuracy": top_1, "top_5": top_5}
    return {"source": validation.source, "images": round(count), **results}


def describe_images(record: dict[str, Any]) -> list[str]:
    """Returns what `evaluate_images` measured, for people."""
    return [
        f"{record['source']}: {record['images']:,} images",
        *described(record, IMAGE_LINES, 15),
    ]


def _portions(
    validation: SplitBatches, batches: int, rows: int, progress: Progress
) -> Iterator[Batch]:
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
        why = (
            "nothing counts in its held-out batches"
            if not count
            else "its weights are damaged or it has diverged"
        )
        raise ConfigError(f"the model of {short(model.directory)} has no loss: {why}.")


def _losses_and_ranks(
    classes: int, logits_BV: jax.Array, labels_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss of each image, and the rank of its class among all by logit, from 0, [B]; of equals the first comes
    before.
    """
    logits = logits_BV[:, None]
    labels = labels_B[:, None]
    losses = cross_entropy(logits, labels, Vocabulary(classes, Collectives()))[:, 0]
    own = jnp.take_along_axis(logits_BV, labels, axis=1)
    before = (logits_BV > own) | ((logits_BV == own) & (jnp.arange(classes) < labels))
    return losses, before.sum(-1)
