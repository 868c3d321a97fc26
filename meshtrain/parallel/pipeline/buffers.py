"""Buffers of a stage: places that are read and written by index, and the order of what travels.

    places      0     1     2
    buffer    [ x ] [ x ] [ . ]

The table says which place a microbatch has in a clock. Buffers are arrays [places, ...] that a loop carries.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import PIPELINE

Tree = Any


class BufferSlot(NamedTuple):
    """One place of a buffer, which is a tree of arrays [places, layers, ...] for each segment."""

    buffers: Sequence[Tree]
    # A turn -> its place and its layer there
    at: Callable[[Array], tuple[Array, Array]]


def put(parts: list[Tree], n: int, part: Tree) -> list[Tree]:
    """Returns the list with another part at n."""
    return [*parts[:n], part, *parts[n + 1 :]]


def empty(shape: tuple[int, ...], like: Tree, zero: Array | float = 0) -> Tree:
    """Returns `shape` places for values like `like`, which may differ between stages; all are filled with `zero`.

    An array as `zero` has the buffers made only when it is there.
    """

    def zeros(a: Array) -> Array:
        filled = jnp.full((*shape, *a.shape), zero, a.dtype)
        return vary(filled, (*varying(a), PIPELINE))

    return jax.tree.map(zeros, like)


def read(buffers: Tree, *at: Array) -> Tree:
    """Returns the values at the place whose first indices are `at`."""

    def read_place(buffer: Array) -> Array:
        shape = buffer.shape[len(at) :]
        return _slice(buffer, at).reshape(shape)

    return jax.tree.map(read_place, buffers)


def write(buffers: Tree, values: Tree, *at: Array, active: Array | None = None) -> Tree:
    """Returns the buffers with `values` at the place whose first indices are `at`, if `active` (None: always)."""

    def replace(old: Array, value: Array) -> Array:
        if active is None:
            return value
        return jnp.where(active, value, old)

    return _update(buffers, values, at, replace)


def add(buffers: Tree, values: Tree, *at: Array, active: Array) -> Tree:
    """Adds `values`, if `active`, at the place whose first indices are `at`, in the buffers' dtype."""

    def sum_up(old: Array, value: Array) -> Array:
        return old + jnp.where(active, value, 0).astype(old.dtype)

    return _update(buffers, values, at, sum_up)


def _update(
    buffers: Tree,
    values: Tree,
    at: tuple[Array, ...],
    combine: Callable[[Array, Array], Array],
) -> Tree:
    """Returns the buffers with `combine(old, value)` at a place.

    Old and value keep the axes of `at`, of size 1. With a reshape between them XLA's GPU compiler no longer sees that
    it reads where it writes, and copies the place first.
    """

    def update(buffer: Array, value: Array) -> Array:
        ones = [1] * len(at)
        value = value.reshape((*ones, *value.shape))
        combined = combine(_slice(buffer, at), value)
        return lax.dynamic_update_slice(buffer, combined, _start(buffer, at))

    return jax.tree.map(update, buffers, values)


def _slice(buffer: Array, at: tuple[Array, ...]) -> Array:
    ones = [1] * len(at)
    sizes = (*ones, *buffer.shape[len(at) :])
    return lax.dynamic_slice(buffer, _start(buffer, at), sizes)


def _start(buffer: Array, at: tuple[Array, ...]) -> tuple[Array, ...]:
    zeros = [jnp.zeros((), jnp.int32)] * (buffer.ndim - len(at))
    return (*at, *zeros)


# --- collectives that travel while the device computes


def after(values: Tree, *others: Tree) -> Tree:
    """Returns `values`, which are now there no sooner than the others.

        values ──► start ─────────── done ──► arrived              on the links
        carry  ─────────►   work   ──────────► its result          on the device

    XLA's scheduler lets a collective travel under all that stands between its start and its done, even a whole loop
    with collectives of its own. On GPUs `mesh.compiler_options` limits how many travel at a time.

    Left alone, XLA starts a collective as soon as it can and waits for it at once. Two calls prevent that:

        sent = send(after(values, carry))      it starts no sooner than the work begins
        next = after(next, sent)               what is sent next starts no sooner than it has arrived

    XLA schedules from the program's end. Between a loop and a done it takes the loop first, unless something behind
    the loop needs its result.

    The values come to vary over all mesh axes of the others, as operands of one barrier do.
    """
    return lax.optimization_barrier((values, others))[0]


def zeros_like(like: Tree) -> Tree:
    """Returns zeros of a result that is not computed."""

    def zeros(a: Array) -> Array:
        return vary(jnp.zeros(a.shape, a.dtype), varying(a))

    return jax.tree.map(zeros, like)
