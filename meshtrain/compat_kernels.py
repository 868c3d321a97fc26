"""Parts of JAX that are private or differ between its versions, for kernels of GPUs and TPUs and for pairs: `compat`
for runs that use them.
"""

import contextlib
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.extend.core import Primitive
from jax.interpreters import mlir


def describe_gpu(version: tuple[int, int, int]) -> None:
    """Has JAX take cuDNN to be of a version, instead of asking the installed one before it writes a call to it.

    That is all that the compiler needs of cuDNN, which with its dependencies takes 2.1 GB. Before
    JAX writes a Triton kernel, it asks for the GPU's compute capability; before 0.12 it took Hopper's for granted.
    """
    major, minor, patch = version
    cudnn.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    with contextlib.suppress(ImportError):  # before 0.12
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
        hopper = gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H100)
        gpu_info.get_gpu_info = lambda: hopper


Qkv = tuple[jax.Array, jax.Array, jax.Array]


def cudnn_scoring(window: int, scale: float, causal: bool) -> dict[str, Any]:
    """Returns the rules of a `model.attention.Scoring` under cuDNN's names."""
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    return dict(scale=scale, mask_type=mask, sliding_window_length=window or None)


def cudnn_attention(heads: Qkv, scoring: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """cuDNN's attention of [B, T, H, K] and [B, T, G, K], causal or both ways: output [B, T, H, K] and float32 log of
    sums [B, H, T].
    """
    return cudnn.dot_product_attention(*heads, **scoring, return_residual=True)


def cudnn_attention_backward(
    heads: Qkv,
    out: jax.Array,
    log_sum: jax.Array,
    d_out: jax.Array,
    scoring: dict[str, Any],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `cudnn_attention`'s q, k and v, which JAX offers only through a rule that keeps its own copy of the
    output.
    """
    none = jnp.zeros(0, out.dtype)
    params = scoring | dict(
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        layout=cudnn.AttentionLayout.BTNH.value,
    )
    # From 0.12 on
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:
        params["score_mod"] = None
    call = cudnn._dot_product_attention_bwd_p_wrapper
    return tuple(call.bind(*heads, *[none] * 7, log_sum, out, d_out, **params))


def splash_backward(
    kernel: Any,
    segments: Any,
    log_sum: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, ...]:
    """Cotangents of q, k and v of a splash attention kernel that returned `out` and `log_sum`; it offers only a rule
    that keeps both.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )

    names = (
        "save_residuals",
        "mask_value",
        "is_mqa",
        "block_sizes",
        "residual_checkpoint_name",
        "mask_function",
        "attn_logits_soft_cap",
        "interpret",
    )
    kept = (
        q,
        k,
        v,
        segments,
        None,
        out,
        log_sum,
        kernel.dq_mask_info,
        kernel.dkv_mask_info,
    )
    rule: Any = splash._splash_attention_bwd
    return rule(*[kernel.kwargs[name] for name in names], kept, d_out)[3:6]


def _barrier() -> Primitive:
    primitive = Primitive("tied")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *values: values)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda *values: jax.lax.optimization_barrier(values))
    )
    return primitive


_BARRIER = _barrier()


def tied(*values: jax.Array) -> list[jax.Array]:
    """Returns the values, none before all are there.

    A barrier of JAX's own would give each a type that varies over the axes of all.
    """
    return _BARRIER.bind(*values)
