"""Dropout that is the same on every mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshtrain.compat import vary, varying


class Dropout:
    """Dropout whose mask follows from what a value is, not from where it lies: (seed, step, layer, site, sequence,
    position).

    `rows_B` are global indices of the sequences in the batch. Rate 0 or no key: the identity.
    """

    def __init__(self, rate: float, key: Array | None, rows_B: Array | None) -> None:
        self.rate = rate if key is not None else 0.0
        self.key: Any = key
        self.rows: Any = rows_B

    def at(self, site: Array | int) -> "Dropout":
        """Returns the same dropout with keys of its own for a layer or a site in it."""
        if self.rate == 0.0:
            return self
        return Dropout(self.rate, jax.random.fold_in(self.key, site), self.rows)

    def stream(self, x_BTD: Array, first_position: Array | int) -> Array:
        """Drops from the residual stream, whose sequence may be sharded and starts at `first_position` (see
        `Collectives`).
        """
        if self.rate == 0.0:
            return x_BTD

        def keep(row: Array, position: Array) -> Array:
            key = self._key_of(row, position)
            return jax.random.bernoulli(key, 1 - self.rate, x_BTD.shape[2:])

        keep_row = jax.vmap(keep, (None, 0))
        keep_rows = jax.vmap(keep_row, (0, None))
        positions = first_position + jnp.arange(x_BTD.shape[1])
        return _apply(keep_rows(self.rows, positions), self.rate, x_BTD)

    def attention(self, p_BHQK: Array, first_head: Array | int) -> Array:
        """Drops attention probabilities of heads that start at `first_head`, of all queries and all keys."""
        if self.rate == 0.0:
            return p_BHQK
        words = self.words(first_head, p_BHQK.shape[1])
        return drop(self.rate, words, p_BHQK, 0)

    def rows_of(
        self,
        x_ND: Array,
        first_column: Array | int,
        positions: Callable[[int], Array] = jnp.arange,
    ) -> Array:
        """Drops from rows [B*T, D], whose columns start at `first_column` of the whole, of the `positions` of T
        tokens.
        """
        if self.rate == 0.0:
            return x_ND
        # the loop in `keep_mask` wants one type of all that it carries
        words = vary(self.words(0, 1)[..., None, None], varying(x_ND))
        x_BTD = x_ND.reshape(self.rows.shape[0], -1, x_ND.shape[1])
        rows = vary(positions(x_BTD.shape[1])[:, None], varying(x_ND))
        columns = vary(first_column + jnp.arange(x_BTD.shape[2]), varying(x_ND))
        keep = keep_mask(self.rate, words[:, 0, 0], words[:, 0, 1], rows, columns)
        return _apply(keep, self.rate, x_BTD).reshape(x_ND.shape)

    def words(self, first_head: Array | int, heads: int) -> Array:
        """uint32 [B, heads, 2] from which `keep_mask` draws for heads that start at `first_head`."""

        def draw(row: Array, head: Array) -> Array:
            return jax.random.bits(self._key_of(row, head), (2,))

        draw_row = jax.vmap(draw, (None, 0))
        draw_rows = jax.vmap(draw_row, (0, None))
        return draw_rows(self.rows, first_head + jnp.arange(heads))

    def _key_of(self, row: Array, place: Array) -> Array:
        row_key = jax.random.fold_in(self.key, row)
        return jax.random.fold_in(row_key, place)


NO_DROPOUT = Dropout(0.0, None, None)
# sites that no layer has
EMBEDDING_SITE = 1 << 20
ADAPTER_SITE = 1 << 21

# Of Threefry-2x32: how far each of eight rounds rotates, and the constant that goes into its key (Salmon et al. 2011,
# section 3.3).
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA


def drop(
    rate: float,
    words_BH2: Array,
    p_BHQK: Array,
    first_query: Array | int,
    first_key: Array | int = 0,
) -> Array:
    """Dropout on the scores of queries and keys from the first ones on; linear, so it serves cotangents too."""
    _, _, queries, keys = p_BHQK.shape
    query_places = first_query + jnp.arange(queries)[:, None]
    key_places = first_key + jnp.arange(keys)
    words = words_BH2[..., None, None]
    keep = keep_mask(rate, words[:, :, 0], words[:, :, 1], query_places, key_places)
    return _apply(keep, rate, p_BHQK)


# The gradient of jnp.where would keep an array of zeros beside the mask.
@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apply(keep: Array, rate: float, x: Array) -> Array:
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def _applied(keep: Array, rate: float, x: Array) -> tuple[Array, Array]:
    return _apply(keep, rate, x), keep


def _gradient(rate: float, keep: Array, g: Array) -> tuple[None, Array]:
    return None, _apply(keep, rate, g)


_apply.defvjp(_applied, _gradient)


def keep_mask(
    rate: float,
    word: Array,
    other: Array,
    queries: Array,
    keys: Array,
) -> Array:
    """Returns whether the scores of `queries` and `keys` stay: positions in a sequence, arrays that broadcast to one
    shape.

    Each score is drawn for itself, from a head's two words and its place, by Threefry-2x32 with 20 rounds: whatever
    blocks a kernel makes of the scores, it drops the same ones. Plain arithmetic, since inside a kernel there is no
    jax.random.
    """
    third = word ^ other ^ jnp.uint32(PARITY)

    # A loop, since Triton's compiler takes minutes and gigabytes for the rounds as one expression.
    def turn(n: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, y, a, b, c = carry
        for even, odd in zip(ROTATIONS[:4], ROTATIONS[4:], strict=True):
            left = (even + (n & 1) * (odd - even)).astype(jnp.uint32)
            right = jnp.uint32(32) - left
            x = x + y
            y = x ^ (y << left | y >> right)
        number = (n + 1).astype(jnp.uint32)
        return x + b, y + c + number, b, c, a

    x, y = jnp.broadcast_arrays(
        queries.astype(jnp.uint32) + word,
        keys.astype(jnp.uint32) + other,
    )
    begin = (x, y, word, other, third)
    x, y, *_ = jax.lax.fori_loop(0, 5, turn, begin)
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return (x ^ y) >= jnp.uint32(threshold)
