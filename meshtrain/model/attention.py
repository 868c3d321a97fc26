"""Causal attention: a kernel of the accelerator where there is one for the case, elsewhere blocks that never touch the masked half.

`model.kernels` tells which. All of them keep one copy of their output, as the rows that the output projection keeps too, and the
log of each query's sum; under remat both go by the name `attention`, so that whoever keeps them runs no forward again.
"""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import cudnn_attention, cudnn_attention_backward, vary, varying
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import NO_DROPOUT, Dropout, drop
from meshtrain.model.kernels import Kernel, attention_kernel, block_size

MASKED = -1e30


class Kept(NamedTuple):
    """What the backward needs: of a kernel q, k, v as they were given and log_sum [B, H, T], of blocks these shapes."""

    q: jax.Array  # [B, G, R, T, K] queries (scaled) for R heads a group
    k: jax.Array  # [B, G, T, K]
    v: jax.Array
    out: jax.Array  # [B T, H K]
    log_sum: jax.Array  # [B, G, R, T] log of each query's softmax denominator, float32


class Given(NamedTuple):
    """What has no gradient."""

    segments: jax.Array | None
    words: jax.Array | None  # of the dropout, see `dropout.kept`


def attend(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
    collectives: Collectives,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Softmax(q kᵀ / √K) v per head, causal, within segments. Heads H are a multiple of groups G (grouped-query attention).

    Returns [B T, H K] in q's dtype, the rows of the output projection; the softmax is in float32.
    """
    _, length, heads, width = q_BTHK.shape
    drops = dropout.rate > 0
    words = dropout.words(collectives.first_head(heads), heads) if drops else None
    given = Given(segments_BT, words)
    kernel = attention_kernel(
        collectives.platform, q_BTHK.dtype.name, width, length, packed=segments_BT is not None, dropout=drops
    )
    if kernel == "blocks":
        return blockwise(dropout.rate, q_BTHK, k_BTGK, v_BTGK, given)
    return by_kernel(kernel, dropout.rate, q_BTHK, k_BTGK, v_BTGK, vary(given, varying(q_BTHK)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_kernel(
    kernel: Kernel, rate: float, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, given: Given
) -> jax.Array:
    """Attention by one of an accelerator's kernels."""
    return _kernel_forward(kernel, rate, q_BTHK, k_BTGK, v_BTGK, given)[0]


def _kernel_forward(
    kernel: Kernel, rate: float, q: jax.Array, k: jax.Array, v: jax.Array, given: Given
) -> tuple[jax.Array, tuple[Kept, Given]]:
    if kernel == "cudnn":
        out, log_sum = cudnn_attention(q, k, v)
    elif kernel == "splash":
        out, log_sum = _splash().forward(q, k, v, given.segments)
    else:
        out, log_sum = _fused().forward(rate, q, k, v, given.segments, given.words)
    rows = out.reshape(q.shape[0] * q.shape[1], -1)
    rows, log_sum = (checkpoint_name(a, "attention") for a in (rows, log_sum))
    return rows, (Kept(q, k, v, rows, log_sum), given)


def _kernel_backward(
    kernel: Kernel, rate: float, kept: tuple[Kept, Given], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    (q, k, v, out, log_sum), given = kept
    out, cotangent = out.reshape(q.shape), cotangent.reshape(q.shape)
    if kernel == "cudnn":
        return *cudnn_attention_backward(q, k, v, out, log_sum, cotangent), None
    if kernel == "splash":
        return *_splash().backward(q, k, v, given.segments, out, log_sum, cotangent), None
    rows = jnp.sum((out * cotangent).astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    return *_fused().backward(rate, q, k, v, given.segments, given.words, log_sum, rows, cotangent), None


by_kernel.defvjp(_kernel_forward, _kernel_backward)


# Imported where they are used: Pallas for GPUs takes a fifth of JAX's own time to import.
def _fused() -> ModuleType:
    from meshtrain.model import fused

    return fused


def _splash() -> ModuleType:
    from meshtrain.model import splash

    return splash


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(rate: float, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, given: Given) -> jax.Array:
    """Blocks of queries against only the keys that they may see:

        block 0  ■           with n blocks (n+1)/2n of the scores of the full square are computed
        block 1  ■ ■
        block 2  ■ ■ ■

    Backward as in flash attention (Dao et al. 2022, appendix B.4): probabilities are not kept, under any remat policy, but made
    again from the scores and the log of their sum; the softmax needs only the row sums of out x its cotangent.
    """
    return _forward(rate, q_BTHK, k_BTGK, v_BTGK, given)[0]


def _forward(
    rate: float, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, given: Given
) -> tuple[jax.Array, tuple[Kept, Given]]:
    batch, length, heads, width = q_BTHK.shape
    groups = k_BTGK.shape[2]
    q = (q_BTHK * width**-0.5).reshape(batch, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = k_BTGK.transpose(0, 2, 1, 3), v_BTGK.transpose(0, 2, 1, 3)
    outs, sums = [], []
    for start, stop in _blocks(length):
        scores = _scores(start, q[..., start:stop, :], k[:, :, :stop], given)
        top = jnp.max(scores, axis=-1, keepdims=True)
        p = jnp.exp(scores - top)
        total = jnp.sum(p, axis=-1, keepdims=True)
        dropped = _drop(start, rate, p, given).astype(v.dtype)
        out = jnp.einsum("bgrqs,bgsk->bgrqk", dropped, v[:, :, :stop], preferred_element_type=jnp.float32) / total
        outs.append(out.astype(v.dtype))
        sums.append((top + jnp.log(total))[..., 0])
    out = jnp.concatenate(outs, axis=3).transpose(0, 3, 1, 2, 4).reshape(batch * length, heads * width)
    out, log_sum = (checkpoint_name(a, "attention") for a in (out, jnp.concatenate(sums, axis=3)))
    return out, (Kept(q, k, v, out, log_sum), given)


def _backward(
    rate: float, kept: tuple[Kept, Given], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    (q, k, v, out, log_sum), given = kept
    batch, groups, _, length, width = q.shape
    rows = jnp.sum((out * cotangent).astype(jnp.float32).reshape(batch, length, -1, width), axis=-1)  # [B, T, H]
    rows = rows.transpose(0, 2, 1).reshape(log_sum.shape)
    d_out = cotangent.reshape(batch, length, groups, -1, width).transpose(0, 2, 3, 1, 4)
    dq: list[jax.Array] = []
    dk = dv = jnp.zeros(())
    for start, stop in reversed(_blocks(length)):  # the last block sees all keys; the others add to what it leaves
        q_block, d_block = q[..., start:stop, :], d_out[..., start:stop, :]
        p = jnp.exp(_scores(start, q_block, k[:, :, :stop], given) - log_sum[..., start:stop, None])
        dp = jnp.einsum("bgrqk,bgsk->bgrqs", d_block, v[:, :, :stop], preferred_element_type=jnp.float32)
        ds = (p * (_drop(start, rate, dp, given) - rows[..., start:stop, None])).astype(q.dtype)
        dropped = _drop(start, rate, p, given).astype(v.dtype)
        dq.append(jnp.einsum("bgrqs,bgsk->bgrqk", ds, k[:, :, :stop]))
        more_k = jnp.einsum("bgrqs,bgrqk->bgsk", ds, q_block)
        more_v = jnp.einsum("bgrqs,bgrqk->bgsk", dropped, d_block)
        dk, dv = (
            (more_k, more_v) if stop == length else (dk.at[:, :, :stop].add(more_k), dv.at[:, :, :stop].add(more_v))
        )
    d_q = jnp.concatenate(dq[::-1], axis=3).transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, width)
    return d_q * width**-0.5, dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3), None


blockwise.defvjp(_forward, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    size = block_size(length)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _scores(start: int, q: jax.Array, k: jax.Array, given: Given) -> jax.Array:
    """Queries from `start` on, [B, G, R, Q, K], against the keys up to the last of them: float32 [B, G, R, Q, S]."""
    stop = k.shape[2]
    scores = jnp.einsum("bgrqk,bgsk->bgrqs", q, k, preferred_element_type=jnp.float32)
    visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
    if given.segments is not None:
        same = given.segments[:, start:stop, None] == given.segments[:, None, :stop]
        visible = visible & same[:, None, None]
    return jnp.where(visible, scores, MASKED)


def _drop(start: int, rate: float, p: jax.Array, given: Given) -> jax.Array:
    """Dropout on [B, G, R, Q, S] of queries from `start` on; linear, so it serves probabilities and their cotangents alike."""
    if given.words is None:
        return p
    by_head = p.reshape(p.shape[0], -1, *p.shape[3:])
    return drop(rate, given.words, by_head, start).reshape(p.shape)
