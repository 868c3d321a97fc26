"""Codecs, and sums of what they make of gradients.

bfloat16, and float8, int8 and int4 in blocks with a float32 scale each (ZeRO++, Wang et al. 2023, section 3.3):

    a row of k numbers      ├── block ──┤├── block ──┤├─ rest ┤
    as it is sent, u8       │ values: k (int4: k/2)           │ scales: 4 bytes a block │

A block's largest number becomes the largest that the values have, so that rounding is off by half a step at most: in int8 by the largest
over 254, in int4 over 14, in float8 by 1/16 of each number (e4m3: 3 bits behind the point). Everything is sent as u8, since XLA's CPU
widens float8 and bfloat16 on their way. What is not finite must stay so, or a loss scale would never see an overflow: its block has the
scale NaN.

Top-k sends of each row, what one rank sends to another, only the numbers of largest magnitude, and where they stood:

    a row           0.1  -3   0.2   0   2   0.3          as it is sent, u8    │ -3, 2 │ 1, 4 │
    what arrives    0    -3   0     0   2   0                                  float32  int32

Each destination gets the largest of what it is to sum: k numbers of a row cost 8 k bytes, once. To gather the pairs of all ranks
everywhere would send N times as much. What stays behind is most of a gradient, which error feedback adds to later ones
(Aji & Heafield 2017; Stich et al. 2018).

Each number is encoded once on its way to where it is summed, and summed in float32:

    scatter, over data                            all_reduce, across islands
    rank 0   [to 0][to 1]  ─┐ all-to-all          2 islands: the other's shard, whole, beside the own one; summed by both
    rank 1   [to 0][to 1]  ─┘ of u8               more: each sums one chunk of it, and sends the sum on, encoded once more
             decode, sum

A ring would encode partial sums in each of its steps. With 2 islands the gather sends as much as the exchange and the gather of more do.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.config import Config
from meshtrain.mesh import ISLAND
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.reduction import Reduced, padded, unpadded, zero_dimension
from meshtrain.parallel.reduce.sizes import (
    SCALE,
    BlockSizes,
    TopKSizes,
    chunk_length,
    codec_of,
    crosses_compressed,
    scatters_compressed,
)


class Codec(Protocol):
    """A way to send rows of numbers."""

    def nbytes(self, k: int) -> int:
        """Bytes of a row of k numbers."""
        ...

    def encode(self, rows: jax.Array) -> jax.Array:
        """float32 [n, k] -> uint8 [n, nbytes(k)]."""
        ...

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        """uint8 [n, nbytes(k)] -> float32 [n, k]."""
        ...


@dataclass(frozen=True)
class Bfloat16(BlockSizes):
    """Without scales: bfloat16 reaches as far as float32."""

    def encode(self, rows: jax.Array) -> jax.Array:
        return _as_bytes(rows.astype(jnp.bfloat16))

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        return lax.bitcast_convert_type(sent.reshape(len(sent), k, 2), jnp.bfloat16).astype(jnp.float32)


@dataclass(frozen=True)
class Scaled(BlockSizes):
    """Values with a scale for each block; `most` is the largest of them."""

    most: float

    def encode(self, rows: jax.Array) -> jax.Array:
        k = rows.shape[1]
        blocks = _filled_up(rows, self.blocks(k) * self.block).reshape(len(rows), -1, self.block)
        # XLA makes such a product of a division by a constant, but not everywhere: the bits are to be the same on all devices.
        scales = jnp.max(jnp.abs(blocks), axis=2) * jnp.float32(1 / self.most)
        # Smaller ones are no normal numbers, which devices may take for zero.
        scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0.0, scales)
        # By itself: a CPU's largest may pass over NaN.
        scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis=2), scales, jnp.nan)
        values = blocks / jnp.where(scales == 0.0, 1.0, scales)[..., None]
        values = values.reshape(len(rows), -1)[:, :k]
        return jnp.concatenate([self.packed(values), _as_bytes(scales)], axis=1)

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        count = self.blocks(k)
        values, scales = sent[:, : -SCALE * count], sent[:, -SCALE * count :].reshape(len(sent), count, SCALE)
        blocks = _filled_up(self.unpacked(values, k), count * self.block).reshape(len(sent), count, self.block)
        scaled = blocks * lax.bitcast_convert_type(scales, jnp.float32)[..., None]
        return scaled.reshape(len(sent), -1)[:, :k]

    def packed(self, values: jax.Array) -> jax.Array:
        """float32 [n, k] of at most `most` -> uint8 [n, ceil(k bits / 8)]."""
        raise NotImplementedError

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        """uint8 [n, ceil(k bits / 8)] -> float32 [n, k], rounded."""
        raise NotImplementedError


@dataclass(frozen=True)
class Float8(Scaled):
    """e4m3 of the Open Compute Project's FP8 formats, which has no infinity."""

    most: float = 448.0

    def packed(self, values: jax.Array) -> jax.Array:
        return _as_bytes(values.astype(jnp.float8_e4m3fn))

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        return lax.bitcast_convert_type(packed, jnp.float8_e4m3fn).astype(jnp.float32)


@dataclass(frozen=True)
class Int8(Scaled):
    most: float = 127.0

    def packed(self, values: jax.Array) -> jax.Array:
        return _as_bytes(jnp.round(values).astype(jnp.int8))

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        return lax.bitcast_convert_type(packed, jnp.int8).astype(jnp.float32)


