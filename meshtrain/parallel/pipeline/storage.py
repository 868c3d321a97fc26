"""Buffers inside the compiled step: trees of arrays whose first axes count places, and of the stash layers too.

    stash        [places, layers, ...]    a place is what F leaves of one microbatch and chunk for B
    inboxes      [places, ...]

The layers' loop writes and reads place and layer where they lie: a whole place is never in a second piece of memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import PIPELINE

Tree = Any


def empty(shape: tuple[int, ...], like: Tree) -> Tree:
    """Zeros: `shape` places for values like `like`, which may differ between stages."""

    def zeros(a: jax.Array) -> jax.Array:
        return vary(jnp.zeros((*shape, *a.shape), a.dtype), (*varying(a), PIPELINE))

    return jax.tree.map(zeros, like)


def read(buffers: Tree, *at: jax.Array) -> Tree:
    """The values at the place whose first indices are `at`."""

    def one(buffer: jax.Array) -> jax.Array:
        rest = buffer.shape[len(at) :]
        start = (*at, *(jnp.zeros((), jnp.int32) for _ in rest))
        return lax.dynamic_slice(buffer, start, (*(1 for _ in at), *rest)).reshape(rest)

    return jax.tree.map(one, buffers)


def write(buffers: Tree, values: Tree, *at: jax.Array, active: jax.Array | None = None) -> Tree:
    """`values` at the place whose first indices are `at`, where `active` (None: always)."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        if active is not None:
            value = jnp.where(active, value, read(buffer, *at))
        start = (*at, *(jnp.zeros((), jnp.int32) for _ in value.shape))
        return lax.dynamic_update_slice(buffer, value.reshape((*(1 for _ in at), *value.shape)), start)

    return jax.tree.map(one, buffers, values)
