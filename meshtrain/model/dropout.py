"""Dropout that is the same on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp


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
