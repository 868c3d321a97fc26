"""Causal attention: cuDNN's flash attention on GPUs, a blockwise one elsewhere that never touches the masked half of the scores."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshtrain.model.collectives import NO_DROPOUT, Collectives, Dropout

BLOCK = 64  # queries at a time off the GPU: block i sees only its first (i+1) blocks of keys
MASKED = -1e30

Arrays = tuple[jax.Array, ...]


def attend(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
    collectives: Collectives,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Softmax(q kᵀ / √K) v per head, causal, within segments. Heads H are a multiple of groups G (grouped-query attention).

    Returns [B, T, H, K] in q's dtype; the softmax is in float32.
    """
    if collectives.platform in ("gpu", "cuda") and dropout.rate == 0.0:
        fast = q_BTHK.dtype in (jnp.bfloat16, jnp.float16) and q_BTHK.shape[-1] % 8 == 0 and segments_BT is None
        mask = None if segments_BT is None else (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
        implementation: Literal["cudnn"] | None = "cudnn" if fast else None
        return jax.nn.dot_product_attention(
            q_BTHK, k_BTGK, v_BTGK, mask=mask, is_causal=True, implementation=implementation
        )
    return blockwise_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT, collectives, dropout)


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
    collectives: Collectives,
    dropout: Dropout,
) -> jax.Array:
    """Query blocks of BLOCK against only the keys that they may see:

        block 0  ■           with n blocks (n+1)/2n of the scores of the full square are computed
        block 1  ■ ■
        block 2  ■ ■ ■

    As in flash attention (Dao et al. 2022) the probabilities are not kept, under any remat policy: the backward pass computes them
    again.
    """
    batch, length, heads, width = q_BTHK.shape
    groups = k_BTGK.shape[2]
    q = (q_BTHK * width**-0.5).reshape(batch, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = k_BTGK.transpose(0, 2, 1, 3), v_BTGK.transpose(0, 2, 1, 3)
    first = collectives.first_head(heads) if dropout.rate else None
    outputs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        block = _recomputed(partial(_block, start, dropout.rate))
        given = (segments_BT, dropout.key, dropout.rows, first)
        outputs.append(block((q[:, :, :, start:stop], k[:, :, :stop], v[:, :, :stop]), given))
    out = jnp.concatenate(outputs, axis=3)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def _block(start: int, rate: float, qkv: Arrays, given: tuple[Any, ...]) -> jax.Array:
    """Queries from `start` on, [B, G, H/G, Q, K], against the keys and values [B, G, S, K] up to the last of them."""
    q, k, v = qkv
    segments, key, rows, first_head = given
    stop = k.shape[2]
    scores = jnp.einsum("bghqk,bgsk->bghqs", q, k, preferred_element_type=jnp.float32)
    visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
    if segments is not None:
        visible = visible & (segments[:, start:stop, None] == segments[:, None, :stop])[:, None, None]
    p = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    if rate:
        by_head = p.reshape(p.shape[0], -1, *p.shape[3:])
        p = Dropout(rate, key, rows).at(start).attention(by_head, first_head).reshape(p.shape)
    return jnp.einsum("bghqs,bgsk->bghqk", p.astype(v.dtype), v)


def _recomputed(function: Callable[[Arrays, Any], jax.Array]) -> Callable[[Arrays, Any], jax.Array]:
    """`function(arrays, given)` with nothing but its arguments kept for the backward pass, and no gradient of `given`.

    jax.checkpoint would not do: a policy of a checkpoint around it reaches inside, and keeps what this must not.
    """
    run = jax.custom_vjp(function)

    def backward(kept: tuple[Arrays, Any], cotangent: jax.Array) -> tuple[Arrays, None]:
        arrays, given = kept
        return jax.vjp(lambda arrays: function(arrays, given), arrays)[1](cotangent)[0], None

    run.defvjp(lambda arrays, given: (function(arrays, given), (arrays, given)), backward)
    return run
