"""Attention as one kernel on GPUs, for what cuDNN does not take: documents packed in a sequence, dropout, float32.

Flash attention (Dao et al. 2022; the backward in two kernels as in Dao 2023, section 3.2) in Pallas, for Triton:

               keys →                a row of blocks is one program of the forward and of the queries' gradient
    queries  ■                       a column is one of the keys' and values' gradient
       ↓     ■ ■                     documents are the ids in `segments`: a block is read only between the first and
             · ■ ■   · = not read    the last that may hold one of its ids
             · · ■ ■                 both ways the other half is read too

Nothing of the size of the scores meets memory. Keys that pad the last block are not seen. `model.dropout` alone decides
which scores are dropped.

Why not cuDNN's own packed layout (`q_offsets`, JAX 0.10 to 0.12): it wants Hopper, a bound on the documents in a
sequence, of which data has none, and a log of sums [T] for each of them; and until jax 0.12 it reads the wrong keys
where heads share them (jax-ml/jax pull request 39521). Its dropout depends on how heads and sequences lie on the mesh.
JAX's Pallas kernel (`jax.experimental.pallas.ops.gpu.attention`) has neither shared heads nor dropout, reads what it
then masks, and is deprecated in 0.12. So is, without a date, Pallas' Triton backend, which all of them need but cuDNN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from meshtrain.compat import struct_like
from meshtrain.model.attention import (
    Heads,
    MaskArrays,
    Outputs,
    Scoring,
    cap_slope,
    output_shape,
    within,
)
from meshtrain.model.dropout import keep_mask
from meshtrain.model.kernels import MASKED

# Positions of a block, and bytes of its queries or of its keys: with more, accumulators leave the registers.
LARGEST = 64
BYTES = 2**14


class Masks(NamedTuple):
    """The scores that are masked besides later keys and keys before the window.

    Each is an array, a program's reference to it or its BlockSpec; None where nothing is masked so.
    """

    segments: Any  # [B, T], of queries
    key_segments: Any
    # [B, T / block], of a block of queries the first block of keys that it may see, or of keys the first of queries
    first: Any
    last: Any  # the same, the last block
    # [1, 2] int32, positions of the first query and of the first key; None: both 0
    origin: Any
    words: Any  # [B, H, 2] uint32, what a head's dropout is drawn from


class Backward(NamedTuple):
    """The arrays that the backward takes besides queries, keys and values."""

    log_sum: Any  # [B, H, T]
    rows: Any  # [B, H, T], sums over the width of output times cotangent
    d_out: Any  # [B, T, H, K]


# jit, since before 0.12 a kernel call that nothing reads stays in a program, as where remat keeps what it returned
@partial(jax.jit, static_argnums=0)
def forward(
    scoring: Scoring, given: Heads, arrays: MaskArrays
) -> tuple[jax.Array, ...]:
    """Returns the output [B, T, H, V] and float32 log of sums [B, H, T]; with `scoring.tops` also largest scores."""
    q, k, v = given
    batch, length, heads, _ = q.shape
    values = v.shape[3]
    block, (q, k, v) = _padded(q * scoring.scale, k, v)
    masks = _masks(block, length, arrays, of_keys=False)
    padded = q.shape[1]
    repeats = heads // k.shape[2]
    rows = partial(_rows, block)
    all_keys = partial(_all_keys, repeats)
    sums = pl.BlockSpec((None, None, block), lambda i, h, b: (b, h, i))
    number = struct_like((batch, heads, padded), jnp.float32, q)
    numbers = 1 + scoring.tops
    out, *by_query = _call(
        partial(_forward_kernel, scoring, length),
        (padded // block, heads, batch),
        [
            Heads._make([rows(q), all_keys(k), all_keys(v)]),
            _specs(masks, lambda i, h, b: (b, h)),
        ],
        [rows(v), *[sums] * numbers],
        [struct_like(output_shape(q, v), q.dtype, q), *[number] * numbers],
    )(Heads(q, k, v), masks)
    return out[:, :length, :, :values], *(x[..., :length] for x in by_query)


@partial(jax.jit, static_argnums=0)
def backward(
    scoring: Scoring,
    given: Heads,
    arrays: MaskArrays,
    outputs: Outputs,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the cotangents of `forward`'s queries, keys and values."""
    q, k, v = given
    out, log_sum, _ = outputs
    # [B, H, T], sums over the width
    rows = jnp.sum((out * d_out).astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    batch, length, heads, _ = q.shape
    size, (q, k, v, d_out) = _padded(q * scoring.scale, k, v, d_out)
    masks = _masks(size, length, arrays, of_keys=False)
    padded = q.shape[1]
    log_sum, rows = (
        jnp.pad(a, ((0, 0), (0, 0), (0, padded - length))) for a in (log_sum, rows)
    )
    groups = k.shape[2]
    repeats = heads // groups
    block = partial(_rows, size)
    all_keys = partial(_all_keys, repeats)
    sums = pl.BlockSpec((None, None, size), lambda i, h, b: (b, h, i))
    dq = _call(
        partial(_query_kernel, scoring, length),
        (padded // size, heads, batch),
        [
            Heads._make([block(q), all_keys(k), all_keys(v)]),
            _specs(masks, lambda i, h, b: (b, h)),
            Backward(sums, sums, block(d_out)),
        ],
        block(q),
        struct_like(q.shape, q.dtype, q),
    )(Heads(q, k, v), masks, Backward(log_sum, rows, d_out))
    masks = _masks(size, length, arrays, of_keys=True)

    def group_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, padded, repeats, x.shape[3]), lambda j, g, b: (b, 0, g, 0)
        )

    sums = pl.BlockSpec((None, repeats, padded), lambda j, g, b: (b, g, 0))
    dk, dv = _call(
        partial(_key_kernel, scoring, length),
        (padded // size, groups, batch),
        [
            Heads._make([group_spec(q), block(k), block(v)]),
            _specs(masks, lambda j, g, b: (b, g), repeats),
            Backward(sums, sums, group_spec(d_out)),
        ],
        [block(k), block(v)],
        [struct_like(k.shape, k.dtype, q), struct_like(v.shape, v.dtype, q)],
    )(Heads(q, k, v), masks, Backward(log_sum, rows, d_out))
    dq, dk, dv = (
        a[:, :length, :, : x.shape[3]] for a, x in zip((dq, dk, dv), given, strict=True)
    )
    return dq * scoring.scale, dk, dv


def _rows(block: int, x: jax.Array) -> pl.BlockSpec:
    """Returns the part of [B, T, H, K] that a program of a block and a head reads or writes."""
    return pl.BlockSpec((None, block, None, x.shape[3]), lambda i, h, b: (b, i, h, 0))


def _all_keys(repeats: int, x: jax.Array) -> pl.BlockSpec:
    """Returns all keys of [B, T, G, K] that `repeats` heads share."""
    wide = (None, x.shape[1], None, x.shape[3])
    return pl.BlockSpec(wide, lambda i, h, b: (b, 0, h // repeats, 0))


def _padded(*arrays: jax.Array) -> tuple[int, list[jax.Array]]:
    """A block's positions, and arrays [B, T, ., K] with whole blocks for T and for each K a power of two, as Triton's
    products want it: behind are zeros that nothing sees.
    """
    length = arrays[0].shape[1]
    wide = [max(16, pl.next_power_of_2(a.shape[3])) for a in arrays]
    block = max(16, min(LARGEST, BYTES // (max(wide) * arrays[0].dtype.itemsize)))
    behind = (0, -length % block)
    return block, [
        jnp.pad(a, ((0, 0), behind, (0, 0), (0, w - a.shape[3])))
        for a, w in zip(arrays, wide, strict=True)
    ]


def _masks(block: int, length: int, arrays: MaskArrays, of_keys: bool) -> Masks:
    """For a program of a block of queries, or `of_keys`.

    One may see the other where the ranges of their ids meet: of ids in any order that is never too little.
    """
    segments = arrays.segments
    keys = arrays.of_keys
    origin = (
        None
        if arrays.first is None
        else jnp.stack(arrays.first).astype(jnp.int32)[None]
    )
    if segments is None or keys is None:
        return Masks(None, None, None, None, origin, arrays.words)
    segments, keys = (
        jnp.pad(ids, ((0, 0), (0, -length % block)), mode="edge")
        for ids in (segments, keys)
    )
    mine, others = (keys, segments) if of_keys else (segments, keys)
    low, high, others_low, others_high = (
        reduced(ids.reshape(len(ids), -1, block), axis=2)
        for ids in (mine, others)
        for reduced in (jnp.min, jnp.max)
    )
    meets = (low[:, :, None] <= others_high[:, None, :]) & (
        high[:, :, None] >= others_low[:, None, :]
    )
    first = jnp.argmax(meets, axis=2).astype(jnp.int32)
    last = meets.shape[2] - 1 - jnp.argmax(meets[:, :, ::-1], axis=2).astype(jnp.int32)
    return Masks(segments, keys, first, last, origin, arrays.words)


def _forward_kernel(
    scoring: Scoring,
    length: int,
    heads: Heads,
    masks: Masks,
    out_ref: Any,
    log_sum_ref: Any,
    *top_ref: Any,
) -> None:
    i = pl.program_id(0)
    block = heads.q.shape[0]
    q = heads.q[...]

    def step(j: Any, carry: Any) -> Any:
        out, top, total = carry
        at = pl.ds(j * block, block)
        square = Square(i, j)
        scores = _scores(scoring, length, q, heads.k[at, :], masks, square)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        p = jnp.exp(scores - higher[:, None])
        correction = jnp.exp(top - higher)
        dropped = _dropout(scoring, masks, 0, square, block)(p).astype(heads.v.dtype)
        out = out * correction[:, None] + triton.dot(dropped, heads.v[at, :])
        return out, higher, total * correction + jnp.sum(p, axis=1)

    zeros = jnp.zeros(block, jnp.float32)
    none = jnp.zeros((block, heads.v.shape[1]), jnp.float32), zeros + MASKED, zeros
    out, top, total = jax.lax.fori_loop(
        *_keys(scoring, length, block, i, masks), step, none
    )
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_sum_ref[...] = top + jnp.log(total)
    for ref in top_ref:
        ref[...] = top


def _query_kernel(
    scoring: Scoring,
    length: int,
    heads: Heads,
    masks: Masks,
    given: Backward,
    dq_ref: Any,
) -> None:
    i = pl.program_id(0)
    block = heads.q.shape[0]
    q = heads.q[...]
    d = given.d_out[...]

    def step(j: Any, dq: Any) -> Any:
        at = pl.ds(j * block, block)
        k = heads.k[at, :]
        square = Square(i, j)
        scores = _scores(scoring, length, q, k, masks, square)
        p = jnp.exp(scores - given.log_sum[...][:, None])
        drop = _dropout(scoring, masks, 0, square, block)
        dp = drop(triton.dot(d, heads.v[at, :].T))
        ds = _through_cap(scoring, scores, p * (dp - given.rows[...][:, None]))
        return dq + triton.dot(ds.astype(k.dtype), k)

    dq = jax.lax.fori_loop(
        *_keys(scoring, length, block, i, masks), step, jnp.zeros(q.shape, jnp.float32)
    )
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_kernel(
    scoring: Scoring,
    length: int,
    heads: Heads,
    masks: Masks,
    given: Backward,
    *gradients: Any,
) -> None:
    j = pl.program_id(0)
    repeats = heads.q.shape[1]
    block = heads.k.shape[0]
    k = heads.k[...]
    v = heads.v[...]
    start, stop = _queries(scoring, length, block, j, masks)
    blocks = stop - start

    def step(n: Any, carry: Any) -> Any:
        dk, dv = carry
        head = jax.lax.div(n, blocks)
        i = start + jax.lax.rem(n, blocks)
        at = pl.ds(i * block, block)
        q = heads.q[at, head, :]
        d = given.d_out[at, head, :]
        square = Square(i, j)
        scores = _scores(scoring, length, q, k, masks, square)
        p = jnp.exp(scores - given.log_sum[head, at][:, None])
        drop = _dropout(scoring, masks, head, square, block)
        dv += triton.dot(drop(p).astype(d.dtype).T, d)
        dp = drop(triton.dot(d, v.T))
        ds = _through_cap(scoring, scores, p * (dp - given.rows[head, at][:, None]))
        return dk + triton.dot(ds.astype(q.dtype).T, q), dv

    none = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    sums = jax.lax.fori_loop(0, repeats * blocks, step, none)
    for ref, total in zip(gradients, sums, strict=True):
        ref[...] = total.astype(ref.dtype)


def _places(i: Any, block: int) -> jax.Array:
    return i * block + jnp.arange(block)


class Square(NamedTuple):
    """The scores of a block of queries and a block of keys."""

    i: Any  # number of the queries' block
    j: Any  # of the keys'


def _positions(square: Square, block: int, origin: Any) -> tuple[jax.Array, jax.Array]:
    """Positions of the queries, [block, 1], and of the keys, [1, block]."""
    queries = _places(square.i, block)[:, None]
    keys = _places(square.j, block)[None, :]
    if origin is None:
        return (queries, keys)
    return (queries + origin[0, 0], keys + origin[0, 1])


def _keys(
    scoring: Scoring,
    length: int,
    block: int,
    i: Any,
    masks: Masks,
) -> tuple[Any, Any]:
    """The first block of keys that query block i reads, and the one behind the last."""
    start, stop = _meeting(length, block, i, masks)
    # the first key that the block's first query sees; of earlier chunks some key is read in any case, so that there is
    # a sum to divide by
    bounded = scoring.window and scoring.causal
    start = (
        jnp.maximum(start, (i * block - scoring.window + 1) // block)
        if bounded
        else start
    )
    return start, i + 1 if scoring.causal else stop


def _queries(
    scoring: Scoring,
    length: int,
    block: int,
    j: Any,
    masks: Masks,
) -> tuple[Any, Any]:
    """The first block of queries that reads key block j, and the one behind the last."""
    start, stop = _meeting(length, block, j, masks)
    # the last query that sees the block's last key
    bounded = scoring.window and scoring.causal
    stop = (
        jnp.minimum(stop, (j * block + block + scoring.window - 2) // block + 1)
        if bounded
        else stop
    )
    return j if scoring.causal else start, stop


def _meeting(length: int, block: int, n: Any, masks: Masks) -> tuple[Any, Any]:
    """The first block whose documents may be those of block n, and the one behind the last; without documents all
    blocks.
    """
    if masks.first is None:
        return 0, -(-length // block)
    return masks.first[n], masks.last[n] + 1


def _scores(
    scoring: Scoring,
    length: int,
    q: jax.Array,
    k: jax.Array,
    masks: Masks,
    square: Square,
) -> jax.Array:
    """Scores of a block of queries and a block of keys, float32."""
    i, j = square
    block = len(q)
    if scoring.causal:
        back = _places(i, block)[:, None] - _places(j, block)[None, :]
        visible = (back >= 0) & (back < scoring.window) if scoring.window else back >= 0
    else:
        # a later key is seen, but for the padding
        visible = (_places(j, block) < length)[None, :]
        if scoring.window:
            at, of = _positions(square, block, masks.origin)
            visible = visible & (at - of < scoring.window)
    if masks.segments is not None:
        of_queries = masks.segments[pl.ds(i * block, block)]
        of_keys = masks.key_segments[pl.ds(j * block, block)]
        visible = visible & (of_queries[:, None] == of_keys[None, :])
    scores = triton.dot(q, k.T)
    return jnp.where(
        visible, within(scoring.cap, scores) if scoring.cap else scores, MASKED
    )


def _through_cap(scoring: Scoring, scores: jax.Array, ds: jax.Array) -> jax.Array:
    """Cotangents of the scores before they were capped."""
    return ds * cap_slope(scoring.cap, scores) if scoring.cap else ds


def _dropout(
    scoring: Scoring,
    masks: Masks,
    head: Any,
    square: Square,
    block: int,
) -> Callable[[jax.Array], jax.Array]:
    """Dropout on a block of a head's scores; linear."""
    rate = scoring.rate
    words = masks.words
    if not rate or words is None:
        return lambda p: p
    positions = _positions(square, block, masks.origin)
    keep = keep_mask(rate, words[head, 0], words[head, 1], *positions)
    return lambda p: jnp.where(keep, p / (1 - rate), 0.0)


def _specs(
    masks: Masks, place: Callable[..., tuple[Any, Any]], heads: int = 1
) -> Masks:
    """The parts of `masks` that a program reads: all of its sequence, and of `heads` at a `place` (sequence, heads)."""
    specs: Any = [
        *(
            a
            if a is None
            else pl.BlockSpec((None, a.shape[1]), lambda *at: (place(*at)[0], 0))
            for a in masks[:4]
        ),
        pl.BlockSpec((1, 2), lambda *at: (0, 0)),
        pl.BlockSpec((None, heads, 2), lambda *at: (*place(*at), 0)),
    ]
    return Masks(
        *(None if a is None else spec for a, spec in zip(masks, specs, strict=True))
    )


def _call(
    kernel: partial,
    grid: tuple[int, ...],
    in_specs: list,
    out_specs: Any,
    out_shape: Any,
) -> Callable:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name=kernel.func.__name__.strip("_"),
    )
