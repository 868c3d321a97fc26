"""Gradients as few bits: bfloat16, and float8, int8 and int4 in blocks with a float32 scale each (ZeRO++, Wang et al. 2023, section 3.3).

    a row of k numbers      ├── block ──┤├── block ──┤├─ rest ┤
    as it is sent, u8       │ values: k (int4: k/2)           │ scales: 4 bytes a block │

A block's largest number becomes the largest that the values have, so that rounding is off by half a step at most: in int8 by the largest
over 254, in int4 over 14, in float8 by 1/16 of each number (e4m3: 3 bits behind the point). Everything is sent as u8, since XLA's CPU
widens float8 and bfloat16 on their way. What is not finite must stay so, or a loss scale would never see an overflow: its block has the
scale NaN.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.config.reduce import ReduceConfig
from meshtrain.parallel.reduce.sizes import SCALE, BlockSizes, Sized, block_sizes


class Codec(Sized, Protocol):
    """A way to send rows of numbers."""

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
        """The way back, rounded."""
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


CODECS = {"bfloat16": Bfloat16, "float8": Float8, "int8": Int8, "int4": Int4}


def block_codec(reduce: ReduceConfig) -> Codec:
    """That of a compression in blocks."""
    sizes = block_sizes(reduce)
    return CODECS[reduce.compression](sizes.bits, sizes.block)


def _as_bytes(x: jax.Array) -> jax.Array:
    """[n, k] of any dtype -> uint8 [n, bytes of a row]."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)


def _filled_up(rows: jax.Array, k: int) -> jax.Array:
    """Rows with zeros behind them, up to k numbers."""
    return jnp.pad(rows, ((0, 0), (0, k - rows.shape[1]))) if k > rows.shape[1] else rows
