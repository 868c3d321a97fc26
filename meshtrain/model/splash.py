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
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    MultiHeadMask,
)

from meshtrain.compat import unchecked, vary, varying
from meshtrain.compat_kernels import splash_backward
from meshtrain.model.attention import Heads, MaskArrays, Outputs, Scoring
from meshtrain.model.kernels import SPLASH_BLOCKS


def forward(
    scoring: Scoring, heads: Heads, masks: MaskArrays
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, H, K] and float32 log of sums [B, H, T]."""
    q, k, v = heads
    kernel = _kernel(scoring, q)
    axes = varying(q)

    def run(ids: SegmentIds | None, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, (log_sum,) = kernel(*given, ids)
        return out, log_sum

    with unchecked():
        out, log_sum = jax.vmap(run)(_ids(masks), *_swap_heads(q * scoring.scale, k, v))
    return vary(_swap_heads(out)[0], axes), vary(log_sum, axes)


def backward(
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    outputs: Outputs,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the cotangents of `forward`'s queries, keys and values."""
    q, k, v = heads
    kernel = _kernel(scoring, q)
    axes = varying(q)

    def run(
        ids: SegmentIds | None, log_sum: jax.Array, *given: jax.Array
    ) -> tuple[jax.Array, ...]:
        return splash_backward(kernel, ids, log_sum, *given)

    with unchecked():
        arrays = _swap_heads(q * scoring.scale, k, v, outputs.out, d_out)
        cotangents = jax.vmap(run)(_ids(masks), outputs.log_sum, *arrays)
    d_q, d_k, d_v = vary(_swap_heads(*cotangents), axes)
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


def _ids(masks: MaskArrays) -> SegmentIds | None:
    if masks.segments is None or masks.of_keys is None:
        return None
    return SegmentIds(masks.segments, masks.of_keys)


def _mask(scoring: Scoring, square: tuple[int, int]) -> Any:
    """Returns the mask of a head's scores, whose shape is `square`."""
    if not scoring.causal:
        return FullMask(square)
    if scoring.window:
        return LocalMask(square, (scoring.window - 1, 0), 0)
    return CausalMask(square)


def _swap_heads(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays [B, T, H, K] as [B, H, T, K], and the other way round."""
    return tuple(a.transpose(0, 2, 1, 3) for a in arrays)
