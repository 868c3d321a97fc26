"""Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what compression leaves out of a step is added to the
next one's gradient.

    gradient g ──+──► g' ──compressed──► summed over the ranks ──► shard
                 │     └── less what of it came through ──► residual
                 └────────────── next step ◄────────────────┘

Whatever the compression, what was sent in all steps and the residuals add up to the sum of all gradients. Residuals are
in units of the gradient itself, without float16's loss scale, so that it may change; a step that is skipped leaves them
as they were.
"""

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.config.reduce import scatters_at_use
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce import powersgd
from meshtrain.parallel.reduce.reduction import (
    ReducedGradient,
    Reduction,
    padded,
    squares,
    unpadded,
)
from meshtrain.parallel.reduce.sizes import (
    Spread,
    as_matrix,
    check_rank,
    over_islands,
    q_spread,
    residual_spread,
    summed_over,
)

Tree = Any


class FeedbackState(NamedTuple):
    """The state that compression keeps from step to step, float32: trees of the weights, None where there is nothing of
    one.
    """

    residual: Tree  # [ranks, *what is compressed], see `sizes.residual_spread`
    q: Tree  # PowerSGD's, see `sizes.q_spread`


class Feedback:
    """Gradients of a layout that are summed with what earlier steps have kept.

    ConfigError where PowerSGD would compress nothing.
    """

    def __init__(self, layout: Layout, reduction: Reduction) -> None:
        self.layout = layout
        self.config = layout.config
        self.reduction = reduction
        check_rank(self.config)

    @cached_property
    def shapes(self) -> FeedbackState | None:
        """ShapeDtypeStructs of what is kept, with shardings; None where nothing is."""

        def shape(spread: Spread | None) -> jax.ShapeDtypeStruct | None:
            if spread is None:
                return None
            spec = PartitionSpec(*(axes or None for axes in spread.over))
            return jax.ShapeDtypeStruct(
                spread.shape,
                jnp.float32,
                sharding=NamedSharding(self.layout.mesh, spec),
            )

        parts = [
            self.layout.map(lambda w, of=of: shape(of(self.config, w)))
            for of in (residual_spread, q_spread)
        ]
        return FeedbackState(*parts) if jax.tree.leaves(parts) else None

    @property
    def specs(self) -> Tree:
        """PartitionSpecs of what is kept."""
        return jax.tree.map(lambda x: x.sharding.spec, self.shapes)

    def init(self, key: jax.Array) -> FeedbackState | None:
        """Before the first step: nothing is left out yet, and Q is drawn.

        Call it under jit with `shapes`' shardings as output.
        """
        if self.shapes is None:
            return None
        return FeedbackState(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes.residual),
            self.init_q(key),
        )

    def init_q(self, key: jax.Array) -> Tree:
        """Q as it begins, the same on all ranks that are summed."""
        assert self.shapes is not None
        leaves, tree = jax.tree.flatten(self.shapes.q)
        drawn = [
            jax.random.normal(jax.random.fold_in(key, n), x.shape)
            for n, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, drawn)

    def reduce(
        self,
        weight: Placed,
        g: jax.Array,
        residual: jax.Array | None,
        q: jax.Array | None,
        scale: jax.Array,
    ) -> ReducedGradient:
        """A gradient, times `scale`, of a weight of which something is kept; inside shard_map, on a device's own
        blocks.
        """
        across = over_islands(self.config)
        compensated = self._sum_island(weight, g) if across else g.astype(jnp.float32)
        if residual is not None:
            compensated = compensated + residual[0] * scale
        if q is not None:
            return self._low_rank(weight, compensated, q, across)
        if across:
            sent = self.reduction.all_reduce_islands(weight, compensated)
            return _summed(sent.shard, compensated, compensated - sent.arrived)
        inside = self.reduction.reduce_scatter(weight, compensated)
        total = self.reduction.all_reduce_islands(weight, inside.shard)
        left_out = compensated - inside.arrived
        if total.arrived is not inside.shard:
            left_out = _add_shard(weight, left_out, inside.shard - total.arrived)
        shard = (
            lax.psum(total.shard, weight.replicated)
            if weight.replicated
            else total.shard
        )
        return _summed(shard, compensated, left_out)

    def _sum_island(self, weight: Placed, g: jax.Array) -> jax.Array:
        """Returns the operand of the sum across islands: the shard of the island's gradient, float32, of which no
        model-parallel rank has a part alone.
        """
        scattered = scatters_at_use(self.config) and weight.zero_dim is not None
        shard = (
            g if scattered else self.reduction.reduce_scatter(weight, g).shard
        ).astype(jnp.float32)
        return lax.psum(shard, weight.replicated) if weight.replicated else shard

    def _low_rank(
        self,
        weight: Placed,
        compensated: jax.Array,
        q: jax.Array,
        across: bool,
    ) -> ReducedGradient:
        seen = as_matrix(self.config, weight)
        assert seen is not None
        sent = powersgd.summed(
            weight,
            seen,
            compensated,
            q,
            summed_over(self.config, weight),
            shard=not across,
        )
        return _summed(sent.sum, compensated, compensated - sent.arrived, sent.q)

    def next_state(self, reduced: Tree, scale: jax.Array) -> FeedbackState | None:
        """Returns the state for the next step, from the results of `reduce` for each gradient."""
        if self.shapes is None:
            return None
        fed_back = self.config.parallel.reduce.feedback

        def residual(_: Placed, x: ReducedGradient | None) -> jax.Array | None:
            if fed_back and x is not None and x.left_out is not None:
                return x.left_out[None] / scale
            return None

        return FeedbackState(
            self.layout.map(residual, reduced),
            self.layout.map(lambda _, x: x and x.q, reduced),
        )


def _summed(
    shard: jax.Array,
    compensated: jax.Array,
    left_out: jax.Array,
    q: jax.Array | None = None,
) -> ReducedGradient:
    return ReducedGradient(shard, [squares(compensated, left_out)], left_out, q)


def _add_shard(weight: Placed, g: jax.Array, shard: jax.Array) -> jax.Array:
    """Adds `shard` to the part of a data rank's gradient that the rank sums."""
    dim = weight.zero_dim
    whole = padded(weight, g)
    assert dim is not None
    each = shard.shape[dim]
    at = lax.axis_index(weight.zero_axes) * each
    own = lax.dynamic_slice_in_dim(whole, at, each, dim) + shard
    return unpadded(weight, lax.dynamic_update_slice_in_dim(whole, own, at, dim))
