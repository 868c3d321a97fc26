"""Buffers inside the compiled step: trees of arrays whose first axis counts places."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import PIPELINE

Tree = Any


def empty(depth: int, like: Tree) -> Tree:
    """`depth` places of zeros for values shaped `like`, which may differ between stages."""

    def zeros(a: jax.Array) -> jax.Array:
        return vary(jnp.zeros((depth, *a.shape), a.dtype), (*varying(a), PIPELINE))

    return jax.tree.map(zeros, like)


def read(buffers: Tree, place: jax.Array) -> Tree:
    return jax.tree.map(lambda buffer: lax.dynamic_index_in_dim(buffer, place, 0, keepdims=False), buffers)


def write(buffers: Tree, place: jax.Array, values: Tree, active: jax.Array | None = None) -> Tree:
    """`values` at `place` of the buffers, where `active` (None: always)."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        if active is not None:
            value = jnp.where(active, value, lax.dynamic_index_in_dim(buffer, place, 0, keepdims=False))
        return lax.dynamic_update_index_in_dim(buffer, value, place, 0)

    return jax.tree.map(one, buffers, values)
