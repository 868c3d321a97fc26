"""Codecs by which gradients are sent as bytes: how long a row of numbers gets, and encoding and decoding it.

float8, int8 and int4 in blocks with a float32 scale each (ZeRO++, section 3.3):

    a row of k numbers      ├── block ──┤├── block ──┤├─ rest ┤
    as it is sent, u8       │ values: k (int4: k/2)           │ scales: 4 bytes a block │

A block's largest number becomes the largest that the values have, so that rounding is off by half a step at most: in
int8 by the largest over 254, in int4 over 14, in float8 by 1/16 of each number (e4m3: 3 bits behind the point).
Everything is sent as u8, since XLA's CPU widens float8 and bfloat16 on their way. A number that is not finite must stay
so, or a loss scale would never see an overflow: its block has the scale NaN.

Top-k sends of each row, what one rank sends to another, only the numbers of largest magnitude, and where they stood:

    a row           0.1  -3   0.2   0   2   0.3          as it is sent, u8    │ -3, 2 │ 1, 4 │
    what arrives    0    -3   0     0   2   0                                  float32  int32

JAX is imported where rows are encoded, so that a plan, which asks for bytes alone, needs none. `meshtrain.compression`
names them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import jax

SCALE = 4  # bytes of a block's float32
PAIR = 8  # bytes of a float32 and its int32 place


class Codec(Protocol):
    """A way to send rows of numbers."""

    def nbytes(self, k: int) -> int:
        """Returns the bytes of a row of k numbers."""
        ...

    def encode(self, rows: jax.Array) -> jax.Array:
        """float32 [n, k] -> uint8 [n, nbytes(k)]."""
        ...

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        """uint8 [n, nbytes(k)] -> float32 [n, k]."""
        ...


@dataclass(frozen=True)
class BlockCodec:
    """Numbers of `bits` each, `block` of which share a scale; 0: there is none."""

    block: int = 0
    bits = 16

    def blocks(self, k: int) -> int:
        """Returns the scales of a row of k numbers."""
        return math.ceil(k / self.block) if self.block else 0

    def nbytes(self, k: int) -> int:
        return math.ceil(k * self.bits / 8) + SCALE * self.blocks(k)

    def in_blocks(self, k: int, parts: int = 1) -> int:
        """Returns k filled up so that each of so many parts has full blocks."""
        part = parts * (self.block or 1)
        return math.ceil(k / part) * part


class Bfloat16(BlockCodec):
    """Without scales: bfloat16 reaches as far as float32."""

    def encode(self, rows: jax.Array) -> jax.Array:
        return _view_bytes(rows.astype("bfloat16"))

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        return _view_numbers(sent.reshape(len(sent), k, 2), "bfloat16").astype(
            "float32"
        )


class Scaled(BlockCodec):
    """Values with a scale for each block; `most` is the largest of them."""

    most: float
    bits = 8

    def encode(self, rows: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        k = rows.shape[1]
        blocks = _filled_up(rows, self.blocks(k) * self.block).reshape(
            len(rows), -1, self.block
        )
        # XLA makes such a product of a division by a constant, but not everywhere: the bits are to be the same on all
        # devices.
        scales = jnp.max(jnp.abs(blocks), axis=2) * jnp.float32(1 / self.most)
        # Smaller ones are no normal numbers, which devices may take for zero.
        scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0.0, scales)
        # By itself: a CPU's largest may pass over NaN.
        scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis=2), scales, jnp.nan)
        values = blocks / jnp.where(scales == 0.0, 1.0, scales)[..., None]
        return jnp.concatenate(
            [self.packed(values.reshape(len(rows), -1)[:, :k]), _view_bytes(scales)],
            axis=1,
        )

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        count = self.blocks(k)
        values = sent[:, : -SCALE * count]
        scales = sent[:, -SCALE * count :].reshape(len(sent), count, SCALE)
        blocks = _filled_up(self.unpacked(values, k), count * self.block).reshape(
            len(sent), count, self.block
        )
        return (blocks * _view_numbers(scales, "float32")[..., None]).reshape(
            len(sent), -1
        )[:, :k]

    def packed(self, values: jax.Array) -> jax.Array:
        """float32 [n, k] of at most `most` -> uint8 [n, ceil(k bits / 8)]."""
        raise NotImplementedError

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        """uint8 [n, ceil(k bits / 8)] -> float32 [n, k], rounded."""
        raise NotImplementedError


class Float8(Scaled):
    """e4m3 of the Open Compute Project's FP8 formats, which has no infinity."""

    most = 448.0

    def packed(self, values: jax.Array) -> jax.Array:
        return _view_bytes(values.astype("float8_e4m3fn"))

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        return _view_numbers(packed, "float8_e4m3fn").astype("float32")


