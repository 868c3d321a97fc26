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

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary
from meshtrain.mesh import AXES, DATA
from meshtrain.parallel.layout import Layout, Leaf

Tree = Any


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a step differentiates (whole weights, or shards) and what it only reads (stage 2: the gathered weights)."""

    differentiated: Tree
    constant: Tree | None


class Zero:
    """The ZeRO stage of a layout, in `compute` dtype, with gradients summed over data in `reduce` dtype."""

    def __init__(self, layout: Layout) -> None:
        config = layout.config
        self.layout = layout
        self.compute = jnp.dtype(config.precision.compute)
        self.reduce = jnp.dtype(config.precision.reduce)
        stage, hold = config.parallel.zero_stage, config.parallel.zero_hold
        if hold is None:  # stage 3 was asked for to save memory; stage 2 would pay with traffic for every microbatch
            hold = stage < 3 and (config.parallel.microbatches > 1 or config.mesh.pipeline > 1)
        sharded = config.mesh.data > 1
        self.gathers_at_use = sharded and stage == 3 and not hold
        self.scatters_at_use = sharded and stage >= 2 and not hold

    def open(self, masters: Tree) -> Weights:
        """Inside shard_map: this device's masters (float32 shards) to what the step computes with."""
        shards = vary(jax.tree.map(lambda x: x.astype(self.compute), masters), AXES)
        if self.gathers_at_use:
            return Weights(shards, None)
        whole = self.layout.map(gather, shards)
        return Weights(shards, whole) if self.scatters_at_use else Weights(whole, None)

    def use(self, leaves: Tree, differentiated: Tree, constant: Tree | None) -> Tree:
        """Whole weights for the model from a part of `Weights` (a layer's leaves, unstacked, or the head's).

        Their gradient flows to `differentiated`: as it is, or summed and scattered over data.
        """
        if not self.scatters_at_use:
            return differentiated
        is_leaf = lambda x: isinstance(x, Leaf)  # noqa: E731
        if constant is None:
            return jax.tree.map(self._gather_at_use, leaves, differentiated, is_leaf=is_leaf)
        return jax.tree.map(self._scatter_at_use, leaves, differentiated, constant, is_leaf=is_leaf)

    def checkpointed(self, layer: Callable, policy: Callable | None, remat: bool) -> Callable:
        """`layer` under the remat policy; weights gathered at use are never among what is kept for the backward."""
        if remat:
            return jax.checkpoint(layer, policy=policy)
        return jax.checkpoint(layer, policy=_all_but_gathered) if self.gathers_at_use else layer

    def close(self, gradients: Tree) -> Tree:
        """Inside shard_map: accumulated partial gradients to float32 shards, summed over every axis that the weight lacks."""
        return self.layout.map(self._close_leaf, gradients)

    def _close_leaf(self, leaf: Leaf, g: jax.Array) -> jax.Array:
        if self.scatters_at_use and leaf.zero_dim is not None:
            shard = g  # summed over data where it was made
        elif leaf.zero_dim is not None:
            shard = scatter(leaf, g.astype(self.reduce))
        else:
            shard = lax.psum(g.astype(self.reduce), DATA)
        return lax.psum(shard.astype(jnp.float32), leaf.replicated) if leaf.replicated else shard.astype(jnp.float32)

    def _gather_at_use(self, leaf: Leaf, shard: jax.Array) -> jax.Array:
        if leaf.zero_dim is None:
            return shard

        @jax.custom_vjp
        def use(shard: jax.Array) -> jax.Array:
            return gather(leaf, shard)

        use.defvjp(lambda shard: (gather(leaf, shard), None), lambda _, g: (self._scatter(leaf, g),))
        return use(shard)

    def _scatter_at_use(self, leaf: Leaf, shard: jax.Array, whole: jax.Array) -> jax.Array:
        if leaf.zero_dim is None:
            return shard

        @jax.custom_vjp
        def use(shard: jax.Array, whole: jax.Array) -> jax.Array:
            return whole

        use.defvjp(lambda shard, whole: (whole, None), lambda _, g: (self._scatter(leaf, g), jnp.zeros_like(g)))
        return use(shard, whole)

    def _scatter(self, leaf: Leaf, g: jax.Array) -> jax.Array:
        return scatter(leaf, g.astype(self.reduce)).astype(g.dtype)


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A remat policy: keep everything, but gather weights again. Nor keep a slice, such as takes the padding off: it is a copy."""
    over_data = primitive.name == "all_gather" and DATA in parameters["axis_name"]
    return not over_data and primitive.name != "slice"


def gather(leaf: Leaf, shard: jax.Array) -> jax.Array:
    """All-gather over data along the leaf's ZeRO dimension, padding off. Takes stacked leaves and single layers of them."""
    if leaf.zero_dim is None:
        return shard
    dim = _dimension(leaf, shard)
    whole = lax.all_gather(shard, DATA, axis=dim, tiled=True)
    return lax.slice_in_dim(whole, 0, leaf.whole[leaf.zero_dim], axis=dim) if leaf.padded != leaf.whole else whole


def scatter(leaf: Leaf, g: jax.Array) -> jax.Array:
    """The transpose of `gather`: padding on, summed over data, each rank keeping its part."""
    if leaf.zero_dim is None:
        return g
    dim = _dimension(leaf, g)
    if leaf.padded != leaf.whole:
        more = leaf.padded[leaf.zero_dim] - leaf.whole[leaf.zero_dim]
        g = jnp.pad(g, [(0, more if d == dim else 0) for d in range(g.ndim)])
    return lax.psum_scatter(g, DATA, scatter_dimension=dim, tiled=True)


def _dimension(leaf: Leaf, x: jax.Array) -> int:
    assert leaf.zero_dim is not None
    return leaf.zero_dim - (len(leaf.axes) - x.ndim)  # a single layer lacks the first axis
