"""The ring (Patarasuk & Yuan 2009): sums travel once around, then results do.

reduce-scatter, n = 4: the sum of chunk 3 grows on its way from device 0, which is next to 3, to device 3

    device     0          1          2          3
    step 1     3 ───────► +3
    step 2                3 ───────► +3
    step 3                           3 ───────► +3 = the sum of chunk 3        likewise chunk r ends on device r

all-gather: each sum goes on around, past all others.

    steps   2 (n-1), each one message of S/n to the neighbour
    sent    2 S (n-1)/n by every device
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.parallel.reduce.algorithms.chunks import Axes, at, cut, joined, shifted


def reduce_scatter(chunks: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [n, k] to [k]: device r has the sum of chunk r."""
    rank = lax.axis_index(axes)
    # What it sends first is its left neighbour's chunk, which has the longest way.
    total = at(chunks, rank - 1)
    for step in range(1, len(chunks)):
        total = shifted(total, axes, 1) + at(chunks, rank - 1 - step)
    return total


def all_gather(chunk: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [k] to [n, k]: the chunk of every device."""
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    held = [chunk]
    for _ in range(n - 1):
        held.append(shifted(held[-1], axes, 1))
    # Held after s steps is the chunk of the device s places before.
    return jnp.stack(held)[(rank - jnp.arange(n)) % n]


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over all devices, of any shape."""
    return joined(all_gather(reduce_scatter(cut(x, lax.axis_size(axes)), axes), axes), x)
