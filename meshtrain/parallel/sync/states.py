"""The state that islands keep of their own between steps, and its layout: an axis of islands in front of everything.

Without `parallel.sync` a state has none of it.

    leaf                          whole shape            on a device                   memory
    params (the shared model)     [...]                  its shard, on every island    1 x float32
    islands.params                [islands, ...]         its island's shard            1 x
    islands.momentum              [...]                  as params                     1 x, none at outer_momentum 0
    islands.under_way             [...]                  as params                     1 x, none at delay 0
    islands.counted               [islands, fragments]   its island's row              a number a fragment
    optimizer, scale              [islands, ...]         its island's shard            as without islands of their own
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.mesh import ISLAND

Tree = Any
# Of a step's metrics: what each island learned from.
COUNTED = "counted"


class Islands(NamedTuple):
    """The field `islands` of a `State`; trees of float32 as that of the weights, None where one is frozen."""

    params: Tree  # each island's own weights
    momentum: Tree  # of the outer step
    under_way: Tree  # mean pseudo-gradients that are sent and not yet followed
    # float32: tokens (pairs, images) that an island has learned from since it last sent a fragment
    counted: Any


def stacked(tree: Tree, islands: int) -> Tree:
    """Returns the given structs with a leading island axis."""

    def stack(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(x.sharding, NamedSharding)
        sharding = x.sharding.update(spec=PartitionSpec(ISLAND, *x.sharding.spec))
        return jax.ShapeDtypeStruct((islands, *x.shape), x.dtype, sharding=sharding)

    return jax.tree.map(stack, tree)


def every_island(tree: Tree, islands: int) -> Tree:
    """Returns the same for each island, inside jit."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (islands, *x.shape)), tree)


def finite(x: jax.Array) -> jax.Array:
    """Returns whether all that an island has of an array [islands, ...] is finite."""
    return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))


def mean_of(is_finite: jax.Array, x: jax.Array) -> jax.Array:
    """The mean of [islands, ...] over the finite islands; of counts the largest."""
    theirs = where_island(is_finite, x, jnp.zeros_like(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.max(theirs, 0)
    return (jnp.sum(theirs, 0) / jnp.maximum(jnp.sum(is_finite), 1)).astype(x.dtype)


def where_island(is_finite: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    """[islands, ...] of the finite islands, and `other` of the rest."""
    return jnp.where(is_finite.reshape(-1, *[1] * (x.ndim - 1)), x, other)


def visible(metrics: Mapping[str, jax.Array | float]) -> dict[str, float]:
    """Metrics as this process sees them, without COUNTED: of what each island has, the mean over the islands on its
    devices where it is finite, by how much they learned from; of counts the largest.
    """
    own = {
        name: _island_numbers(x)
        for name, x in metrics.items()
        if isinstance(x, jax.Array) and x.ndim
    }
    alike = jax.device_get({name: x for name, x in metrics.items() if name not in own})
    weights = own.get(COUNTED)
    wanted = [name for name in metrics if name != COUNTED]
    return {
        name: _combine_islands(own[name], weights)
        if name in own
        else float(alike[name])
        for name in wanted
    }


def _island_numbers(metric: jax.Array) -> dict[int, Any]:
    """The numbers on this process's devices: of its own islands, or of all where XLA knows them everywhere, as of a
    constant.
    """
    return {
        (shard.index[0].start or 0) + i: number
        for shard in metric.addressable_shards
        for i, number in enumerate(np.asarray(shard.data))
    }


def _combine_islands(
    by_island: Mapping[int, Any], learned: Mapping[int, Any] | None
) -> float:
    numbers = np.array([by_island[island] for island in learned or by_island])
    if np.issubdtype(numbers.dtype, np.integer):
        return float(numbers.max())
    weights = np.array(list((learned or {}).values()), float)
    # Where no island learned from anything, each has the same voice.
    weights = weights if weights.any() else np.ones(len(numbers))
    heard = np.isfinite(numbers) & (weights > 0)
    if heard.any():
        return float(np.average(numbers[heard], weights=weights[heard]))
    return math.nan
