"""All-reduce, written out: which device sends what to whom, a message at a time. `psum` leaves that to XLA and NCCL.

The cost of each stands in `meshtrain.allreduce`, where they have their names; the double tree has a file of its own.

Each program works on the devices of one mesh axis, or of several as if they were one, and is called inside `shard_map`.
The sum of a number is made on one device and copied to the others, so that all have the same bits; algorithms add in
different orders, so that between two of them the last bits differ.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.allreduce import ALGORITHMS
from meshtrain.compat import unchecked, vary, varying

# One mesh axis, or several taken for one, the major first.
Axes = str | tuple[str, ...]
Collective = Callable[[jax.Array, Axes], jax.Array]


class Programs(NamedTuple):
    """Programs of messages.

    The halves work on chunks [n, k], of which each device has one, [k]; some algorithms have none.
    """

    all_reduce: Collective
    reduce_scatter: Collective | None = None
    all_gather: Collective | None = None


# --- collectives by the name of an algorithm


def all_reduce(algorithm: str, x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """The sum over the devices of the axes, which is the same on all of them and typed so, as that of `psum` is."""
    axes = _joined(axes)
    if algorithm == "psum":
        return lax.psum(x, axes)
    # A message's type says that it differs from device to device, and no cast takes that back: the program is traced
    # without such types, and the axes that were not summed over are put back.
    with unchecked():
        total = _programs(algorithm).all_reduce(x, axes)
    summed = {axes} if isinstance(axes, str) else set(axes)
    return vary(total, sorted(varying(x) - summed))


def reduce_scatter(
    algorithm: str, x: jax.Array, axes: str | tuple[str, ...], dim: int
) -> jax.Array:
    """A device's part, along the dimension `dim`, which the axes must divide, of the sum over the devices of the
    axes.
    """
    axes = _joined(axes)
    if algorithm == "psum":
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    scatter = _programs(algorithm).reduce_scatter
    n = lax.axis_size(axes)
    assert scatter is not None, f"{algorithm} has no reduce-scatter"
    shape = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], n, *shape[dim:]), dim, 0)
    return scatter(parts.reshape(n, -1), axes).reshape(shape)


def all_gather(algorithm: str, x: jax.Array, axis: str) -> jax.Array:
    """[m, ...] of every device to [n m, ...]."""
    if algorithm == "psum":
        return lax.all_gather(x, axis, tiled=True)
    gather = _programs(algorithm).all_gather
    assert gather is not None, f"{algorithm} has no all-gather"
    return gather(x.reshape(-1), axis).reshape(-1, *x.shape[1:])


def _joined(axes: str | tuple[str, ...]) -> Axes:
    return axes[0] if len(axes) == 1 else axes


def _programs(algorithm: str) -> Programs:
    programs = ALGORITHMS[algorithm].programs
    assert programs is not None
    return programs()


# --- an array cut into equal parts, and messages that all devices of an axis send at once


def cut(x: jax.Array, parts: int) -> jax.Array:
    """Any shape to [parts, k], filled up with zeros where the size does not divide."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % parts)).reshape(parts, -1)


def joined(chunks: jax.Array, like: jax.Array) -> jax.Array:
    """The chunks that `cut` made of an array like this one, put together again."""
    return chunks.reshape(-1)[: like.size].reshape(like.shape)


