"""An array cut into equal parts, and messages that all devices of an axis send at once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# One mesh axis, or several taken for one, the major first.
Axes = str | tuple[str, ...]


def cut(x: jax.Array, parts: int) -> jax.Array:
    """Any shape to [parts, k], filled up with zeros where the size does not divide."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % parts)).reshape(parts, -1)


def joined(chunks: jax.Array, like: jax.Array) -> jax.Array:
    """What `cut` made of an array like this one, put together again."""
    return chunks.reshape(-1)[: like.size].reshape(like.shape)


def at(chunks: jax.Array, number: jax.Array) -> jax.Array:
    """The chunk of that number, counted around: -1 is the last."""
    return lax.dynamic_index_in_dim(chunks, number % len(chunks), keepdims=False)


def shifted(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """Every device sends `x` to the one `by` places on, around the ring; returns what came."""
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + by) % n) for i in range(n)])


def exchanged(x: jax.Array, axes: Axes, distance: int, members: int) -> jax.Array:
    """The first `members` devices change `x` with the one whose number differs in the bit `distance`; the others get zeros."""
    return sent(x, axes, [(i, i ^ distance) for i in range(members)])


def sent(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` from the first to the second of each pair; zeros where nothing came."""
    return lax.ppermute(x, axes, pairs) if pairs else jnp.zeros_like(x)
