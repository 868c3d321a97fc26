"""Sums of gradients that `codecs` make bytes of.

Each number is encoded once on its way to where it is summed, and summed in float32:

    scatter, over data                            all_reduce, across islands
    rank 0   [to 0][to 1]  ─┐ all-to-all          2 islands: both shards on both, which sum them
    rank 1   [to 0][to 1]  ─┘ of u8               more: each sums one chunk, and sends the sum, encoded again
             decode, sum

A ring would encode partial sums in each of its steps. With 2 islands the gather sends as much as the exchange and the
gather of more do. With top-k each destination gets the largest of the numbers that it sums: k numbers of a row cost 8 k
bytes, once. To gather the pairs of all ranks everywhere would send N times as much. Most of a gradient stays behind,
and error feedback adds it to later ones (Aji & Heafield 2017; Stich et al. 2018).
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compression import codec_of
from meshtrain.config import Config
from meshtrain.mesh import ISLAND
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.codecs import Codec
from meshtrain.parallel.reduce.reduction import (
    Reduced,
    Uncompressed,
    padded,
    unpadded,
    zero_dimension,
)
from meshtrain.parallel.reduce.sizes import (
    chunk_length,
    crosses_compressed,
    scatters_compressed,
)


class Exchange(Uncompressed):
    """Which sums of a config are compressed, and those sums. PowerSGD's have no codec, and are made by `feedback`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.codec = codec_of(config.parallel.reduce)

    def crosses(self, weight: Placed) -> bool:
        return crosses_compressed(self.config, weight)

    def reduce_scatter(self, weight: Placed, g: jax.Array) -> Reduced | None:
        if self.codec is None or not scatters_compressed(self.config, weight):
            return None
        return scatter(weight, g, self.codec)

    def all_reduce_islands(self, weight: Placed, shard: jax.Array) -> Reduced | None:
        if self.codec is not None and self.crosses(weight):
            return all_reduce(shard, self.codec)
        return None


def scatter(weight: Placed, g: jax.Array, codec: Codec) -> Reduced:
    """A gradient's shard, summed over the data ranks of an island, by one all-to-all.

    Takes stacked leaves and single layers of them.
    """
    ranks = weight.zero_degree
    dim = zero_dimension(weight, g)
    full = padded(weight, g.astype(jnp.float32))
    rows = _cut_rows(full, dim, ranks)
    k = rows.shape[1]
    sent = _encoded(codec, rows)
    came = lax.all_to_all(
        sent, weight.zero_axes, split_axis=0, concat_axis=0, tiled=True
    )
    shape = tuple(n // ranks if d == dim else n for d, n in enumerate(full.shape))
    shard = jnp.sum(codec.decode(came, k), axis=0).reshape(shape)
    return Reduced(
        shard, unpadded(weight, _join_rows(codec.decode(sent, k), dim, full.shape))
    )


def all_reduce(shard: jax.Array, codec: Codec) -> Reduced:
    """An array summed over all islands, the same bits in each."""
    flat = shard.astype(jnp.float32).reshape(-1)
    islands = lax.axis_size(ISLAND)
    total, arrived = (_swapped if islands == 2 else _sum_in_chunks)(
        flat, codec, islands
    )
    return Reduced(total.reshape(shard.shape), arrived.reshape(shard.shape))


def _swapped(
    flat: jax.Array, codec: Codec, islands: int
) -> tuple[jax.Array, jax.Array]:
    """The sum by one gather, for two islands."""
    sent = _encoded(codec, flat[None])
    total = jnp.sum(codec.decode(_gathered(sent), len(flat)), axis=0)
    return total, codec.decode(sent, len(flat))[0]


def _sum_in_chunks(
    flat: jax.Array, codec: Codec, islands: int
) -> tuple[jax.Array, jax.Array]:
    """The sum by an exchange and a gather of the sums.

    The rest that the second encoding leaves out counts as left out by the rank that made the sum."""
    k = chunk_length(len(flat), islands)
    rows = jnp.pad(flat, (0, islands * k - len(flat))).reshape(islands, k)
    sent = _encoded(codec, rows)
    came = lax.all_to_all(sent, ISLAND, split_axis=0, concat_axis=0, tiled=True)
    own = jnp.sum(codec.decode(came, k), axis=0)
    again = _encoded(codec, own[None])
    total = codec.decode(_gathered(again), k)
    arrived = (
        codec.decode(sent, k)
        .at[lax.axis_index(ISLAND)]
        .add(codec.decode(again, k)[0] - own)
    )
    return total.reshape(-1)[: len(flat)], arrived.reshape(-1)[: len(flat)]


def _encoded(codec: Codec, rows: jax.Array) -> jax.Array:
    # XLA's GPU compiler takes a number that is narrowed and widened again for the number itself: nothing would seem to
    # be left out.
    return lax.optimization_barrier(codec.encode(rows))


def _gathered(sent: jax.Array) -> jax.Array:
    """Rows of all islands, which every island is known to have alike."""
    return lax.all_gather(sent, ISLAND, axis=0, tiled=True, to="invarying")


def _cut_rows(x: jax.Array, dim: int, shards: int) -> jax.Array:
    """A padded gradient [..., shards * s, ...] as [shards, numbers of a shard]."""
    cut = x.reshape(*x.shape[:dim], shards, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0).reshape(shards, -1)


def _join_rows(rows: jax.Array, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """Rows as `_cut_rows` makes them, to a padded gradient of `shape`."""
    shards = len(rows)
    cut = rows.reshape(shards, *shape[:dim], shape[dim] // shards, *shape[dim + 1 :])
    return jnp.moveaxis(cut, 0, dim).reshape(shape)
