"""Buffers inside the compiled step: trees of arrays whose first axes count places, and of the stash layers too.

    stash        [places, layers, ...]    a place is what F leaves of one microbatch and chunk for B
    inboxes      [places, ...]

The layers' loop writes and reads place and layer where they lie: a whole place is never in a second piece of memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import PIPELINE

Tree = Any


def empty(shape: tuple[int, ...], like: Tree, zero: jax.Array | float = 0) -> Tree:
    """Zeros: `shape` places for values like `like`, which may differ between stages; made of `zero`, so not before it is there."""

    def zeros(a: jax.Array) -> jax.Array:
        return vary(jnp.full((*shape, *a.shape), zero, a.dtype), (*varying(a), PIPELINE))

    return jax.tree.map(zeros, like)


def read(buffers: Tree, *at: jax.Array) -> Tree:
    """The values at the place whose first indices are `at`."""
    return jax.tree.map(lambda buffer: _slice(buffer, at).reshape(buffer.shape[len(at) :]), buffers)


def write(buffers: Tree, values: Tree, *at: jax.Array, active: jax.Array | None = None) -> Tree:
    """`values` at the place whose first indices are `at`, where `active` (None: always)."""

    def one(buffer: jax.Array, old: jax.Array, value: jax.Array) -> jax.Array:
        return value if active is None else jnp.where(active, value, old)

    return _updated(buffers, values, at, one)


def add(buffers: Tree, values: Tree, *at: jax.Array, active: jax.Array) -> Tree:
    """`values` added, where `active`, to those at the place whose first indices are `at`, in the buffers' dtype."""

    def one(buffer: jax.Array, old: jax.Array, value: jax.Array) -> jax.Array:
        return old + jnp.where(active, value, 0).astype(buffer.dtype)

    return _updated(buffers, values, at, one)


def _updated(buffers: Tree, values: Tree, at: tuple[jax.Array, ...], one: Callable[..., jax.Array]) -> Tree:
    """`one(buffer, what is at the place, value)` at the place. Both keep the axes of `at`: with a reshape between, XLA's GPU
    compiler no longer sees that it reads where it writes, and copies the place first."""

    def updated(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = value.reshape((*(1 for _ in at), *value.shape))
        return lax.dynamic_update_slice(buffer, one(buffer, _slice(buffer, at), value), _start(buffer, at))

    return jax.tree.map(updated, buffers, values)


def _slice(buffer: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_slice(buffer, _start(buffer, at), (*(1 for _ in at), *buffer.shape[len(at) :]))


def _start(buffer: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return (*at, *(jnp.zeros((), jnp.int32) for _ in buffer.shape[len(at) :]))
