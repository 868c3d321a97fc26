"""Dropout that is the same on every mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.compat import vary, varying


class Dropout:
    """Dropout whose mask follows from what a value is, not from where it lies: (seed, step, layer, site, sequence,
    position).

    `rows_B` are global indices of the sequences in the batch. Rate 0 or no key: the identity.
    """

    def __init__(self, rate: float, key: jax.Array | None, rows_B: jax.Array | None) -> None:
        self.rate = rate if key is not None else 0.0
        self.key: Any = key
        self.rows: Any = rows_B

    def at(self, site: jax.Array | int) -> "Dropout":
        """Returns the same dropout with keys of its own for a layer or a site in it."""
        return (
            self
            if self.rate == 0.0
            else Dropout(self.rate, jax.random.fold_in(self.key, site), self.rows)
        )

    def stream(self, x_BTD: jax.Array, first_position: jax.Array | int) -> jax.Array:
        """Drops from the residual stream, whose sequence may be sharded and starts at `first_position` (see
        `Collectives`).
        """
        if self.rate == 0.0:
            return x_BTD
        positions = first_position + jnp.arange(x_BTD.shape[1])
        keep = jax.vmap(
            jax.vmap(lambda row, position: self._keep((row, position), x_BTD.shape[2:]), (None, 0)),
            (0, None),
        )
        return jnp.where(keep(self.rows, positions), x_BTD / (1 - self.rate), 0).astype(x_BTD.dtype)

    def attention(self, p_BHQK: jax.Array, first_head: jax.Array | int) -> jax.Array:
        """Drops attention probabilities of heads that start at `first_head`, of all queries and all keys."""
        if self.rate == 0.0:
            return p_BHQK
        return drop(self.rate, self.words(first_head, p_BHQK.shape[1]), p_BHQK, 0)

    def rows_of(
        self,
        x_ND: jax.Array,
        first_column: jax.Array | int,
        positions: Callable[[int], jax.Array] = jnp.arange,
    ) -> jax.Array:
        """Drops from rows [B*T, D], whose columns start at `first_column` of the whole, of the `positions` of T
        tokens.
        """
        if self.rate == 0.0:
            return x_ND
        # the loop in `keep_mask` wants one type of all that it carries
        words = vary(self.words(0, 1)[..., None, None], varying(x_ND))
        x_BTD = x_ND.reshape(self.rows.shape[0], -1, x_ND.shape[1])
        columns = jnp.arange(x_BTD.shape[2])
        places = (
            vary(at, varying(x_ND))
            for at in (positions(x_BTD.shape[1])[:, None], first_column + columns)
        )
        keep = keep_mask(self.rate, words[:, 0, 0], words[:, 0, 1], *places)
        return jnp.where(keep, x_BTD / (1 - self.rate), 0).astype(x_ND.dtype).reshape(x_ND.shape)

    def words(self, first_head: jax.Array | int, heads: int) -> jax.Array:
        """uint32 [B, heads, 2] from which `keep_mask` draws for heads that start at `first_head`."""
        of_head = jax.vmap(
            lambda row, head: jax.random.bits(self._key_of(row, head), (2,)), (None, 0)
        )
        return jax.vmap(of_head, (0, None))(self.rows, first_head + jnp.arange(heads))

    def _keep(self, path: tuple[jax.Array, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        return jax.random.bernoulli(self._key_of(*path), 1 - self.rate, shape)

    def _key_of(self, row: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.key, row), place)


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
    words_BH2: jax.Array,
    p_BHQK: jax.Array,
    first_query: jax.Array | int,
    first_key: jax.Array | int = 0,
) -> jax.Array:
    """Dropout on the scores of queries and keys from the first ones on; linear, so it serves cotangents too."""
    queries, keys = (jnp.arange(n) for n in p_BHQK.shape[2:])
    words = words_BH2[..., None, None]
    keep = keep_mask(
        rate, words[:, :, 0], words[:, :, 1], first_query + queries[:, None], first_key + keys
    )
    return jnp.where(keep, p_BHQK / (1 - rate), 0).astype(p_BHQK.dtype)


def keep_mask(
    rate: float, word: jax.Array, other: jax.Array, queries: jax.Array, keys: jax.Array
) -> jax.Array:
    """Returns whether the scores of `queries` and `keys` stay: positions in a sequence, arrays that broadcast to one
    shape.

    Each score is drawn for itself, from a head's two words and its place, by Threefry-2x32 with 20 rounds: whatever
    blocks a kernel makes of the scores, it drops the same ones. Plain arithmetic, since inside a kernel there is no
    jax.random.
    """
    third = word ^ other ^ jnp.uint32(PARITY)

    # A loop, since Triton's compiler takes minutes and gigabytes for the rounds as one expression.
    def turn(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, y, a, b, c = carry
        for even, odd in zip(ROTATIONS[:4], ROTATIONS[4:], strict=True):
            by = (even + (n & 1) * (odd - even)).astype(jnp.uint32)
            x = x + y
            y = x ^ (y << by | y >> (jnp.uint32(32) - by))
        return x + b, y + c + (n + 1).astype(jnp.uint32), b, c, a

    start = (queries.astype(jnp.uint32) + word, keys.astype(jnp.uint32) + other)
    x, y, *_ = jax.lax.fori_loop(0, 5, turn, (*jnp.broadcast_arrays(*start), word, other, third))
    return (x ^ y) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
