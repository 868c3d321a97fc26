"""The grouped matrix product: rows times the weight of their expert, in as many FLOPs as one dense product of the rows.

    rows   a a a · | a · · · | c c c c | · · · ·     blocks of equal length, each of one expert, in the experts' order;
    expert    0         0         2         -        slots that are empty (·) are zero rows; here 3 blocks are in use

Why not `jax.lax.ragged_dot`: on CPUs and GPUs XLA makes a dense product of all experts of it (jax 0.10), so experts times the FLOPs, and on
GPUs experts times the rows in memory.

The backward is two loops or kernels, of the rows' gradient and of the weights', since a zero-bubble schedule puts them in different halves.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.compat import vary, varying
from meshtrain.model.layers import keeping_arguments

GroupedResiduals = tuple[jax.Array | None, jax.Array, jax.Array, jax.Array]


def grouped(
    rows_RK: jax.Array, weight_EKN: jax.Array, expert_of_block: jax.Array, blocks: jax.Array, platform: str = "cpu"
) -> jax.Array:
    """Returns [R, N] in the rows' dtype, of sums in float32: each block of rows times the weight of its expert.

    Rows are blocks of equal length, R / B, each of one expert: int32 [B], which does not fall. Only the first `blocks` (int32 scalar) are
    in use: what the others give is zero, and their rows and cotangents are not read. An empty slot within a block in use must be a zero row.
    The weight's gradient is summed in float32 in the blocks' order, and zero for an expert without blocks.

    In a `jax.shard_map` all of them may differ between devices, the number of blocks included. On a `platform` (of `Collectives`) cpu or tpu
    it is a loop over the blocks in use; on gpu kernels, where the length of a block, K and N are multiples of 16, else the loop.
    """
    axes = frozenset[str]().union(*map(varying, (rows_RK, weight_EKN, expert_of_block, blocks)))
    return _grouped(platform, *vary((rows_RK, weight_EKN, expert_of_block, blocks), axes))


def by_rows(
    function: Callable[..., jax.Array], blocks: jax.Array, length: int, platform: str, *arrays: jax.Array
) -> jax.Array:
    """Returns function(*arrays), [R, F] of arrays [R, ...], where each row of the result is of a row of each; its residuals are the arrays.

    Where `grouped` is a loop, only of the `blocks` of `length` rows that are in use: there is room for many more than come.
    """
    if platform == "gpu":
        return keeping_arguments(function)(*arrays)
    axes = frozenset[str]().union(*map(varying, (blocks, *arrays)))
    return _by_rows(function, length, *vary((blocks, *arrays), axes))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_rows(function: Callable[..., jax.Array], length: int, blocks: jax.Array, *arrays: jax.Array) -> jax.Array:
    return _over_blocks(function, length, blocks, *arrays)


def _rows_backward(function: Callable[..., jax.Array], length: int, residuals: tuple, g: jax.Array) -> tuple:
    def cotangents(g: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(function, *arrays)[1](g)

    blocks, *arrays = residuals
    return None, *_over_blocks(cotangents, length, blocks, g, *arrays)


_by_rows.defvjp(
    lambda function, length, *given: (_over_blocks(function, length, *given), given),
    _rows_backward,
)


def _over_blocks(function: Callable[..., Any], length: int, blocks: jax.Array, *arrays: jax.Array) -> Any:
    """What a function of rows makes of the blocks in use; zeros of the others."""

    def block(i: jax.Array, out: Any) -> Any:
        of_block = function(*(_block(a, i, length) for a in arrays))
        return jax.tree.map(lambda o, b: lax.dynamic_update_slice_in_dim(o, b, i * length, 0), out, of_block)

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *arrays))
    return lax.fori_loop(0, blocks, block, vary(empty, varying(arrays[0])))


def implementation(platform: str, rows: jax.Array, weight: jax.Array, experts: jax.Array) -> Any:
    """The module whose `by_blocks` and `weight_gradient` are run; that of the kernels takes Pallas, which is slow to import."""
    in_tiles = all(size % 16 == 0 for size in (len(rows) // len(experts), *weight.shape[1:]))
    return import_module("meshtrain.model.grouped_kernels" if platform == "gpu" and in_tiles else __name__)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(platform: str, rows: jax.Array, weight: jax.Array, experts: jax.Array, blocks: jax.Array) -> jax.Array:
    return implementation(platform, rows, weight, experts).by_blocks(rows, weight, experts, blocks)


def _forward(
    platform: str, rows: CustomVJPPrimal, weight: CustomVJPPrimal, experts: CustomVJPPrimal, blocks: CustomVJPPrimal
) -> tuple[jax.Array, GroupedResiduals]:
    """Of a frozen weight there is no gradient to come, so the rows are not kept for one."""
    residual = rows.value if weight.perturbed else None
    out = _grouped(platform, rows.value, weight.value, experts.value, blocks.value)
    return out, (residual, weight.value, experts.value, blocks.value)


def _backward(
    platform: str, residuals: GroupedResiduals, g_RN: jax.Array
) -> tuple[jax.Array, jax.Array | None, None, None]:
    rows, weight, experts, blocks = residuals
    run = implementation(platform, g_RN, weight, experts)
    to_rows = run.by_blocks(g_RN, weight, experts, blocks, transposed=True)
    return to_rows, None if rows is None else run.weight_gradient(rows, g_RN, experts, blocks, weight), None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def by_blocks(
    rows: jax.Array, weight: jax.Array, experts: jax.Array, blocks: jax.Array, transposed: bool = False
) -> jax.Array:
    """Returns each block of rows [R, K] times the weight [E, K, N] of its expert; `transposed`, rows [R, N] times its transpose: [R, K]."""
    length = len(rows) // len(experts)
    width = weight.shape[1 if transposed else 2]
    over = (((1,), (1 if transposed else 0,)), ((), ()))

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        of_expert = lax.dynamic_index_in_dim(weight, experts[i], keepdims=False)
        product = lax.dot_general(_block(rows, i, length), of_expert, over, preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), i * length, 0)

    return lax.fori_loop(0, blocks, block, vary(jnp.zeros((len(rows), width), rows.dtype), varying(rows)))


def weight_gradient(
    rows: jax.Array, g_RN: jax.Array, experts: jax.Array, blocks: jax.Array, weight: jax.Array
) -> jax.Array:
    """Returns, in the shape and dtype of the weight, the sum over an expert's blocks of rowsᵀ times their cotangent; zero where it has none."""
    length = len(rows) // len(experts)

    def block(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, gradient = carry
        over_rows = (((0,), (0,)), ((), ()))
        product = lax.dot_general(_block(rows, i, length), _block(g_RN, i, length), over_rows, preferred_element_type=jnp.float32)  # fmt: skip
        sums = jnp.where(experts[i] == experts[jnp.maximum(i - 1, 0)], sums, 0) + product
        return sums, lax.dynamic_update_index_in_dim(gradient, sums.astype(gradient.dtype), experts[i], 0)

    zeros = vary((jnp.zeros(weight.shape[1:], jnp.float32), jnp.zeros(weight.shape, weight.dtype)), varying(rows))
    return lax.fori_loop(0, blocks, block, zeros)[1]


def _block(rows: jax.Array, i: jax.Array, length: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(rows, i * length, length)
