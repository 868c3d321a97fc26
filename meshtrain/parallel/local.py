"""What one device does of a step, inside shard_map: its masters to weights, its rows to a loss, its gradients to shards.

Every collective of forward and backward is called from here; the optimizer comes after, in `meshtrain.step`.

    masters ──zero.open──► weights ─┐
                                    ├─ forward, backward ─► gradients ──zero.close──► shards
    rows ──microbatches─────────────┘
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain import scopes
from meshtrain.compat import varying
from meshtrain.config import ConfigError
from meshtrain.inputs import LABELS, inputs
from meshtrain.mesh import DATA
from meshtrain.model.dpo import counted
from meshtrain.model.hooks import Hooks
from meshtrain.parallel import accumulate
from meshtrain.parallel.forward import Batch, Forward, Judged, Totals, weighted
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.pipeline.execute import Executor
from meshtrain.parallel.reduce.feedback import Kept
from meshtrain.parallel.zero import Closed, Weights, Zero

Tree = Any


class Local:
    """The functions of one layout on devices of one platform; all but the constructor are called inside shard_map."""

    def __init__(self, layout: Layout, platform: str, hooks: Hooks, across: bool = True) -> None:
        """`across`: losses and gradients are summed over all of data, else over the data ranks of an island."""
        self.config, self.layout = layout.config, layout
        self.data_axes = self.config.mesh.data_axes
        self.summed_over = self.data_axes if across else (DATA,)
        self.zero = Zero(layout, across)
        self.forward = Forward(layout, self.zero, platform, hooks)
        self.executor = self._executor(self.forward)

    def gradients(
        self, masters: Tree, batch: Batch, step: jax.Array, scale: jax.Array, kept: Kept | None = None
    ) -> tuple[Totals, Closed]:
        """Means of the loss and of what else is measured, and `scale` times the loss's gradient as float32 shards.

        kept: what compression kept of the last step.
        """
        with jax.named_scope(scopes.ZERO):
            weights = self.zero.open(masters)
        batches, count = self.microbatches(batch)
        batches = self._with_reference(weights, batches)
        key = None
        if self.config.model.dropout or self.config.lora.dropout:
            key = jax.random.fold_in(jax.random.key(self.config.run.seed + 1), step)
        run = self.executor.train if self.executor else partial(accumulate.accumulate, self.forward)
        totals, gradients = run(weights, batches, key, scale / count)
        means = jax.tree.map(lambda total: self._sum(total) / count, totals)
        with jax.named_scope(scopes.ZERO):
            return means, self.zero.close(gradients, kept, scale)

    def loss(self, masters: Tree, batch: Batch) -> jax.Array:
        """The mean loss alone."""
        return self.loss_and_accuracy(masters, batch)[0]

    def loss_and_accuracy(self, masters: Tree, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
        """The mean loss, and of images the share of them whose likeliest class is theirs."""
        weights = self.zero.open(masters)
        batches, count = self.microbatches(batch)
        batches = self._with_reference(weights, batches)
        judged = self._judged(self.forward, weights, batches)
        total, _ = self.forward.total(judged.losses, batches)
        hits = None if judged.hits is None else self._sum(weighted(judged.hits, batches)) / count
        return self._sum(total) / count, hits

    def microbatches(self, batch: Batch) -> tuple[Batch, jax.Array]:
        """This data rank's rows as [microbatches, rows, ..] with their global indices, and what counts in the batch: tokens, images or,
        with objective dpo, pairs."""
        rows, length = len(inputs(batch)), self.forward.length(batch)
        m, tensor = self.config.parallel.microbatches, self.config.mesh.tensor
        if rows % m:
            raise ConfigError(f"the {rows} rows of a data rank cannot be cut into {m} microbatches; give a multiple.")
        if self.config.parallel.sequence_parallel and length % tensor:
            raise ConfigError(f"with sequence parallelism tensor {tensor} must divide the {length} tokens of a row.")
        batch = {**batch, "rows": lax.axis_index(self.data_axes) * rows + jnp.arange(rows)}
        cut = jax.tree.map(lambda a: a.reshape((m, -1, *a.shape[1:])), batch)
        if "weights" in batch:
            return cut, jnp.maximum(lax.psum(counted(batch), self.summed_over), 1.0)
        ranks = math.prod(self.config.mesh.ways(axis) for axis in self.summed_over)
        return cut, jnp.float32(ranks * batch[LABELS].size)

    def _with_reference(self, weights: Weights, batches: Batch) -> Batch:
        """The microbatches; with objective dpo also the losses of their tokens without the adapters, a forward through the same stages."""
        if self.config.train.objective != "dpo":
            return batches
        losses = self._judged(self.forward.without_adapters(), weights, batches).losses
        # One forward after the other, so that what they hold is never there at once.
        tokens, losses = lax.optimization_barrier((batches["tokens"], losses))
        return {**batches, "tokens": tokens, "reference": losses}

    def _judged(self, forward: Forward, weights: Weights, batches: Batch) -> Judged:
        """The labels of the microbatches one by one, [M, b, T] each."""
        executor = self._executor(forward)
        return executor.judged(weights, batches) if executor else accumulate.judged(forward, weights, batches)

    def _executor(self, forward: Forward) -> Executor | None:
        return Executor(forward, self.layout.table) if self.layout.table else None

    def _sum(self, loss: jax.Array) -> jax.Array:
        """Of all that devices have of a loss; over data, what `summed_over` names."""
        axes = tuple(axis for axis in varying(loss) if axis in self.summed_over or axis not in self.data_axes)
        return lax.psum(loss, axes) if axes else loss