class Int8(Scaled):
    most = 127.0

    def packed(self, values: jax.Array) -> jax.Array:
        return _view_bytes(values.round().astype("int8"))

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        return _view_numbers(packed, "int8").astype("float32")


class Int4(Scaled):
    """Two values a byte: of a row's first half in the lower bits, of its second in the upper ones."""

    most = 7.0
    bits = 4

    def packed(self, values: jax.Array) -> jax.Array:
        half = (values.shape[1] + 1) // 2
        rounded = _view_bytes(_filled_up(values.round(), 2 * half).astype("int8"))
        return (rounded[:, :half] & 15) | (rounded[:, half:] << 4)

    def unpacked(self, packed: jax.Array, k: int) -> jax.Array:
        import jax.numpy as jnp

        both = _view_numbers(jnp.concatenate([packed << 4, packed], axis=1), "int8")
        # To the right the sign comes in from the left.
        return (both >> 4)[:, :k].astype("float32")


@dataclass(frozen=True)
class TopK:
    """Pairs of a float32 and its int32 place, of the numbers of largest magnitude of a row: `ratio` of them."""

    ratio: float

    def count(self, k: int) -> int:
        """Returns how many of a row of k are sent."""
        return max(1, round(self.ratio * k))

    def nbytes(self, k: int) -> int:
        return PAIR * self.count(k)

    def encode(self, rows: jax.Array) -> jax.Array:
        """Puts numbers that are not finite first, so that a loss scale sees an overflow."""
        import jax.numpy as jnp
        from jax import lax

        magnitude = jnp.where(jnp.isfinite(rows), jnp.abs(rows), jnp.inf)
        _, places = lax.top_k(magnitude, self.count(rows.shape[1]))
        values = jnp.take_along_axis(rows, places, axis=1)
        return jnp.concatenate([_view_bytes(values), _view_bytes(places)], axis=1)

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        """Zeros where nothing was sent."""
        import jax.numpy as jnp

        n = len(sent)
        pairs = sent.reshape(n, 2, -1, 4)
        values = _view_numbers(pairs[:, 0], "float32")
        places = _view_numbers(pairs[:, 1], "int32")
        row = jnp.arange(n)[:, None]
        return (
            jnp.zeros((n, k), jnp.float32)
            .at[row, places]
            .set(values, unique_indices=True)
        )


def _view_bytes(x: jax.Array) -> jax.Array:
    """[n, k] of any dtype -> uint8 [n, bytes of a row]."""
    from jax import lax

    return lax.bitcast_convert_type(x, "uint8").reshape(len(x), -1)


def _view_numbers(x: jax.Array, dtype: str) -> jax.Array:
    """uint8 [..., bytes of a number] -> [...]; of numbers of one byte the last axis is left out."""
    from jax import lax

    return lax.bitcast_convert_type(x, dtype)


def _filled_up(rows: jax.Array, k: int) -> jax.Array:
    """Rows with zeros behind them, up to k numbers."""
    import jax.numpy as jnp

    if k > rows.shape[1]:
        return jnp.pad(rows, ((0, 0), (0, k - rows.shape[1])))
    return rows
