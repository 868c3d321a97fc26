"""A ring whose links carry messages both ways at once (Jain & Sabharwal 2010, on tori: links have two directions, use both).

reduce-scatter, n = 6: the sum of chunk 3 comes from both sides and meets on device 3

    device     0         1         2         3         4         5
    step 1     3 ──────► +3                            +3 ◄───── 3
    step 2               3 ──────► +3        +3 ◄───── 3
    step 3                         3 ──────► +3

all-gather: each sum leaves both ways, half-way around.

    steps   2 floor(n/2): half of a ring's; in each a message of S/n either way
    sent    2 S (n-1)/n by every device, as on a ring, but over twice as many links
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.parallel.reduce.algorithms.chunks import Axes, at, cut, joined, shifted


def reaches(n: int) -> tuple[int, int]:
    """How far messages go to the right and to the left, so that together they meet all others."""
    return n // 2, (n - 1) // 2


def reduce_scatter(chunks: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [n, k] to [k]: device r has the sum of chunk r."""
    rank, (right, left) = lax.axis_index(axes), reaches(len(chunks))
    from_left = at(chunks, rank + right)
    for step in range(1, right + 1):
        from_left = shifted(from_left, axes, 1) + at(chunks, rank + right - step)
    if not left:
        return from_left
    from_right = at(chunks, rank - left)
    for step in range(1, left):
        from_right = shifted(from_right, axes, -1) + at(chunks, rank - left + step)
    # Its own part is in what came from the left.
    return from_left + shifted(from_right, axes, -1)


def all_gather(chunk: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [k] to [n, k]: the chunk of every device."""
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    right, left = reaches(n)
    before, after = [chunk], [chunk]
    for _ in range(right):
        before.append(shifted(before[-1], axes, 1))
    for _ in range(left):
        after.append(shifted(after[-1], axes, -1))
    # Going left around the ring from here: those before, then those after, the farthest first.
    return jnp.stack(before + after[:0:-1])[(rank - jnp.arange(n)) % n]


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over all devices, of any shape."""
    return joined(all_gather(reduce_scatter(cut(x, lax.axis_size(axes)), axes), axes), x)
