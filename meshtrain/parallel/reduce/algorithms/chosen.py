"""The program that `parallel.reduce.algorithm` names, in the place of `psum` and `psum_scatter`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import unchecked, vary, varying
from meshtrain.parallel.reduce.algorithms import double_tree, halving_doubling, hierarchical, ring, two_way_ring
from meshtrain.parallel.reduce.algorithms.chunks import Axes


class Program(NamedTuple):
    """Of messages. The halves work on chunks [n, k], of which each device has one, [k]; some programs have none."""

    all_reduce: Callable[[jax.Array, Axes], jax.Array]
    reduce_scatter: Callable[[jax.Array, Axes], jax.Array] | None = None
    all_gather: Callable[[jax.Array, Axes], jax.Array] | None = None


def _hierarchical(x: jax.Array, axes: Axes) -> jax.Array:
    """Over islands and within them; over one of the two it is a ring."""
    if isinstance(axes, str):
        return ring.all_reduce(x, axes)
    across, inside = axes
    return hierarchical.all_reduce(x, across, inside)


PROGRAMS = {
    "ring": Program(ring.all_reduce, ring.reduce_scatter, ring.all_gather),
    "two_way_ring": Program(two_way_ring.all_reduce, two_way_ring.reduce_scatter, two_way_ring.all_gather),
    "halving_doubling": Program(halving_doubling.all_reduce, halving_doubling.reduce_scatter, halving_doubling.all_gather),
    "double_tree": Program(double_tree.all_reduce),
    "hierarchical": Program(_hierarchical, ring.reduce_scatter, ring.all_gather),
}  # fmt: skip


def all_reduce(algorithm: str, x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """The sum over the devices of the axes, which is the same on all of them and typed so, as that of `psum` is."""
    axes = axes[0] if len(axes) == 1 else axes
    if algorithm == "psum":
        return lax.psum(x, axes)
    # A message's type says that it differs from device to device, and no cast takes that back: the program is traced without such
    # types, and the axes that were not summed over are put back.
    with unchecked():
        total = PROGRAMS[algorithm].all_reduce(x, axes)
    summed = {axes} if isinstance(axes, str) else set(axes)
    return vary(total, sorted(varying(x) - summed))


def reduce_scatter(algorithm: str, x: jax.Array, axis: str, dim: int) -> jax.Array:
    """A device's part, along the dimension `dim`, which the axis must divide, of the sum over the devices of the axis."""
    if algorithm == "psum":
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    half, n = PROGRAMS[algorithm].reduce_scatter, lax.axis_size(axis)
    assert half is not None, f"{algorithm} has no reduce-scatter"
    shape = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], n, *shape[dim:]), dim, 0)
    return half(parts.reshape(n, -1), axis).reshape(shape)


def all_gather(algorithm: str, x: jax.Array, axis: str) -> jax.Array:
    """[m, ...] of every device to [n m, ...]."""
    if algorithm == "psum":
        return lax.all_gather(x, axis, tiled=True)
    half = PROGRAMS[algorithm].all_gather
    assert half is not None, f"{algorithm} has no all-gather"
    return half(x.reshape(-1), axis).reshape(-1, *x.shape[1:])
