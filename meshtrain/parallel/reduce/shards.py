"""A gradient and the shards it is cut into along its ZeRO dimension, inside shard_map."""

import jax
import jax.numpy as jnp

from meshtrain.parallel.placement import Placed


def zero_dimension(weight: Placed, x: jax.Array) -> int:
    """The ZeRO dimension in `x`: a single layer lacks the first axis."""
    assert weight.zero_dim is not None
    return weight.zero_dim - (len(weight.axes) - x.ndim)


def padded(weight: Placed, g: jax.Array) -> jax.Array:
    """A gradient with zeros where the weight is padded so that data divides it. Takes stacked leaves and single layers of them."""
    if weight.padded == weight.whole:
        return g
    dim = zero_dimension(weight, g)
    more = weight.padded[dim - g.ndim] - weight.whole[dim - g.ndim]
    return jnp.pad(g, [(0, more if d == dim else 0) for d in range(g.ndim)])


def unpadded(weight: Placed, g: jax.Array) -> jax.Array:
    """The way back."""
    if weight.padded == weight.whole:
        return g
    dim = zero_dimension(weight, g)
    return jax.lax.slice_in_dim(g, 0, weight.whole[dim - g.ndim], axis=dim)


def to_rows(x: jax.Array, dim: int, shards: int) -> jax.Array:
    """A padded gradient [..., shards * s, ...] as [shards, numbers of a shard]."""
    cut = x.reshape(*x.shape[:dim], shards, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0).reshape(shards, -1)


def from_rows(rows: jax.Array, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """The way back, to a padded gradient of `shape`."""
    shards = len(rows)
    cut = rows.reshape(shards, *shape[:dim], shape[dim] // shards, *shape[dim + 1 :])
    return jnp.moveaxis(cut, 0, dim).reshape(shape)
