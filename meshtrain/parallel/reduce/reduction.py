"""The sums of gradients over data: scattered within an island, then all-reduced across islands (HSDP, Zhao et al. 2023,
section 3.2.2).

    island 0            island 1                    sent by a device, of S bytes, on N data ranks in R islands
    data 0   data 1     data 0   data 1
    ├─scatter─┤         ├─scatter─┤                 S (N/R - 1) / (N/R)
    │         └─────────┼─all-reduce┘               2 (R - 1) / R of a shard, S / (N/R)
    └────all-reduce─────┘

`parallel.reduce.compression` has matrices sent as what a codec makes of them; norms and biases are sent as they are.
`parallel.reduce.algorithm` has the sums made by a program of messages in the place of psum and psum_scatter.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.mesh import ISLAND
from meshtrain.parallel.placement import Placed

# Numbers for the row of metrics.
Statistics = dict[str, jax.Array]


class Reduced(NamedTuple):
    """A sum: this rank's part of it, and what of this rank's own gradient came through.

    Over all ranks `arrived` adds up to the sum, so that what is given less what arrived is what was left out, nothing
    twice.
    """

    shard: jax.Array
    arrived: jax.Array  # in the shape of what was given


class ReducedGradient(NamedTuple):
    """A gradient summed over data and over every axis that the weight lacks."""

    shard: jax.Array  # float32
    squares: list[jax.Array]  # see `left_out`
    # what of this rank's gradient and residual did not come through
    left_out: jax.Array | None = None
    q: jax.Array | None = None  # PowerSGD's


class Uncompressed:
    """The sums that are compressed: none. `exchange.Exchange` has those of a codec."""

    def crosses(self, weight: Placed) -> bool:
        """Returns whether a weight's gradient is compressed on its way across islands."""
        return False

    def reduce_scatter(self, weight: Placed, g: jax.Array) -> Reduced | None:
        """Returns a gradient's shard, summed over the data ranks of an island; None where it is not compressed."""
        return None

    def all_reduce_islands(self, weight: Placed, shard: jax.Array) -> Reduced | None:
        """Returns an island's shard, summed over all islands; None where it is not compressed."""
        return None