def _take_chunk(chunks: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the chunk of that number, counted around: -1 is the last."""
    return lax.dynamic_index_in_dim(chunks, number % len(chunks), keepdims=False)


def _shifted(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """Every device sends `x` to the one `by` places on, around the ring; returns what came."""
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + by) % n) for i in range(n)])


def _exchanged(x: jax.Array, axes: Axes, distance: int, members: int) -> jax.Array:
    """The first `members` devices change `x` with the one whose number differs in the bit `distance`; the others get
    zeros.
    """
    return _sent(x, axes, [(i, i ^ distance) for i in range(members)])


def _sent(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` from the first to the second of each pair; zeros where nothing came."""
    return lax.ppermute(x, axes, pairs) if pairs else jnp.zeros_like(x)


def _join_passes(
    reduce_scatter: Collective,
    all_gather: Collective,
) -> Programs:
    """An all-reduce of a reduce-scatter and an all-gather, of any shape."""

    def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
        return joined(
            all_gather(reduce_scatter(cut(x, lax.axis_size(axes)), axes), axes), x
        )

    return Programs(all_reduce, reduce_scatter, all_gather)


# --- the ring (Patarasuk & Yuan 2009): sums travel once around, then results do


def _ring_reduce_scatter(chunks: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [n, k] to [k]: device r has the sum of chunk r.

    For n = 4 that of chunk 3 grows on its way from device 0 to device 3:

        device     0          1          2          3
        step 1     3 ───────► +3
        step 2                3 ───────► +3
        step 3                           3 ───────► +3 = the sum of chunk 3

    Likewise chunk r ends on device r.
    """
    rank = lax.axis_index(axes)
    # What it sends first is its left neighbour's chunk, which has the longest way.
    total = _take_chunk(chunks, rank - 1)
    for step in range(1, len(chunks)):
        total = _shifted(total, axes, 1) + _take_chunk(chunks, rank - 1 - step)
    return total


def _ring_all_gather(chunk: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [k] to [n, k]: the chunk of every device, each of which goes on around, past all others."""
    n = lax.axis_size(axes)
    rank = lax.axis_index(axes)
    chunks = [chunk]
    for _ in range(n - 1):
        chunks.append(_shifted(chunks[-1], axes, 1))
    # After s steps a device has the chunk of the one s places before.
    return jnp.stack(chunks)[(rank - jnp.arange(n)) % n]


RING = _join_passes(_ring_reduce_scatter, _ring_all_gather)


# --- a ring whose links carry messages both ways at once (Jain & Sabharwal 2010, on tori: links have two directions,
# use both)


def _reaches(n: int) -> tuple[int, int]:
    """Returns how far messages go to the right and to the left, so that together they meet all others."""
    return n // 2, (n - 1) // 2


def _two_way_reduce_scatter(chunks: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [n, k] to [k]: device r has the sum of chunk r.

    For n = 6 that of chunk 3 comes from both sides and meets on device 3:

        device     0         1         2         3         4         5
        step 1     3 ──────► +3                            +3 ◄───── 3
        step 2               3 ──────► +3        +3 ◄───── 3
        step 3                         3 ──────► +3

    Likewise chunk r meets on device r.
    """
    rank = lax.axis_index(axes)
    (right, left) = _reaches(len(chunks))
    from_left = _take_chunk(chunks, rank + right)
    for step in range(1, right + 1):
        from_left = _shifted(from_left, axes, 1) + _take_chunk(
            chunks, rank + right - step
        )
    if not left:
        return from_left
    from_right = _take_chunk(chunks, rank - left)
    for step in range(1, left):
        from_right = _shifted(from_right, axes, -1) + _take_chunk(
            chunks, rank - left + step
        )
    # Its own part is in what came from the left.
    return from_left + _shifted(from_right, axes, -1)


def _two_way_all_gather(chunk: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [k] to [n, k]: the chunk of every device, which leaves both ways, half-way around."""
    n = lax.axis_size(axes)
    rank = lax.axis_index(axes)
    right, left = _reaches(n)
    before = [chunk]
    after = [chunk]
    for _ in range(right):
        before.append(_shifted(before[-1], axes, 1))
    for _ in range(left):
        after.append(_shifted(after[-1], axes, -1))
    # Going left around the ring from this device: those before, then those after, the farthest first.
    return jnp.stack(before + after[:0:-1])[(rank - jnp.arange(n)) % n]


TWO_WAY_RING = _join_passes(_two_way_reduce_scatter, _two_way_all_gather)


# --- recursive halving, then doubling (Thakur et al. 2005, section 4.5; Rabenseifner 2004): partners first far apart,
# then near


def _halving_reduce_scatter(chunks: jax.Array, axes: Axes) -> jax.Array:
    """Chunks [m, k] to [k]: of the first m devices, m a power of two, device r has the sum of chunk r. For 4 devices:

                     chunks that a device still sums        sends
        device 0     0 1 2 3  ──►  0 1  ──►  0              2 3 to device 2, then 1 to device 1
        device 1     0 1 2 3  ──►  0 1  ──►  1              2 3 to device 3, then 0 to device 0
        device 2     0 1 2 3  ──►  2 3  ──►  2
        device 3     0 1 2 3  ──►  2 3  ──►  3

    The all-gather takes the same steps backwards.
    """
    members = len(chunks)
    rank = lax.axis_index(axes)
    distance = members // 2
    while distance:
        halves = chunks.reshape(2, distance, -1)
        upper = (rank & distance) > 0
        keep = jnp.where(upper, halves[1], halves[0])
        give = jnp.where(upper, halves[0], halves[1])
        chunks = keep + _exchanged(give, axes, distance, members)
        distance //= 2
    return chunks[0]


def _doubling_all_gather(
    chunk: jax.Array, axes: Axes, members: int | None = None
) -> jax.Array:
    """Chunks [k] to [m, k]: the chunks of the first m devices (by default of all), m a power of two."""
    members = members or lax.axis_size(axes)
    rank = lax.axis_index(axes)
    chunks = chunk[None]
    distance = 1
    while distance < members:
        others = _exchanged(chunks, axes, distance, members)
        upper = (rank & distance) > 0
        chunks = jnp.where(
            upper, jnp.concatenate([others, chunks]), jnp.concatenate([chunks, others])
        )
        distance *= 2
    return chunks


def _halving_doubling(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over all devices, of any shape.

    If the number of devices is not a power of two, those beyond one first send all they have to a partner, and get the
    sum last. That is two steps more, and S bytes more for the partners.
    """
    n = lax.axis_size(axes)
    members = 1 << (n.bit_length() - 1)
    beyond = [(i, i - members) for i in range(members, n)]
    partial = x + _sent(x, axes, beyond) if beyond else x
    total = joined(
        _doubling_all_gather(
            _halving_reduce_scatter(cut(partial, members), axes), axes, members
        ),
        x,
    )
    if not beyond:
        return total
    returned = _sent(total, axes, [(partner, i) for i, partner in beyond])
    return jnp.where(lax.axis_index(axes) >= members, returned, total)


HALVING_DOUBLING = Programs(
    _halving_doubling, _halving_reduce_scatter, _doubling_all_gather
)


# --- inside islands first, then across (Cho et al. 2019, BlueConnect): what leaves an island is summed in it before


def _hierarchical(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over all devices, of any shape; over islands alone, or within one, by a ring.

        islands of 4        0 1 2 3          4 5 6 7
        reduce-scatter      └─ring─┘         └─ring─┘        fast links: S (m-1)/m, m devices in an island
        all-reduce          0 ──── ring ──── 4               slow links: 2 S/m (i-1)/i, i islands; all m pairs at once
                            1 ────────────── 5
        all-gather          └─ring─┘         └─ring─┘        fast links: S (m-1)/m

    An m-th part of what a flat ring sends crosses between islands. Not "one representative per island", which would
    send all of S over one device's link and leave the others idle. With ZeRO it is the order of HSDP (Zhao et al.
    2023), which keeps the shards and gathers weights in place of gradients.
    """
    if isinstance(axes, str):
        return RING.all_reduce(x, axes)
    across, inside = axes
    shard = _ring_reduce_scatter(cut(x, lax.axis_size(inside)), inside)
    return joined(_ring_all_gather(RING.all_reduce(shard, across), inside), x)


HIERARCHICAL = Programs(_hierarchical, _ring_reduce_scatter, _ring_all_gather)
