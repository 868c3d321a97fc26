"""Recursive halving, then doubling (Thakur et al. 2005, section 4.5; Rabenseifner 2004): partners first far apart, then near.

    n = 4        chunks that a device still sums        sends
    device 0     0 1 2 3  ──►  0 1  ──►  0              2 3 to device 2, then 1 to device 1
    device 1     0 1 2 3  ──►  0 1  ──►  1              2 3 to device 3, then 0 to device 0
    device 2     0 1 2 3  ──►  2 3  ──►  2
    device 3     0 1 2 3  ──►  2 3  ──►  3              all-gather: the same backwards

    steps   2 log2 n
    sent    2 S (n-1)/n by every device; messages of S/2, S/4, ..., the largest the farthest

Of n devices that are no power of two those beyond one give all they have to one of the others first, and get the sum last: two steps
and, for their partners, S bytes more.
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.parallel.reduce.algorithms.chunks import Axes, cut, exchanged, joined, sent


def reduce_scatter(chunks: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [m, k] to [k]: of the first m devices, m a power of two, device r has the sum of chunk r."""
    members, rank = len(chunks), lax.axis_index(axes)
    distance = members // 2
    while distance:
        halves, upper = chunks.reshape(2, distance, -1), (rank & distance) > 0
        keep, give = jnp.where(upper, halves[1], halves[0]), jnp.where(upper, halves[0], halves[1])
        chunks = keep + exchanged(give, axes, distance, members)
        distance //= 2
    return chunks[0]


def all_gather(chunk: jax.Array, axes: Axes, members: int | None = None) -> jax.Array:
    """Chunks [k] to [m, k]: the chunks of the first m devices (by default of all), m a power of two."""
    members, rank = members or lax.axis_size(axes), lax.axis_index(axes)
    chunks, distance = chunk[None], 1
    while distance < members:
        others = exchanged(chunks, axes, distance, members)
        upper = (rank & distance) > 0
        chunks = jnp.where(upper, jnp.concatenate([others, chunks]), jnp.concatenate([chunks, others]))
        distance *= 2
    return chunks


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over all devices, of any shape and any number of devices."""
    n = lax.axis_size(axes)
    members = 1 << (n.bit_length() - 1)
    beyond = [(i, i - members) for i in range(members, n)]
    partial = x + sent(x, axes, beyond) if beyond else x
    total = joined(all_gather(reduce_scatter(cut(partial, members), axes), axes, members), x)
    if not beyond:
        return total
    returned = sent(total, axes, [(partner, i) for i, partner in beyond])
    return jnp.where(lax.axis_index(axes) >= members, returned, total)
