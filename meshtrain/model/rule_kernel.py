"""Computes what a chunk of the delta rule adds and asks for, as one kernel on GPUs, in Pallas for Triton.

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
    """The arrays that a program reads of its chunk; each a reference, an array or its BlockSpec, or None."""

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
    padded: Any = jax.tree.map(whole, inputs)
    given = Refs(*padded, *ids)
    rows, length, heads, width = given.v.shape
    depth = given.k.shape[3]
    n = length // chunk
    shapes = [(chunk, chunk), (chunk, depth), (chunk, depth), (1, 1)]
    if given.beta is not None:
        shapes += [(chunk, depth), (chunk, width)]
    return pl.pallas_call(
        _chunk_kernel,
        grid=(n, rows, heads),
        in_specs=[_specs(chunk, given)],
        out_specs=[
            pl.BlockSpec((None, None, None, *shape), lambda i, r, h: (i, r, h, 0, 0))
            for shape in shapes
        ],
        out_shape=[
            struct_like((n, rows, heads, *shape), jnp.float32, given.v)
            for shape in shapes
        ],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        name="chunk_kernel",
    )(given)


def _specs(chunk: int, given: Refs) -> Refs:
    """Returns the parts of arrays that the program of chunk i, row r and head h reads."""
    shared = given.v.shape[2] // given.k.shape[2]
    keys = pl.BlockSpec(
        (None, chunk, None, given.k.shape[3]), lambda i, r, h: (r, i, h // shared, 0)
    )
    values = pl.BlockSpec(
        (None, chunk, None, given.v.shape[3]), lambda i, r, h: (r, i, h, 0)
    )
    numbers = pl.BlockSpec((None, chunk, None), lambda i, r, h: (r, i, h))
    ids, before = (
        pl.BlockSpec((None, size), lambda i, r, h: (r, i)) for size in (chunk, 1)
    )
    specs = (keys, keys, values, numbers, numbers, ids, before)
    return Refs(
        *(x if x is None else spec for x, spec in zip(given, specs, strict=True))
    )


class Decays(NamedTuple):
    """The shares that are left of a chunk, 0 where a document ends in between."""

    pairs: Any  # [C, C], of token j at token i; 0 for j > i
    start: Any  # [C, 1], of the state before the chunk
    end: Any  # [C, 1], at its last token
    chunk: Any  # of the state before it, at its last token


def _decays(refs: Refs) -> Decays:
    (i, j) = _places(len(refs.q))
    decay = refs.decay[...]
    later = jnp.where(i > j, decay[:, None], 0.0)
    seen = i >= j
    start = jnp.exp(jnp.cumsum(decay))
    end = jnp.exp(jnp.sum(later, axis=0))
    chunk = jnp.exp(jnp.sum(decay))
    if refs.ids is not None:
        ids = refs.ids[...]
        before = refs.before[0]
        last = refs.ids[len(ids) - 1]
        seen = seen & (ids[:, None] == ids[None, :])
        start = jnp.where(ids == before, start, 0.0)
        end = jnp.where(ids == last, end, 0.0)
        chunk = jnp.where(last == before, chunk, 0.0)
    # sums of the decays behind j up to i: a difference of sums would round what is small away
    pairs = jnp.where(seen, jnp.exp(jnp.cumsum(later, axis=0)), 0.0)
    return Decays(pairs, start[:, None], end[:, None], chunk)


def _chunk_kernel(
    refs: Refs,
    scores: Any,
    queries: Any,
    keys: Any,
    keep: Any,
    *solved: Any,
) -> None:
    (i, j) = _places(len(refs.q))
    decays = _decays(refs)
    pairs = jnp.zeros(decays.pairs.shape, jnp.float32)
    system = pairs
    for at in _tiles(refs.k):
        q = refs.q[at]
        k = refs.k[at]
        pairs += jnp.dot(q, k.T)
        queries[at] = q * decays.start
        keys[at] = k * decays.end
        if solved:
            system += jnp.dot(k, k.T)
    scores[...] = pairs * decays.pairs
    keep[...] = jnp.full((1, 1), decays.chunk)
    if not solved:
        return
    w, u = solved
    beta = refs.beta[...][:, None]
    inverse = _inverse(jnp.where(i > j, system * decays.pairs * beta, 0.0))
    for at in _tiles(refs.k):
        w[at] = jnp.dot(inverse, refs.k[at] * (-beta * decays.start))
    for at in _tiles(refs.v):
        u[at] = jnp.dot(inverse, refs.v[at] * beta)


def _places(size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of tokens, [C, 1] and [1, C]."""
    places = jnp.arange(size)
    return places[:, None], places[None, :]


def _tiles(rows: Any) -> list[tuple[Any, ...]]:
    """Returns the places of so many columns at once as leave the registers room."""
    width = rows.shape[1]
    return [(slice(None), pl.ds(at, min(TILE, width))) for at in range(0, width, TILE)]


def _inverse(system: jax.Array) -> jax.Array:
    """Returns (I + system)^-1 of a strictly lower triangle."""
    (i, j) = _places(len(system))
    x = jnp.where(i == j, 1.0, 0.0)
    half = 1
    while half < len(system):
        beside = jax.lax.div(i, half) ^ jax.lax.div(j, half)
        below = jnp.where(beside == 1, system, 0.0)
        x = x - (below if half == 1 else jnp.dot(jnp.dot(x, below), x))
        half *= 2
    return x
