"""What a chunk of the delta rule adds and asks for, as one kernel on GPUs, in Pallas for Triton.

A program has one chunk of one head: what `delta_rule` computes by halves, through memory each time, stays in registers
here. Decays are one number a head (`kda` has one a channel, and no kernel).

The inverse of the triangle I + A grows by halves as there. With X the inverses of blocks along the diagonal, and B of A
what twice as large blocks have below them, it is X - X B X.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from meshtrain.compat import struct_like

TILE = 32  # columns of keys and values that a program has at once


class Refs(NamedTuple):
    """What a program reads of its chunk; each a reference, an array or its BlockSpec, or None."""

    q: Any  # [C, K], as k
    k: Any
    v: Any  # [C, V]
    decay: Any  # [C], as beta
    beta: Any
    ids: Any  # [C], of documents
    before: Any  # [1], of the token before


# jit, since before 0.12 a kernel call that nothing reads stays in a program, as where remat keeps what it returned
@partial(jax.jit, static_argnums=0)
def compute_terms(chunk: int, inputs: Any, ids: Any) -> Any:
    """Returns scores, queries, keys and keep of `delta_rule`, and with beta w and u.

    `inputs`: q, k, v, log_decay, beta; `ids`: of documents, and those before the chunks, or None.
    """
    short = -inputs[0].shape[1] % chunk
    whole = lambda x: jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2))
    ids, before = ids
    padded: Any = jax.tree.map(whole, inputs)
    given = Refs(*padded, ids, None if ids is None else before[..., None])
    rows, length, groups, depth = given.k.shape
    heads, width = given.v.shape[2:]
    n = length // chunk
    shared = heads // groups
    keys = pl.BlockSpec((None, chunk, None, depth), lambda i, r, h: (r, i, h // shared, 0))
    numbers = pl.BlockSpec((None, chunk, None), lambda i, r, h: (r, i, h))
    specs = Refs(
        keys,
        keys,
        pl.BlockSpec((None, chunk, None, width), lambda i, r, h: (r, i, h, 0)),
        numbers,
        numbers,
        pl.BlockSpec((None, chunk), lambda i, r, h: (r, i)),
        pl.BlockSpec((None, None, 1), lambda i, r, h: (r, i, 0)),
    )
    shapes = [(chunk, chunk), (chunk, depth), (chunk, depth), (1, 1)]
    if given.beta is not None:
        shapes += [(chunk, depth), (chunk, width)]
    return pl.pallas_call(
        _chunk_kernel,
        grid=(n, rows, heads),
        in_specs=[Refs(*(x if x is None else s for x, s in zip(given, specs, strict=True)))],
        out_specs=[
            pl.BlockSpec((None, None, None, *shape), lambda i, r, h: (i, r, h, 0, 0))
            for shape in shapes
        ],
        out_shape=[struct_like((n, rows, heads, *shape), jnp.float32, given.v) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        name="chunk_kernel",
    )(given)


def _chunk_kernel(
    refs: Refs, scores: Any, queries: Any, keys: Any, keep: Any, *solved: Any
) -> None:
    size = len(refs.q)
    i = jnp.arange(size)[:, None]
    j = jnp.arange(size)[None, :]
    decay = refs.decay[...]
    later = jnp.where(i > j, decay[:, None], 0.0)
    advance = jnp.exp(jnp.cumsum(decay))
    to_end = jnp.exp(jnp.sum(later, axis=0))
    kept = jnp.exp(jnp.sum(decay))
    seen = i >= j
    if refs.ids is not None:
        ids = refs.ids[...]
        before = refs.before[0]
        end = refs.ids[size - 1]
        seen = seen & (ids[:, None] == ids[None, :])
        advance = jnp.where(ids == before, advance, 0.0)
        to_end = jnp.where(ids == end, to_end, 0.0)
        kept = jnp.where(end == before, kept, 0.0)
    # sums of the decays behind j up to i: a difference of sums would round what is small away
    weights = jnp.where(seen, jnp.exp(jnp.cumsum(later, axis=0)), 0.0)
    pairs = jnp.zeros((size, size), jnp.float32)
    system = pairs
    for at in _tiles(refs.k):
        q = refs.q[at]
        k = refs.k[at]
        pairs += jnp.dot(q, k.T)
        queries[at] = q * advance[:, None]
        keys[at] = k * to_end[:, None]
        if solved:
            system += jnp.dot(k, k.T)
    scores[...] = pairs * weights
    keep[...] = jnp.full((1, 1), kept)
    if not solved:
        return
    w, u = solved
    beta = refs.beta[...][:, None]
    inverse = _inverse(jnp.where(i > j, system * weights * beta, 0.0))
    for at in _tiles(refs.k):
        w[at] = jnp.dot(inverse, refs.k[at] * (-beta * advance[:, None]))
    for at in _tiles(refs.v):
        u[at] = jnp.dot(inverse, refs.v[at] * beta)


def _tiles(rows: Any) -> list[tuple[Any, ...]]:
    """Returns the places of so many columns at once as leave the registers room."""
    width = rows.shape[1]
    return [(slice(None), pl.ds(at, min(TILE, width))) for at in range(0, width, TILE)]


def _inverse(system: jax.Array) -> jax.Array:
    """Returns (I + system)^-1 of a strictly lower triangle."""
    i = jnp.arange(len(system))[:, None]
    j = jnp.arange(len(system))[None, :]
    x = jnp.where(i == j, 1.0, 0.0)
    half = 1
    while half < len(system):
        beside = jax.lax.div(i, half) ^ jax.lax.div(j, half)
        below = jnp.where(beside == 1, system, 0.0)
        x = x - (below if half == 1 else jnp.dot(jnp.dot(x, below), x))
        half *= 2
    return x
