"""One device's part of a step, inside shard_map: its master weights to weights, its rows to a loss, its gradients to
shards.

    masters ──zero.gather_params──► weights ─┐
                                             ├─ forward, backward ─► gradients ──zero.reduce_grads──► shards
    rows ──microbatches──────────────────────┘

`LocalStep` is where parallelism is applied to the model, in the order of its constructor. Every collective of forward
and backward is called from here; the optimizer comes after, in `meshtrain.step`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from meshtrain import xla
from meshtrain.compat import varying
from meshtrain.config import Config, ConfigError
from meshtrain.config.follow import drops
from meshtrain.config.reduce import sums_in_place
from meshtrain.config.rl import has_reference
from meshtrain.inputs import LABELS, WEIGHTS, inputs
from meshtrain.model.hooks import Hooks, ModelParts
from meshtrain.model.loss import counted
from meshtrain.parallel import accumulate
from meshtrain.parallel.forward import (
    LAST,
    ROW_GAPS,
    SEED,
    Batch,
    Forward,
    LabelLosses,
    LossAndGradients,
    sum_at_once,
    weighted,
)
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.reduce.reduction import Reduction, Statistics
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.parallel.zero import Weights, Zero

if TYPE_CHECKING:
    from meshtrain.parallel.pipeline.execute import Executor
    from meshtrain.parallel.reduce.feedback import FeedbackState

Tree = Any


class Gradients(NamedTuple):
    """Gradients and averaged metrics of a step, plus error-feedback residuals and compression statistics; or their
    PartitionSpecs.
    """

    loss: Any  # mean over what counts in the batch
    shards: Tree  # float32, times the loss scale; None of what is frozen
    feedback: Any = None  # a FeedbackState
    statistics: Statistics | Any = {}  # noqa: RUF012
    measured: Any = {}  # noqa: RUF012  by name, means of what else is measured
    # How much counts in the batch, where it is asked for: tokens, images or pairs
    counted: Any = None
    # Of live layers, each head's largest logit, where `optimizer.qk_clip` asks for it
    maxima: Any = None


def make_layout(
    config: Config, mesh: Mesh | AbstractMesh, masters: bool = True
) -> Layout:
    """Returns the layout of a config, whose storage has weights in float8 where products are."""
    if config.precision.matmul == "compute":
        return Layout(config, mesh, masters)
    from meshtrain.parallel.float8_storage import Float8Storage

    return Layout(config, mesh, masters, Float8Storage(config, masters))


def make_collectives(config: Config, platform: str) -> MeshCollectives:
    """Returns the collectives within a layer: those of experts and of context only where there are any."""
    if config.model.moe.experts:
        from meshtrain.parallel.experts import ExpertCollectives

        return ExpertCollectives(config, platform)
    if config.mesh.context > 1:
        from meshtrain.parallel.context import ContextCollectives

        return ContextCollectives(config, platform)
    return MeshCollectives(config, platform)


def make_zero(layout: Layout, across: bool = True) -> Zero:
    """Returns ZeRO of a layout, with the sums of gradients that its config asks for."""
    config = layout.config
    if config.parallel.reduce.compression == "none":
        return Zero(layout, Reduction(config, across))
    from meshtrain.parallel.reduce import exchange, feedback

    reduction = Reduction(config, across, exchange.Exchange(config))
    return Zero(layout, reduction, feedback.Feedback(layout, reduction))


class LocalStep:
    """The functions of one layout on devices of one platform; all but the constructor are called inside shard_map."""

    def __init__(
        self,
        layout: Layout,
        platform: str,
        hooks: Hooks,
        across: bool = True,
    ) -> None:
        """`across`: losses and gradients are summed over all of data, else over the data ranks of an island."""
        self.config = layout.config
        self.layout = layout
        self.data_axes = self.config.mesh.data_axes
        self.summed_over = self.config.mesh.token_axes(across)
        # 1. tensor and sequence parallelism: collectives within a layer, and over the vocabulary
        collectives = make_collectives(self.config, platform)
        # 2. block, attention and loss: built in, or replaced from outside
        parts = ModelParts(self.config, collectives, hooks)
        # 3. ZeRO over data: when weights are gathered; gradients are scattered, and summed across islands
        self.zero = make_zero(layout, across)
        # 4. embedding, layers and loss of those weights, each layer under its activation checkpointing
        self.forward = Forward(layout, self.zero, collectives, parts)
        forward = self.forward
        self.add_ahead = None
        if self.config.model.mtp:
            from meshtrain.parallel import predictions

            self.add_ahead = predictions.add_ahead
            forward.predictions = predictions.PredictionLosses(forward).seeded
        self.qk_clip = None
        if self.config.optimizer.qk_clip:
            from meshtrain.parallel.qk_clip import QkClip

            self.qk_clip = QkClip(forward)
            forward = self.qk_clip.forward
        # 5. microbatches: through the stages of a pipeline by its table, or one after the other
        self.executor = self._executor(forward)
        self.sends = self.executor is not None and self.executor.sends
        by_microbatch = accumulate.accumulate
        if self.forward.overlaps and sums_in_place(self.config):
            by_microbatch = accumulate.accumulate_in_place
        elif self.forward.overlaps and self.zero.overlaps_reduce_scatter:
            by_microbatch = accumulate.accumulate_overlapped
        self.loss_and_gradients: Callable[..., LossAndGradients] = (
            self.executor.train if self.executor else partial(by_microbatch, forward)
        )
        if self.qk_clip is not None:
            self.loss_and_gradients = self.qk_clip.counting(self.loss_and_gradients)

    def gradients(
        self,
        masters: Tree,
        batch: Batch,
        step: jax.Array,
        scale: jax.Array,
        feedback: "FeedbackState | None" = None,
        counts: bool = False,
    ) -> Gradients:
        """`scale` times the gradient of the mean loss; `feedback` is what compression kept of the last step."""
        with jax.named_scope(xla.ZERO):
            weights = self.zero.gather_params(masters, blocks=not self.sends)
        batches, count = self.microbatches(batch)
        batches = self._add_reference(weights, batches)
        key = None
        if drops(self.config):
            key = jax.random.fold_in(jax.random.key(self.config.run.seed + 1), step)
        divisor = _divisor(count)
        if SEED in batches:
            batches = {**batches, SEED: scale * batches[SEED]}
        totals, gradients, maxima = self.loss_and_gradients(
            weights, batches, key, scale / divisor
        )
        loss, measured = sum_at_once(self._sum, totals)
        gaps = measured.pop(ROW_GAPS, None)
        loss, measured = jax.tree.map(lambda total: total / divisor, (loss, measured))
        if gaps is not None:
            measured |= {ROW_GAPS: gaps, "rl/gap_max": gaps.max()}
        with jax.named_scope(xla.ZERO):
            reduced = self.zero.reduce_grads(gradients, feedback, scale)
        return Gradients(loss, *reduced, measured, count if counts else None, maxima)

    def clip(
        self, params: Tree, gradients: Gradients
    ) -> tuple[Tree, dict[str, jax.Array]]:
        """Updated weights after QK-clip, where there is one, and its numbers; outside shard_map."""
        if self.qk_clip is None:
            return params, {}
        return self.qk_clip.clip(params, gradients.maxima)

    def loss(self, masters: Tree, batch: Batch) -> jax.Array:
        """The mean loss alone, without what only regularises training."""
        return self.evaluated(masters, batch)["eval_loss"]

    def evaluated(self, masters: Tree, batch: Batch) -> dict[str, jax.Array]:
        """The means of an evaluation, by their names in a row: the loss without what only regularises training, and
        with it where the two differ; of images the share of them whose argmax is their class.
        """
        labels, batches, count = self._read(masters, batch)
        total, measured = self.forward.total(labels, batches)
        totals = {"eval_loss": measured.get("nll", total)}
        if labels.nll is not None:
            totals["eval_regularized_loss"] = total
        if labels.correct is not None:
            totals["eval_accuracy"] = weighted(labels.correct, batches)
        return {
            name: self._sum(total) / _divisor(count) for name, total in totals.items()
        }

    def row_gaps(self, masters: Tree, batch: Batch) -> jax.Array:
        """Returns `forward.ROW_GAPS` of a batch of answers, without a step."""
        labels, batches, _ = self._read(masters, batch)
        return self._sum(self.forward.total(labels, batches)[1][ROW_GAPS])

    def _read(
        self, masters: Tree, batch: Batch
    ) -> tuple[LabelLosses, Batch, jax.Array]:
        """The losses of a batch's labels without a step, its microbatches, and what counts in it."""
        weights = self.zero.gather_params(masters)
        batches, count = self.microbatches(batch)
        batches = self._add_reference(weights, batches)
        return self._label_losses(self.forward, weights, batches), batches, count

    def microbatches(self, batch: Batch) -> tuple[Batch, jax.Array]:
        """This data rank's rows as [microbatches, rows, ..] with their global indices and what experts must know of
        them, and what counts in
        the batch: tokens, images or, with objective dpo, pairs.
        """
        rows = len(inputs(batch))
        length = self.forward.length(batch)
        m = self.config.parallel.microbatches
        tensor = self.config.mesh.tensor
        if rows % m:
            raise ConfigError(
                f"the {rows} rows of a data rank cannot be cut into {m} microbatches; give a multiple."
            )
        if self.config.parallel.sequence_parallel and length % tensor:
            raise ConfigError(
                f"with sequence parallelism tensor {tensor} must divide the {length} tokens of a row."
            )
        batch = {
            **batch,
            "rows": lax.axis_index(self.data_axes) * rows + jnp.arange(rows),
        }
        of_experts, count = self._counted(batch)
        return jax.tree.map(
            lambda a: a.reshape((m, -1, *a.shape[1:])), {**batch, **of_experts}
        ), count

    def _counted(self, batch: Batch) -> tuple[Batch, jax.Array]:
        """For experts and QK-clip, where each row's last place that weighs is, and its share of the labels that weigh;
        and what counts in the batch.
        """
        ranks = math.prod(self.config.mesh.ways(axis) for axis in self.summed_over)
        experts = self.config.model.moe.experts or self.qk_clip
        collectives = self.forward.collectives
        if WEIGHTS not in batch:
            count = jnp.float32(ranks * batch[LABELS].size)
            share = (
                jnp.full(
                    len(batch[LABELS]), batch[LABELS].shape[1] * collectives.context
                )
                / count
            )
            return ({SEED: share} if experts else {}), count
        count = counted(batch, collectives)
        if not experts:
            return {}, lax.psum(count, self.summed_over)
        # Of pairs half of the weights are negative; of answers they say what a label counts, not that it does.
        of_rows = jnp.abs(
            jnp.sign(batch[WEIGHTS]) if "advantages" in batch else batch[WEIGHTS]
        ).sum(-1)
        count, labels = lax.psum(jnp.stack([count, of_rows.sum()]), self.summed_over)
        if "segments" in batch:
            last = {}
        else:
            last = {LAST: self.forward.last_weighing(batch[WEIGHTS])}
        return {SEED: collectives.row_sum(of_rows) / _divisor(labels), **last}, count

    def _add_reference(self, weights: Weights, batches: Batch) -> Batch:
        """The microbatches; where a reference is asked for also the losses of their tokens without the adapters, a
        forward through the same stages.
        """
        if not has_reference(self.config):
            return batches
        losses = self._label_losses(
            self.forward.disable_adapters(), weights, batches
        ).losses
        # One forward after the other, so that the activations of both are never alive together.
        tokens, losses = lax.optimization_barrier((batches["tokens"], losses))
        return {**batches, "tokens": tokens, "reference": losses}

    def _label_losses(
        self,
        forward: Forward,
        weights: Weights,
        batches: Batch,
    ) -> LabelLosses:
        """The labels of the microbatches one by one, [M, b, T] each."""
        executor = self._executor(forward)
        if executor:
            return executor.label_losses(weights, batches)
        return accumulate.label_losses(forward, weights, batches)

    def _executor(self, forward: Forward) -> "Executor | None":
        if not self.layout.table:
            return None
        from meshtrain.parallel.pipeline.execute import Executor

        return Executor(forward, self.layout.table)

    def _sum(self, loss: jax.Array) -> jax.Array:
        """The sum of all that devices have of a loss; over data, of those that `summed_over` names."""
        axes = tuple(
            axis
            for axis in sorted(varying(loss))
            if axis in self.summed_over or axis not in self.config.mesh.token_axes()
        )
        if axes:
            return lax.psum(loss, axes)
        return loss


def _divisor(count: jax.Array) -> jax.Array:
    """The number that a sum is divided by for its mean: where nothing counts the sum is 0, and so is the mean."""
    return jnp.where(count > 0, count, 1.0)
