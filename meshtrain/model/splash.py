"""Attention on TPUs: splash attention, the flash attention in Pallas that comes with JAX
(`jax.experimental.pallas.ops.tpu`).

It takes documents packed in a sequence and heads that share keys. Its forward and backward are called one by one: their
own custom_vjp would keep the output once more than the model does (see `model.attention`).
"""

from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    LocalMask,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

from meshtrain.compat import unchecked, vary, varying
from meshtrain.compat_kernels import splash_backward
from meshtrain.model.attention import Scoring
from meshtrain.model.kernels import SPLASH_BLOCKS


def forward(
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    key_segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns, for queries [B, T, H, K] and keys, values [B, T, G, K], the output [B, T, H, K] and float32 log of sums
    [B, H, T].
    """
    kernel, axes = _kernel(scoring, q), varying(q)

    def one(ids: SegmentIds | None, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, (log_sum,) = kernel(*given, ids)
        return out, log_sum

    with unchecked():
        out, log_sum = jax.vmap(one)(
            _ids(segments, key_segments), *_by_head(q * scoring.scale, k, v)
        )
    return vary(_by_head(out)[0], axes), vary(log_sum, axes)


def backward(
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    key_segments: jax.Array | None,
    out: jax.Array,
    log_sum: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `forward`'s q, k and v."""
    kernel, axes = _kernel(scoring, q), varying(q)

    def one(ids: SegmentIds | None, log_sum: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        return splash_backward(kernel, ids, log_sum, *given)

    with unchecked():
        cotangents = jax.vmap(one)(
            _ids(segments, key_segments), log_sum, *_by_head(q * scoring.scale, k, v, out, d_out)
        )
    d_q, d_k, d_v = vary(_by_head(*cotangents), axes)
    return d_q * scoring.scale, d_k, d_v


def _kernel(scoring: Scoring, q: jax.Array) -> Any:
    _, length, heads, _ = q.shape
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    sizes = BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = MultiHeadMask([_mask(scoring, (length, length))] * heads)
    return make_splash_mha(
        mask,
        block_sizes=sizes,
        save_residuals=True,
        attn_logits_soft_cap=scoring.cap or None,
        head_shards=1,
        q_seq_shards=1,
    )


def _ids(segments: jax.Array | None, key_segments: jax.Array | None) -> SegmentIds | None:
    return None if segments is None or key_segments is None else SegmentIds(segments, key_segments)


def _mask(scoring: Scoring, square: tuple[int, int]) -> Any:
    """Returns the mask of a head's scores, whose shape is `square`."""
    if not scoring.causal:
        return FullMask(square)
    return LocalMask(square, (scoring.window - 1, 0), 0) if scoring.window else CausalMask(square)


def _by_head(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, H, K] to [B, H, T, K] and back."""
    return tuple(a.transpose(0, 2, 1, 3) for a in arrays)
