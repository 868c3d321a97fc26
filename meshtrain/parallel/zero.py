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
from meshtrain.mesh import AXES, DATA
from meshtrain.parallel.layout import Layout, is_placed
from meshtrain.parallel.placement import Placed, gathers_at_use, scatters_at_use

Tree = Any


class Weights(NamedTuple):
    """What a step differentiates (whole weights, or shards) and what it only reads (stage 2: the gathered weights)."""

    differentiated: Tree
    constant: Tree | None

    def part(self, name: str) -> "Weights":
        """Those of the embedding, the blocks or the head."""
        return Weights(self.differentiated[name], None if self.constant is None else self.constant[name])


class Zero:
    """The ZeRO stage of a layout, in `compute` dtype, with gradients summed over data in `reduce` dtype."""

    def __init__(self, layout: Layout) -> None:
        config = layout.config
        self.layout = layout
        self.compute = jnp.dtype(config.precision.compute)
        self.reduce = jnp.dtype(config.precision.reduce)
        self.gathers_at_use, self.scatters_at_use = gathers_at_use(config), scatters_at_use(config)

    def open(self, masters: Tree) -> Weights:
        """Inside shard_map: this device's masters (float32 shards) to what the step computes with."""
        shards = vary(jax.tree.map(lambda x: x.astype(self.compute), masters), AXES)
        if self.gathers_at_use:
            return Weights(shards, None)
        whole = self.layout.map(gather, shards)
        return Weights(shards, whole) if self.scatters_at_use else Weights(whole, None)

    def use(self, part: str, weights: Weights) -> Tree:
        """Whole weights for the model from a part of `Weights` (of the blocks: a layer's, unstacked).

        Their gradient flows to `differentiated`: as it is, or summed and scattered over data.
        """
        if not self.scatters_at_use:
            return weights.differentiated
        placed = self.layout.weights[part]
        if weights.constant is None:
            return jax.tree.map(self._gather_at_use, placed, weights.differentiated, is_leaf=is_placed)
        return jax.tree.map(self._scatter_at_use, placed, weights.differentiated, weights.constant, is_leaf=is_placed)

    def close(self, gradients: Tree) -> Tree:
        """Inside shard_map: accumulated partial gradients to float32 shards, summed over every axis that the weight lacks."""
        return self.layout.map(self._closed, gradients)

    def _closed(self, weight: Placed, g: jax.Array) -> jax.Array:
        # Scattered at use it is summed over data already, where it was made.
        if self.scatters_at_use and weight.zero_dim is not None:
            shard = g
        elif weight.zero_dim is not None:
            shard = scatter(weight, g.astype(self.reduce))
        else:
            shard = lax.psum(g.astype(self.reduce), DATA)
        return (
            lax.psum(shard.astype(jnp.float32), weight.replicated) if weight.replicated else shard.astype(jnp.float32)
        )

    def accumulated(self, weight: Placed, total: jax.Array, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """float32 `total` of a weight's gradient with what `add` puts into a whole gradient: straight into it, or summed and scattered."""
        if not (self.scatters_at_use and weight.zero_dim is not None):
            return add(total)
        shape = [n // ways for n, ways in zip(weight.whole, weight.ways, strict=True)]
        g = add(vary(jnp.zeros(shape, jnp.float32), AXES))
        return total + self._scatter(weight, g)

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
        return scatter(weight, g.astype(self.reduce)).astype(g.dtype)


def gather(weight: Placed, shard: jax.Array) -> jax.Array:
    """All-gather over data along the weight's ZeRO dimension, padding off. Takes stacked leaves and single layers of them."""
    if weight.zero_dim is None:
        return shard
    dim = _dimension(weight, shard)
    whole = lax.all_gather(shard, DATA, axis=dim, tiled=True)
    return (
        lax.slice_in_dim(whole, 0, weight.whole[weight.zero_dim], axis=dim) if weight.padded != weight.whole else whole
    )


def scatter(weight: Placed, g: jax.Array) -> jax.Array:
    """The transpose of `gather`: padding on, summed over data, each rank keeping its part."""
    if weight.zero_dim is None:
        return g
    dim = _dimension(weight, g)
    if weight.padded != weight.whole:
        more = weight.padded[weight.zero_dim] - weight.whole[weight.zero_dim]
        g = jnp.pad(g, [(0, more if d == dim else 0) for d in range(g.ndim)])
    return lax.psum_scatter(g, DATA, scatter_dimension=dim, tiled=True)


def _dimension(weight: Placed, x: jax.Array) -> int:
    """The ZeRO dimension in `x`: a single layer lacks the first axis."""
    assert weight.zero_dim is not None
    return weight.zero_dim - (len(weight.axes) - x.ndim)
