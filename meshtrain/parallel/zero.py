"""ZeRO over the `data` axis (Rajbhandari et al. 2020): what each data rank holds, and when it is gathered and scattered.

Between steps every stage from 1 on holds one shard of the float32 masters and of the optimizer state. They differ in the step:

    stage      start of the step     at each layer, forward and backward            end of the step
    0          masters are whole                                                    all-reduce of gradients       2Ψ sent
    1          all-gather weights                                                   reduce-scatter gradients      2Ψ
    2          all-gather weights    backward: reduce-scatter its gradient                                        2Ψ
    3                                all-gather its weights, twice; reduce-scatter                                3Ψ
    2, 3 held  as stage 1: with m microbatches the traffic at the layers would be m times as much

(sent per data rank, in elements of the Ψ parameters, times (N-1)/N.) Three calls tell the story: `open` what a step works on,
`use` a weight where the model needs it, `close` the accumulated gradients into shards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary
from meshtrain.mesh import DATA, ISLAND
from meshtrain.parallel.layout import Layout, is_placed
from meshtrain.parallel.placement import Placed, closes_early, gathers_at_use, scatters_at_use
from meshtrain.parallel.reduce.exchange import Sent
from meshtrain.parallel.reduce.feedback import Feedback, Kept, Summed
from meshtrain.parallel.reduce.reduction import Reduction
from meshtrain.parallel.reduce.shards import unpadded, zero_dimension
from meshtrain.parallel.reduce.statistics import Statistics, left_out, statistics

Tree = Any


class Weights(NamedTuple):
    """What a step differentiates (whole weights, or shards) and what it only reads: frozen weights, and in stage 2 the gathered ones.

    Two trees of all weights, with None where one of them has nothing to say of a weight.
    """

    differentiated: Tree
    constant: Tree

    def part(self, name: str) -> "Weights":
        """Those of the embedding, the blocks or the head."""
        return Weights(self.differentiated[name], self.constant[name])


class Closed(NamedTuple):
    """What a step's gradients became: float32 shards, what compression keeps for the next step, and numbers for the row of metrics."""

    shards: Tree
    kept: Kept | None
    statistics: Statistics


class Early(NamedTuple):
    """A gradient that was closed before the others: its shard, and of its pieces what was left out of them, float32 [pieces, 2] each."""

    shard: jax.Array
    squares: list[jax.Array]


