"""Sums of what codecs make of gradients: each number is encoded once on its way to where it is summed, and summed in float32.

    scatter, over data                            all_reduce, across islands
    rank 0   [to 0][to 1]  ─┐ all-to-all          2 islands: the other's shard, whole, beside the own one; summed by both
    rank 1   [to 0][to 1]  ─┘ of u8               more: each sums one chunk of it, and sends the sum on, encoded once more
             decode, sum

A ring would encode partial sums in each of its steps. With 2 islands the gather sends as much as the exchange and the gather of more do.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.mesh import DATA, ISLAND
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.blocks import Codec
from meshtrain.parallel.reduce.shards import from_rows, padded, to_rows, unpadded, zero_dimension
from meshtrain.parallel.reduce.sizes import chunk


class Sent(NamedTuple):
    """A sum, float32: this rank's part of it, and what of this rank's own gradient came through.

    Over all ranks `arrived` adds up to the sum, so that what is given less what arrived is what was left out, nothing twice.
    """

    shard: jax.Array
    arrived: jax.Array  # in the shape of what was given


def scatter(weight: Placed, g: jax.Array, codec: Codec) -> Sent:
    """A gradient's shard, summed over the data ranks of an island, by one all-to-all. Takes stacked leaves and single layers of them."""
    ranks, dim, whole = lax.axis_size(DATA), zero_dimension(weight, g), padded(weight, g.astype(jnp.float32))
    rows = to_rows(whole, dim, ranks)
    k = rows.shape[1]
    sent = _encoded(codec, rows)
    came = lax.all_to_all(sent, DATA, split_axis=0, concat_axis=0, tiled=True)
    shape = tuple(n // ranks if d == dim else n for d, n in enumerate(whole.shape))
    shard = jnp.sum(codec.decode(came, k), axis=0).reshape(shape)
    return Sent(shard, unpadded(weight, from_rows(codec.decode(sent, k), dim, whole.shape)))


def all_reduce(shard: jax.Array, codec: Codec) -> Sent:
    """An array summed over all islands, the same bits in each."""
    flat, islands = shard.astype(jnp.float32).reshape(-1), lax.axis_size(ISLAND)
    total, arrived = (_swapped if islands == 2 else _in_chunks)(flat, codec, islands)
    return Sent(total.reshape(shard.shape), arrived.reshape(shard.shape))


def _swapped(flat: jax.Array, codec: Codec, islands: int) -> tuple[jax.Array, jax.Array]:
    """By one gather."""
    sent = _encoded(codec, flat[None])
    total = jnp.sum(codec.decode(_gathered(sent), len(flat)), axis=0)
    return total, codec.decode(sent, len(flat))[0]


def _in_chunks(flat: jax.Array, codec: Codec, islands: int) -> tuple[jax.Array, jax.Array]:
    """By an exchange and a gather of the sums. What the second encoding leaves out counts as left out by who made the sum."""
    k = chunk(len(flat), islands)
    rows = jnp.pad(flat, (0, islands * k - len(flat))).reshape(islands, k)
    sent = _encoded(codec, rows)
    came = lax.all_to_all(sent, ISLAND, split_axis=0, concat_axis=0, tiled=True)
    own = jnp.sum(codec.decode(came, k), axis=0)
    again = _encoded(codec, own[None])
    total = codec.decode(_gathered(again), k)
    arrived = codec.decode(sent, k).at[lax.axis_index(ISLAND)].add(codec.decode(again, k)[0] - own)
    return total.reshape(-1)[: len(flat)], arrived.reshape(-1)[: len(flat)]


def _encoded(codec: Codec, rows: jax.Array) -> jax.Array:
    # XLA's GPU compiler takes a number that is narrowed and widened again for the number itself: nothing would seem to be left out.
    return lax.optimization_barrier(codec.encode(rows))


def _gathered(sent: jax.Array) -> jax.Array:
    """Rows of all islands, which every island is known to have alike."""
    return lax.all_gather(sent, ISLAND, axis=0, tiled=True, to="invarying")
