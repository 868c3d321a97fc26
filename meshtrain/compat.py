"""What differs between JAX 0.10, 0.11 and 0.12 or is private to it, and nowhere else."""

import contextlib
import copy
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

Tree = Any


def varying(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The manual mesh axes over which the value of `x` differs between devices (its VMA type)."""
    kind: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else kind.vma)


def struct_like(shape: tuple[int, ...], dtype: Any, x: jax.Array) -> jax.ShapeDtypeStruct:
    """A shape and dtype whose value varies over the same manual mesh axes as that of `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def vary(tree: Tree, axes: Iterable[str]) -> Tree:
    """`tree` with every leaf's type varying over `axes`; no data moves. The transpose is a psum over the axes that were added."""
    wanted = tuple(axes)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in wanted if a not in varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def residuals(vjp: Callable) -> list[Any]:
    """What a `jax.vjp` function keeps of the forward pass, less the function's own arguments."""
    return vjp.opaque_residuals  # type: ignore[attr-defined]


def with_residuals(vjp: Callable, kept: list[Any]) -> Callable:
    """The same vjp function over other residuals of the same shapes. The forward pass that `vjp` itself traced is then dead code."""
    other = copy.copy(vjp)
    other.opaque_residuals = kept  # type: ignore[attr-defined]
    return other


def bind(equation: JaxprEqn, values: list[Any]) -> list[Any]:
    """One equation of a jaxpr on other values, in the named scopes that it was made in."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager, scopes_of(equation):
        outs = equation.primitive.bind(*functions, *values, **params)
    return list(outs) if equation.primitive.multiple_results else [outs]


def scopes_of(equation: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """The named scopes and transformations that an equation stands in, for what is traced within."""
    names = str(equation.source_info.name_stack)
    return jax.named_scope(names) if names else contextlib.nullcontext()


@contextlib.contextmanager
def lines_as_they_are() -> Iterator[None]:
    """What is compiled in here tells the lines of today's source: else JAX may give a program that it kept from before they moved."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def describe_gpu(cudnn: tuple[int, int, int]) -> None:
    """Has JAX take cuDNN to be of a version, instead of asking the installed one before it writes a call to it.

    That is all that the compiler needs of cuDNN, which with what it depends on takes 2.1 GB. Of the GPU, JAX wants to know one thing
    before it writes a Triton kernel: what Hopper can, which it took for granted before 0.12.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    major, minor, patch = cudnn
    fused_attention_stablehlo.check_cudnn_version = lambda: 10000 * major + 100 * minor + patch
    with contextlib.suppress(ImportError):  # before 0.12
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
        hopper = gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H100)
        gpu_info.get_gpu_info = lambda: hopper


def joined_processes() -> int:
    """The processes that jax.distributed was told of, 1 without it; unlike jax.process_count it starts no devices."""
    from jax._src.distributed import global_state

    return global_state.num_processes if jax.distributed.is_initialized() else 1


def keep_compiled() -> None:
    """Has every process write what it compiles into the persistent compilation cache where each needs an entry of its own.

    JAX lets the first process write for all. On CPU that is not enough, since the key of a program holds the process it is for.
    """
    from jax._src import compiler

    if jax.default_backend() == "cpu":
        # All that this module asks of it: who writes, and (no client) whether programs are sent to other processes.
        alone = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
        compiler.distributed = alone  # type: ignore[assignment]


def meet(name: str, seconds: float) -> None:
    """Waits for all processes of the run, without their devices: collectives of a CPU bear 30 s of waiting and no more."""
    from jax._src.distributed import global_state

    if global_state.client is not None:
        global_state.client.wait_at_barrier(name, timeout_in_ms=int(1000 * seconds))


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, scale: float, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's attention of [B, T, H, K] and [B, T, G, K], causal or both ways: output [B, T, H, K] and float32 log of sums [B, H, T].

    With a `window` a query sees no more than so many positions, its own and those before it. `scale` is of the scores.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        sliding_window_length=window or None,
        return_residual=True,
    )


def cudnn_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_sum: jax.Array,
    d_out: jax.Array,
    window: int,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `cudnn_attention`'s q, k and v, which JAX offers only through a rule that keeps its own copy of the output."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    none, mask = jnp.zeros(0, q.dtype), cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    params = dict(
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(False, False), mask_type=mask,
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=window or None,
    )  # fmt: skip
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:  # from 0.12 on
        params["score_mod"] = None
    call = cudnn._dot_product_attention_bwd_p_wrapper
    return tuple(call.bind(q, k, v, *[none] * 7, log_sum, out, d_out, **params))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """What is called in here has no types of manual mesh axes: for kernels that declare none. The caller types what comes out."""
    from jax._src import config

    with config._check_vma(False):
        yield


def splash_backward(
    kernel: Any, segments: Any, log_sum: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Cotangents of q, k and v of a splash attention kernel that returned `out` and `log_sum`; it offers only a rule that keeps both."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    names = (
        "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function", "attn_logits_soft_cap",
        "interpret",
    )  # fmt: skip
    kept = (q, k, v, segments, None, out, log_sum, kernel.dq_mask_info, kernel.dkv_mask_info)
    rule: Any = splash._splash_attention_bwd
    return rule(*[kernel.kwargs[name] for name in names], kept, d_out)[3:6]