class Zero:
    """The ZeRO stage of a layout, in `compute` dtype; gradients are summed by `reduction`, `across` islands too."""

    def __init__(self, layout: Layout, across: bool = True) -> None:
        config = layout.config
        self.layout = layout
        self.axes = config.mesh.axes
        self.reduction = Reduction(config, across)
        self.feedback = Feedback(layout, self.reduction)
        self.compute = jnp.dtype(config.precision.compute)
        self.gathers_at_use, self.scatters_at_use = gathers_at_use(config), scatters_at_use(config)
        self.closes_early = closes_early(config)

    def open(self, masters: Tree) -> Weights:
        """Inside shard_map: this device's masters (float32 shards) and frozen weights to what the step computes with."""
        shards = vary(jax.tree.map(lambda x: x.astype(self.compute), masters), self.axes)
        held = shards if self.gathers_at_use else self.layout.map(gather, shards)
        read_too = self.scatters_at_use and not self.gathers_at_use
        constant = self.layout.map(lambda weight, x: x if read_too or not weight.trained else None, held)
        return Weights(self.layout.only_trained(shards if self.scatters_at_use else held), constant)

    def use(self, part: str, weights: Weights) -> Tree:
        """Whole weights for the model from a part of `Weights` (of the blocks: a layer's, unstacked).

        Their gradient flows to `differentiated`: as it is, or summed and scattered over data.
        """
        return jax.tree.map(self._used, self.layout.weights[part], *weights, is_leaf=is_placed)

    def close(self, gradients: Tree, kept: Kept | None, scale: jax.Array) -> Closed:
        """Inside shard_map: accumulated partial gradients, times `scale`, to float32 shards, summed over every axis that the weight lacks.

        `kept` is what compression kept of the last step.
        """
        nothing = self.layout.map(lambda weight: None)
        residuals, qs = (nothing, nothing) if kept is None else kept

        def close(
            weight: Placed, g: jax.Array | Early, residual: jax.Array | None, q: jax.Array | None
        ) -> Summed | None:
            if not weight.trained:
                return None
            if isinstance(g, Early):
                return Summed(g.shard, [x.sum(0) for x in g.squares])
            memory = residual is not None or q is not None
            return self.feedback.summed(weight, g, residual, q, scale) if memory else self._summed(weight, g)

        summed = self.layout.map(close, gradients, residuals, qs)
        squares = [x for one in jax.tree.leaves(summed, is_leaf=_is_summed) for x in one.squares]
        # Of islands that step by themselves each has statistics of its own.
        axes = tuple(axis for axis in self.axes if axis != ISLAND or self.reduction.islands)
        measured = statistics(squares, axes, scale, self.layout.config.parallel.reduce.feedback)
        shards = self.layout.map(lambda weight, x: x and x.shard, summed)
        return Closed(shards, self.feedback.kept(summed, scale), measured)

    def early(self, part: str, gradients: Tree) -> Tree:
        """What `close` will take for closed, of a part's gradients (of the blocks: of some layers, stacked) that are complete while the
        step goes on. Norms and biases, which are small, stay as they are: at the end one message takes all of them.
        """

        def one(weight: Placed, g: jax.Array | None) -> Tree:
            if g is None or len(weight.axes) - weight.stacked < 2:
                return g
            summed = self._summed(weight, g)
            return Early(summed.shard, [x[None] for x in summed.squares])

        return jax.tree.map(one, self.layout.weights[part], gradients, is_leaf=is_placed)

    def _summed(self, weight: Placed, g: jax.Array) -> Summed:
        # Scattered at use it is summed over data already, where it was made.
        scattered = self.scatters_at_use and weight.zero_dim is not None
        inside = Sent(g, g) if scattered else self.reduction.scattered(weight, g)
        across = self.reduction.across(weight, inside.shard)
        shard = across.shard.astype(jnp.float32)
        squares = left_out(g, inside) + left_out(inside.shard, across)
        return Summed(lax.psum(shard, weight.replicated) if weight.replicated else shard, squares)

    def accumulated(self, weight: Placed, total: jax.Array, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """float32 `total` of a weight's gradient with what `add` puts into a whole gradient: straight into it, or summed and scattered."""
        if not (self.scatters_at_use and weight.zero_dim is not None):
            return add(total)
        shape = [n // ways for n, ways in zip(weight.whole, weight.ways, strict=True)]
        g = add(vary(jnp.zeros(shape, jnp.float32), self.axes))
        return total + self._scatter(weight, g)

    def _used(self, weight: Placed, differentiated: jax.Array | None, constant: jax.Array | None) -> jax.Array:
        if differentiated is None:
            assert constant is not None
            return gather(weight, constant) if self.gathers_at_use else constant
        if not self.scatters_at_use:
            return differentiated
        if constant is None:
            return self._gather_at_use(weight, differentiated)
        return self._scatter_at_use(weight, differentiated, constant)

    def _gather_at_use(self, weight: Placed, shard: jax.Array) -> jax.Array:
        if weight.zero_dim is None:
            return shard

        @jax.custom_vjp
        def use(shard: jax.Array) -> jax.Array:
            return gather(weight, shard)

        use.defvjp(lambda shard: (gather(weight, shard), None), lambda _, g: (self._scatter(weight, g),))
        return use(shard)

    def _scatter_at_use(self, weight: Placed, shard: jax.Array, whole: jax.Array) -> jax.Array:
        if weight.zero_dim is None:
            return shard

        @jax.custom_vjp
        def use(shard: jax.Array, whole: jax.Array) -> jax.Array:
            return whole

        use.defvjp(lambda shard, whole: (whole, None), lambda _, g: (self._scatter(weight, g), jnp.zeros_like(g)))
        return use(shard, whole)

    def _scatter(self, weight: Placed, g: jax.Array) -> jax.Array:
        return self.reduction.scattered(weight, g).shard.astype(g.dtype)


def _is_summed(x: Any) -> bool:
    return isinstance(x, Summed)


def gather(weight: Placed, shard: jax.Array) -> jax.Array:
    """All-gather over data along the weight's ZeRO dimension, padding off. Takes stacked leaves and single layers of them."""
    if weight.zero_dim is None:
        return shard
    dim = zero_dimension(weight, shard)
    return unpadded(weight, lax.all_gather(shard, DATA, axis=dim, tiled=True))
