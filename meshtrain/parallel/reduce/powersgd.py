"""PowerSGD (Vogels, Karimireddy & Jaggi 2019, algorithm 1): a gradient M [n, c] is summed as two thin matrices, P [n,
r] and Q [c, r].

    rank i                          all ranks
    P_i = M_i Q      ──sum──►       P   ──orthonormalised──► P̂
    Q_i = M_iᵀ P̂     ──sum──►       Q                              sum of all M_i: taken as  P̂ Qᵀ
                                                                   sent of M_i:  P̂ Q_iᵀ = P̂ P̂ᵀ M_i

The next step begins from this Q, so that over the steps it is a power iteration (section 3, "warm-start"). A device
sends 2 (N-1)/N · 4 r (n + c) bytes in the place of (N-1)/N · 4 n c. P is orthonormalised by Householder's QR and not by
Gram and Schmidt: columns that depend on each other (a layer that only pads a stage, a gradient of lower rank) stay
orthonormal, and what is zero in every M_i stays zero.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.sizes import GradientMatrix


class Factors(NamedTuple):
    """The factors of the layers' matrices: P̂ [L, n, r], the same on all ranks, and Q [L, c, r]."""

    p: jax.Array
    own: jax.Array  # this rank's Q_i
    total: jax.Array  # the sum of all


def factors(m: jax.Array, q: jax.Array, ranks: tuple[str, ...]) -> Factors:
    """P̂ and Q of the sum over `ranks` of the matrices `m` float32 [L, n, c], begun from `q` [L, c, r]; inside
    shard_map.
    """
    p, _ = jnp.linalg.qr(lax.psum(_product("lnc,lcr->lnr", m, q), ranks))
    own = _product("lnc,lnr->lcr", m, p)
    return Factors(p, own, lax.psum(own, ranks))


class LowRankSum(NamedTuple):
    """The ranks' results for a gradient that PowerSGD summed."""

    sum: jax.Array  # of all ranks: like the gradient, or this data rank's shard of it
    arrived: jax.Array  # like the gradient: what of this rank's own came through
    q: jax.Array  # to begin the next step from


def summed(
    weight: Placed,
    matrix: GradientMatrix,
    g: jax.Array,
    q: jax.Array,
    ranks: tuple[str, ...],
    shard: bool,
) -> LowRankSum:
    """A device's gradient `g` float32, summed over `ranks`; its `q` as `sizes.q_spread` has it, on one device.

    shard: of the sum only what ZeRO gives this data rank is computed.
    """
    first = matrix.first
    columns = matrix.first + matrix.rows
    layers = g.shape[:first]
    row_dims = g.shape[first:columns]
    column_dims = g.shape[columns:]
    m = g.reshape(math.prod(layers), math.prod(row_dims), math.prod(column_dims))
    of_all = factors(m, q.reshape(len(m), m.shape[2], matrix.rank), ranks)
    arrived = _product("lnr,lcr->lnc", of_all.p, of_all.own).reshape(g.shape)
    p = of_all.p.reshape(*layers, *row_dims, matrix.rank)
    total = of_all.total.reshape(*layers, *column_dims, matrix.rank)
    if shard:
        p, total = _slice_rank(weight, first, columns, p, total)
    shape = (*p.shape[:-1], *total.shape[first:-1])
    thin = [x.reshape(math.prod(p.shape[:first]), -1, matrix.rank) for x in (p, total)]
    return LowRankSum(
        _product("lnr,lcr->lnc", *thin).reshape(shape),
        arrived,
        of_all.total.reshape(q.shape),
    )


def _slice_rank(
    weight: Placed,
    first: int,
    columns: int,
    p: jax.Array,
    q: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns P and Q with this data rank's part of the dimension that ZeRO shards, padded where it is."""
    dim = weight.zero_dim
    assert dim is not None
    each = weight.padded[dim] // weight.ways[dim] // weight.zero_degree

    def part(x: jax.Array, at: int) -> jax.Array:
        more = weight.padded[dim] - weight.whole[dim]
        x = jnp.pad(x, [(0, more if d == at else 0) for d in range(x.ndim)])
        return lax.dynamic_slice_in_dim(
            x, lax.axis_index(weight.zero_axes) * each, each, at
        )

    if dim < first:
        return part(p, dim), part(q, dim)
    return (part(p, dim), q) if dim < columns else (p, part(q, dim - columns + first))


def _product(what: str, *factors: jax.Array) -> jax.Array:
    # TensorFloat-32 would lose of each step more than what feedback brings back
    return jnp.einsum(what, *factors, precision=lax.Precision.HIGHEST)
