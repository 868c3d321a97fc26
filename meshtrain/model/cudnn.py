"""Attention on GPUs by cuDNN's flash attention, for what it takes (see `model.kernels`)."""

from typing import Any

import jax

from meshtrain.compat_kernels import (
    cudnn_attention,
    cudnn_attention_backward,
    cudnn_scoring,
)
from meshtrain.model.attention import Heads, MaskArrays, Outputs, Scoring


def forward(
    scoring: Scoring, heads: Heads, masks: MaskArrays
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, H, K] and float32 log of sums [B, H, T]."""
    return cudnn_attention(heads, _rules(scoring))


def backward(
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    outputs: Outputs,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the cotangents of `forward`'s queries, keys and values."""
    return cudnn_attention_backward(heads, *outputs[:2], d_out, _rules(scoring))


def _rules(scoring: Scoring) -> dict[str, Any]:
    return cudnn_scoring(scoring.window, scoring.scale, scoring.causal)