@dataclass(frozen=True)
class Int4(Scaled):
    """Two values a byte: of a row's first half in the lower bits, of its second in the upper ones."""

    most: float = 7.0

    def packed(self, values: jax.Array) -> jax.Array:
        half = (values.shape[1] + 1) // 2
        rounded = _as_bytes(_filled_up(jnp.round(values), 2 * half).astype(jnp.int8))
        return (rounded[:, :half] & 15) | (rounded[:, half:] << 4)

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        both = lax.bitcast_convert_type(jnp.concatenate([packed << 4, packed], axis=1), jnp.int8)
        # To the right the sign comes in from the left.
        return (both >> 4)[:, :k].astype(jnp.float32)


@dataclass(frozen=True)
class TopK(TopKSizes):
    """The numbers of largest magnitude with their places."""

    def encode(self, rows: jax.Array) -> jax.Array:
        """What is not finite goes first, so that a loss scale sees an overflow."""
        magnitude = jnp.where(jnp.isfinite(rows), jnp.abs(rows), jnp.inf)
        _, places = lax.top_k(magnitude, self.count(rows.shape[1]))
        values = jnp.take_along_axis(rows, places, axis=1)
        return jnp.concatenate([_as_bytes(values), _as_bytes(places)], axis=1)

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        """Zeros where nothing was sent."""
        n = len(sent)
        pairs = sent.reshape(n, 2, -1, 4)
        values = lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
        places = lax.bitcast_convert_type(pairs[:, 1], jnp.int32)
        row = jnp.arange(n)[:, None]
        return jnp.zeros((n, k), jnp.float32).at[row, places].set(values, unique_indices=True)


def _as_bytes(x: jax.Array) -> jax.Array:
    """[n, k] of any dtype -> uint8 [n, bytes of a row]."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)


def _filled_up(rows: jax.Array, k: int) -> jax.Array:
    """Rows with zeros behind them, up to k numbers."""
    return jnp.pad(rows, ((0, 0), (0, k - rows.shape[1]))) if k > rows.shape[1] else rows


# --- sums of what codecs make of gradients


class Exchange:
    """Which sums of a config are compressed, and those sums. PowerSGD's have no codec, and are made by `feedback`."""

    def __init__(self, config: Config) -> None:
        self.config, self.codec = config, codec_of(config.parallel.reduce)

    def crosses(self, weight: Placed) -> bool:
        """A weight's gradient is compressed on its way across islands."""
        return crosses_compressed(self.config, weight)

    def reduce_scatter(self, weight: Placed, g: jax.Array) -> Reduced | None:
        """A gradient's shard, summed over the data ranks of an island; None where it is not compressed."""
        if self.codec is None or not scatters_compressed(self.config, weight):
            return None
        return scatter(weight, g, self.codec)

    def all_reduce_islands(self, weight: Placed, shard: jax.Array) -> Reduced | None:
        """An island's shard, summed over all islands; None where it is not compressed."""
        return all_reduce(shard, self.codec) if self.codec is not None and self.crosses(weight) else None


def scatter(weight: Placed, g: jax.Array, codec: Codec) -> Reduced:
    """A gradient's shard, summed over the data ranks of an island, by one all-to-all. Takes stacked leaves and single layers of them."""
    ranks, dim, full = weight.zero_degree, zero_dimension(weight, g), padded(weight, g.astype(jnp.float32))
    rows = _to_rows(full, dim, ranks)
    k = rows.shape[1]
    sent = _encoded(codec, rows)
    came = lax.all_to_all(sent, weight.zero_axes, split_axis=0, concat_axis=0, tiled=True)
    shape = tuple(n // ranks if d == dim else n for d, n in enumerate(full.shape))
    shard = jnp.sum(codec.decode(came, k), axis=0).reshape(shape)
    return Reduced(shard, unpadded(weight, _from_rows(codec.decode(sent, k), dim, full.shape)))


def all_reduce(shard: jax.Array, codec: Codec) -> Reduced:
    """An array summed over all islands, the same bits in each."""
    flat, islands = shard.astype(jnp.float32).reshape(-1), lax.axis_size(ISLAND)
    total, arrived = (_swapped if islands == 2 else _in_chunks)(flat, codec, islands)
    return Reduced(total.reshape(shard.shape), arrived.reshape(shard.shape))


def _swapped(flat: jax.Array, codec: Codec, islands: int) -> tuple[jax.Array, jax.Array]:
    """The sum by one gather, for two islands."""
    sent = _encoded(codec, flat[None])
    total = jnp.sum(codec.decode(_gathered(sent), len(flat)), axis=0)
    return total, codec.decode(sent, len(flat))[0]


def _in_chunks(flat: jax.Array, codec: Codec, islands: int) -> tuple[jax.Array, jax.Array]:
    """The sum by an exchange and a gather of the sums. What the second encoding leaves out counts as left out by who made the sum."""
    k = chunk_length(len(flat), islands)
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


def _to_rows(x: jax.Array, dim: int, shards: int) -> jax.Array:
    """A padded gradient [..., shards * s, ...] as [shards, numbers of a shard]."""
    cut = x.reshape(*x.shape[:dim], shards, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0).reshape(shards, -1)


def _from_rows(rows: jax.Array, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """Rows as `_to_rows` makes them, to a padded gradient of `shape`."""
    shards = len(rows)
    cut = rows.reshape(shards, *shape[:dim], shape[dim] // shards, *shape[dim + 1 :])
    return jnp.moveaxis(cut, 0, dim).reshape(shape)
