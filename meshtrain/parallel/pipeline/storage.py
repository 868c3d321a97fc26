"""Ring buffers inside the compiled step: trees of arrays whose first axis counts slots."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import PIPELINE

Tree = Any


def ring(depth: int, like: Tree) -> Tree:
    """`depth` slots of zeros for values shaped `like`, which may differ between stages."""

    def zeros(a: jax.Array) -> jax.Array:
        return vary(jnp.zeros((depth, *a.shape), a.dtype), (*varying(a), PIPELINE))

    return jax.tree.map(zeros, like)


def read(rings: Tree, slot: jax.Array) -> Tree:
    return jax.tree.map(lambda ring: lax.dynamic_index_in_dim(ring, slot, 0, keepdims=False), rings)


def write(rings: Tree, slot: jax.Array, values: Tree, active: jax.Array | None = None) -> Tree:
    """`values` into `slot` of the rings, where `active` (None: always)."""

    def one(ring: jax.Array, value: jax.Array) -> jax.Array:
        if active is not None:
            value = jnp.where(active, value, lax.dynamic_index_in_dim(ring, slot, 0, keepdims=False))
        return lax.dynamic_update_index_in_dim(ring, value, slot, 0)

    return jax.tree.map(one, rings, values)
