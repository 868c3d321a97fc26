"""The places in a decoder where devices must meet, named; on one device none of them does anything.

        x ──norm── enter ──column-parallel── · ──row-parallel── leave ── + ── x
     (replicated          (this rank's heads or             (summed over the
      or 1/T of the        d_ff columns)                     ranks again)
      sequence)

The model calls these methods and knows nothing of a mesh; `parallel.tensor` overrides them with explicit collectives.
"""

from typing import Any

import jax
import jax.numpy as jnp


class Collectives:
    """One device: every method is the identity. `platform` chooses between implementations of attention."""

    platform: str = "cpu"
    vocabulary: tuple[str, ...] = ()  # mesh axes that share the vocabulary, major first

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Before a column-parallel weight: the whole sequence, on every tensor rank."""
        return x_BTD

    def leave(self, y_BTD: jax.Array) -> jax.Array:
        """After a row-parallel weight: partial sums over the tensor ranks become the residual stream."""
        return y_BTD

    def enter_head(self, x_BTD: jax.Array) -> jax.Array:
        """Before the output head: the whole sequence, on every rank that holds a share of the vocabulary."""
        return x_BTD

    def leave_embedding(self, x_BTD: jax.Array) -> jax.Array:
        """After the lookup in this rank's share of the vocabulary: partial sums become the residual stream."""
        return x_BTD

    def share(self, weight: jax.Array) -> jax.Array:
        """A bias that every rank adds before `leave` sums them: divided by the number of ranks."""
        return weight

    def share_embedding(self, weight: jax.Array) -> jax.Array:
        """The same for what is added before `leave_embedding`."""
        return weight

    def first_head(self, heads: int) -> jax.Array | int:
        """Global index of this rank's first of `heads` local query heads."""
        return 0

    def first_token_id(self, rows: int) -> jax.Array | int:
        """Global id of the first of `rows` local rows of the vocabulary."""
        return 0

    def first_position(self, length: int) -> jax.Array | int:
        """Position in the sequence of the first of `length` local entries of the residual stream."""
        return 0

    def vocabulary_sum(self, x: jax.Array) -> jax.Array:
        """Sum over all shares of the vocabulary."""
        return x

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        """Maximum over all shares of the vocabulary (of a value that carries no gradient)."""
        return jax.lax.stop_gradient(x)


class Dropout:
    """Dropout whose mask follows from what a value is, not from where it lies: (seed, step, layer, site, sequence, position).

    `rows_B` are global indices of the sequences in the batch. Rate 0 or no key: the identity.
    """

    def __init__(self, rate: float, key: jax.Array | None, rows_B: jax.Array | None) -> None:
        self.rate = rate if key is not None else 0.0
        self.key: Any = key
        self.rows = rows_B

    def at(self, site: jax.Array | int) -> "Dropout":
        """The same dropout with keys of its own for a layer or a site in it."""
        return self if self.rate == 0.0 else Dropout(self.rate, jax.random.fold_in(self.key, site), self.rows)

    def stream(self, x_BTD: jax.Array, first_position: jax.Array | int) -> jax.Array:
        """Drops from the residual stream, whose sequence may be sharded and starts at `first_position`."""
        if self.rate == 0.0:
            return x_BTD
        positions = first_position + jnp.arange(x_BTD.shape[1])
        keep = jax.vmap(
            jax.vmap(lambda row, position: self._keep((row, position), x_BTD.shape[2:]), (None, 0)), (0, None)
        )
        return jnp.where(keep(self.rows, positions), x_BTD / (1 - self.rate), 0).astype(x_BTD.dtype)

    def attention(self, p_BHQK: jax.Array, first_head: jax.Array | int) -> jax.Array:
        """Drops attention probabilities of heads that start at `first_head`."""
        if self.rate == 0.0:
            return p_BHQK
        heads = first_head + jnp.arange(p_BHQK.shape[1])
        keep = jax.vmap(jax.vmap(lambda row, head: self._keep((row, head), p_BHQK.shape[2:]), (None, 0)), (0, None))
        return jnp.where(keep(self.rows, heads), p_BHQK / (1 - self.rate), 0).astype(p_BHQK.dtype)

    def _keep(self, path: tuple[jax.Array, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(self.key, path[0]), path[1])
        return jax.random.bernoulli(key, 1 - self.rate, shape)


NO_DROPOUT = Dropout(0.0, None, None)
