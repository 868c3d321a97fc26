"""Top-k: of each row, what one rank sends to another, only the numbers of largest magnitude, and where they stood.

    a row           0.1  -3   0.2   0   2   0.3          as it is sent, u8    │ -3, 2 │ 1, 4 │
    what arrives    0    -3   0     0   2   0                                  float32  int32

Each destination gets the largest of what it is to sum: k numbers of a row cost 8 k bytes, once. To gather the pairs of all ranks
everywhere would send N times as much. What stays behind is most of a gradient, which error feedback adds to later ones
(Aji & Heafield 2017; Stich et al. 2018).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.parallel.reduce.sizes import TopKSizes


@dataclass(frozen=True)
class TopK(TopKSizes):
    """The codec, see `blocks.Codec`."""

    def encode(self, rows: jax.Array) -> jax.Array:
        """float32 [n, k] -> uint8 [n, nbytes(k)]. What is not finite goes first, so that a loss scale sees an overflow."""
        magnitude = jnp.where(jnp.isfinite(rows), jnp.abs(rows), jnp.inf)
        _, places = lax.top_k(magnitude, self.count(rows.shape[1]))
        values = jnp.take_along_axis(rows, places, axis=1)
        return jnp.concatenate([_as_bytes(values), _as_bytes(places)], axis=1)

    def decode(self, sent: jax.Array, k: int) -> jax.Array:
        """uint8 [n, nbytes(k)] -> float32 [n, k], zero where nothing was sent."""
        n = len(sent)
        pairs = sent.reshape(n, 2, -1, 4)
        values = lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
        places = lax.bitcast_convert_type(pairs[:, 1], jnp.int32)
        row = jnp.arange(n)[:, None]
        return jnp.zeros((n, k), jnp.float32).at[row, places].set(values, unique_indices=True)


def _as_bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)