class Reduction:
    """The sums of one config; every method is called inside shard_map, and sums in the dtype of `precision.reduce`, in
    float32 what is compressed.
    """

    def __init__(
        self, config: Config, across: bool = True, exchange: Uncompressed | None = None
    ) -> None:
        """`across`: over all islands, else over the data ranks of each; `exchange` makes the sums that are
        compressed.
        """
        self.dtype = jnp.dtype(config.precision.reduce)
        self.algorithm = config.parallel.reduce.algorithm
        self.islands = across and config.mesh.islands > 1
        self.exchange = exchange or Uncompressed()
        self.programs: Any = None  # XLA's own
        if self.algorithm != "psum":
            from meshtrain.parallel.reduce import algorithms

            self.programs = algorithms

    def reduce_scatter(self, weight: Placed, g: jax.Array) -> Reduced:
        """A gradient's shard, summed over the data ranks of an island. Takes stacked leaves and single layers of them.

        A gradient that ZeRO does not shard is whole, and summed over all islands at once where compression need not
        come between.
        """
        if weight.zero_dim is None:
            between = self.islands and self.exchange.crosses(weight)
            if self.islands and not between:
                axes = (ISLAND, *weight.zero_axes)
            else:
                axes = weight.zero_axes
            return Reduced(
                self._all_reduce(g if weight.float32 else g.astype(self.dtype), axes), g
            )
        if (reduced := self.exchange.reduce_scatter(weight, g)) is not None:
            return reduced
        dim = zero_dimension(weight, g)
        full = padded(weight, g).astype(self.dtype)
        if self.programs is None:
            shard = lax.psum_scatter(
                full, weight.zero_axes, scatter_dimension=dim, tiled=True
            )
        else:
            shard = self.programs.reduce_scatter(
                self.algorithm, full, weight.zero_axes, dim
            )
        return Reduced(shard, g)

    def all_reduce_islands(self, weight: Placed, shard: jax.Array) -> Reduced:
        """A shard that is summed in its island, summed over all islands."""
        if not self.islands:
            return Reduced(shard, shard)
        if (reduced := self.exchange.all_reduce_islands(weight, shard)) is not None:
            return reduced
        if weight.zero_dim is None:
            return Reduced(shard, shard)
        return Reduced(self._all_reduce(shard.astype(self.dtype), (ISLAND,)), shard)

    def _all_reduce(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if self.programs is None:
            return lax.psum(x, axes)
        return self.programs.all_reduce(self.algorithm, x, axes)


# --- a gradient and its shard along the ZeRO dimension


def zero_dimension(weight: Placed, x: jax.Array) -> int:
    """The ZeRO dimension in `x`: a single layer lacks the first axis."""
    assert weight.zero_dim is not None
    return weight.zero_dim - (len(weight.axes) - x.ndim)


def padded(weight: Placed, g: jax.Array) -> jax.Array:
    """A gradient with zeros where the weight is padded so that data divides it.

    Takes stacked leaves and single layers of them.
    """
    if weight.padded == weight.whole:
        return g
    dim = zero_dimension(weight, g)
    more = weight.padded[dim - g.ndim] - weight.whole[dim - g.ndim]
    behind = [more if d == dim else 0 for d in range(g.ndim)]
    return jnp.pad(g, [(0, padding) for padding in behind])


def unpadded(weight: Placed, g: jax.Array) -> jax.Array:
    """A gradient without the zeros of `padded`."""
    if weight.padded == weight.whole:
        return g
    dim = zero_dimension(weight, g)
    return jax.lax.slice_in_dim(g, 0, weight.whole[dim - g.ndim], axis=dim)


def gather(weight: Placed, shard: jax.Array) -> jax.Array:
    """Gathers a weight over `zero_axes` along its ZeRO dimension, padding off.

    Takes stacked leaves and single layers of them.
    """
    if weight.zero_dim is None:
        return shard
    dim = zero_dimension(weight, shard)
    return unpadded(
        weight, lax.all_gather(shard, weight.zero_axes, axis=dim, tiled=True)
    )


# --- what compression leaves out, as numbers


def left_out(gradient: jax.Array, reduced: Reduced) -> list[jax.Array]:
    """The squares of what was left out; nothing of what was sent as it is."""
    if reduced.arrived is gradient:
        return []
    return [squares(gradient, gradient - reduced.arrived)]


def squares(gradient: jax.Array, lost: jax.Array) -> jax.Array:
    """This rank's sums of squares, float32 [2]: of what was left out, and of what was given."""
    squares = (jnp.square(x.astype(jnp.float32)) for x in (lost, gradient))
    return jnp.stack([jnp.sum(x) for x in squares])


def statistics(
    squares: Sequence[jax.Array],
    axes: tuple[str, ...],
    scale: jax.Array,
    fed_back: bool,
) -> Statistics:
    """`reduce_error`, the norm of all that was left out over that of all that was given, on the devices of `axes`; by
    one sum.

    With feedback also `residual_norm`, that of all residuals, which are what was left out, without the loss `scale`.
    Nothing where nothing was compressed, or only where its gradient was made, inside the backward pass.
    """
    if not squares:
        return {}
    # What several devices have alike counts once.
    once = [
        x / math.prod(lax.axis_size(axis) for axis in axes if axis not in varying(x))
        for x in squares
    ]
    lost, total = lax.psum(sum(vary(once, axes)), axes)
    error = {"reduce_error": jnp.sqrt(lost / jnp.where(total == 0.0, 1.0, total))}
    return error | ({"residual_norm": jnp.sqrt(lost) / scale} if fed_back else {})
