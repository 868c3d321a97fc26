"""The grouped matrix product: rows times the weight of their expert, in as many FLOPs as one dense product of the rows.

    rows   a a a · | a · · · | c c c c | · · · ·     blocks of equal length, each of one expert, in the experts' order;
    expert    0         0         2         -        slots that are empty (·) are zero rows; here 3 blocks are in use

Why not `jax.lax.ragged_dot`: on CPUs and GPUs XLA turns it into a dense product of all experts (jax 0.10). That takes
experts times the FLOPs, and on GPUs experts times the rows in memory.

The backward is two loops or kernels, of the rows' gradient and of the weights', since a zero-bubble schedule puts them
in different halves.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.compat import vary, varying

Matrices = tuple[jax.Array, ...]
GroupedResiduals = tuple[jax.Array | None, Matrices, jax.Array, jax.Array]


def grouped(
    rows_RK: jax.Array,
    weight_EKN: jax.Array | Matrices,
    expert_of_block: jax.Array,
    blocks: jax.Array,
    platform: str = "cpu",
) -> jax.Array:
    """Returns [R, N] in the rows' dtype, of sums in float32: each block of rows times the weight of its expert.

    Several weights stand beside each other in one product, so that there is one gradient of the rows, and not several
    to be added up.

    Rows are blocks of equal length, R / B, each of one expert: int32 [B], which does not fall. Only the first `blocks`
    (int32 scalar) are
    in use: what the others give is zero, and their rows and cotangents are not read. An empty slot within a block in
    use must be a zero row. The weight's gradient is summed in float32 in the blocks' order, and zero for an expert
    without blocks.

    In a `jax.shard_map` all of them may differ between devices, the number of blocks included. On a `platform` (of
    `Collectives`) cpu or tpu it is a loop over the blocks in use; on gpu kernels, where the length of a block, K and N
    are multiples of 16, else the loop.
    """
    weights = weight_EKN if isinstance(weight_EKN, tuple) else (weight_EKN,)
    axes = frozenset[str]().union(
        *map(varying, (rows_RK, *weights, expert_of_block, blocks))
    )
    return _grouped(platform, *vary((rows_RK, weights, expert_of_block, blocks), axes))


def implementation(
    platform: str, rows: jax.Array, weight: jax.Array, experts: jax.Array
) -> Any:
    """Returns the module whose `multiply_blocks` and `weight_gradient` are run.

    The kernels' module takes Pallas, which is slow to import.
    """
    in_tiles = all(
        size % 16 == 0 for size in (len(rows) // len(experts), *weight.shape[1:])
    )
    return import_module(
        "meshtrain.model.grouped_kernels"
        if platform == "gpu" and in_tiles
        else __name__
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    platform: str,
    rows: jax.Array,
    weights: Matrices,
    experts: jax.Array,
    blocks: jax.Array,
) -> jax.Array:
    weight = jnp.concatenate(weights, 2)
    return implementation(platform, rows, weight, experts).multiply_blocks(
        rows, weight, experts, blocks
    )


def _forward(
    platform: str,
    rows: CustomVJPPrimal,
    weights: tuple[CustomVJPPrimal, ...],
    experts: CustomVJPPrimal,
    blocks: CustomVJPPrimal,
) -> tuple[jax.Array, GroupedResiduals]:
    """Keeps no rows for the gradient of a frozen weight, since it has none."""
    residual = rows.value if any(w.perturbed for w in weights) else None
    kept = tuple(w.value for w in weights), experts.value, blocks.value
    return _grouped(platform, rows.value, *kept), (residual, *kept)


def _backward(
    platform: str, residuals: GroupedResiduals, g_RN: jax.Array
) -> tuple[jax.Array, Any, None, None]:
    rows, weights, experts, blocks = residuals
    weight = jnp.concatenate(weights, 2)
    run = implementation(platform, g_RN, weight, experts)
    to_rows = run.multiply_blocks(g_RN, weight, experts, blocks, transposed=True)
    if rows is None:
        return to_rows, None, None, None
    to_weights = run.weight_gradient(rows, g_RN, experts, blocks, weight)
    ends = np.cumsum([w.shape[2] for w in weights])[:-1]
    return to_rows, tuple(jnp.split(to_weights, ends, 2)), None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def multiply_blocks(
    rows: jax.Array,
    weight: jax.Array,
    experts: jax.Array,
    blocks: jax.Array,
    transposed: bool = False,
) -> jax.Array:
    """Returns each block of rows [R, K] times the weight [E, K, N] of its expert; `transposed`, rows [R, N] times its
    transpose: [R, K].
    """
    length = len(rows) // len(experts)

    def block(own: jax.Array, i: jax.Array) -> jax.Array:
        return dot(block_of(rows, i, length), own, 1, 1 if transposed else 0).astype(
            rows.dtype
        )

    return map_blocks(block, weight, experts, blocks)


def weight_gradient(
    rows: jax.Array,
    g_RN: jax.Array,
    experts: jax.Array,
    blocks: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """Returns, in the shape and dtype of the weight, the sum over an expert's blocks of rowsᵀ times their cotangent;
    zero where it has none.
    """
    length = len(rows) // len(experts)

    def block(i: jax.Array) -> jax.Array:
        return dot(block_of(rows, i, length), block_of(g_RN, i, length), 0, 0)

    return sums_by_expert(block, weight, experts, blocks)


def map_blocks(
    function: Callable[[Any, jax.Array], Any],
    weights: Any,
    experts: jax.Array,
    blocks: jax.Array,
) -> Any:
    """Returns what `function` makes of the weights of an expert and of each of its blocks in use, one after another,
    and zeros behind them.
    """

    def run_expert(out: Any, its: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, None]:
        own, first, behind = its

        def block(i: jax.Array, out: Any) -> Any:
            return jax.tree.map(
                lambda o, b: lax.dynamic_update_slice_in_dim(o, b, i * len(b), 0),
                out,
                function(own, i),
            )

        return lax.fori_loop(first, behind, block, out), None

    of_block = jax.eval_shape(function, jax.tree.map(lambda w: w[0], weights), blocks)
    # not a constant, which loops would share and each copy
    zero = jnp.minimum(blocks, 0)
    empty = jax.tree.map(
        lambda b: jnp.full((len(experts) * b.shape[0], *b.shape[1:]), zero, b.dtype),
        of_block,
    )
    ends = first_blocks(experts, blocks, len(jax.tree.leaves(weights)[0]))
    return lax.scan(run_expert, empty, (weights, ends[:-1], ends[1:]))[0]


def sums_by_expert(
    function: Callable[[jax.Array], Any],
    weights: Any,
    experts: jax.Array,
    blocks: jax.Array,
) -> Any:
    """Returns the sum over each expert's blocks of what `function` makes of them in float32, in the shapes and dtypes
    of the weights.
    """

    def run_expert(_: None, ends: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        empty = jax.tree.map(lambda w: jnp.zeros(w.shape[1:], jnp.float32), weights)
        sums = lax.fori_loop(
            *ends,
            lambda i, sums: jax.tree.map(jnp.add, sums, function(i)),
            vary(empty, varying(experts)),
        )
        return None, jax.tree.map(lambda w, total: total.astype(w.dtype), weights, sums)

    ends = first_blocks(experts, blocks, len(jax.tree.leaves(weights)[0]))
    return lax.scan(run_expert, None, (ends[:-1], ends[1:]))[1]


def first_blocks(experts: jax.Array, blocks: jax.Array, count: int) -> jax.Array:
    """Returns the first block of each of `count` experts, int32 [count + 1]: the last is the one behind all that are in
    use.
    """
    in_use = jnp.where(jnp.arange(len(experts)) < blocks, experts, count)
    return jnp.searchsorted(in_use, jnp.arange(count + 1), method="compare_all").astype(
        jnp.int32
    )


def dot(a: jax.Array, b: jax.Array, summed_of_a: int, summed_of_b: int) -> jax.Array:
    """Returns the product of two matrices in float32, summed over a dimension of each."""
    over = (((summed_of_a,), (summed_of_b,)), ((), ()))
    return lax.dot_general(a, b, over, preferred_element_type=jnp.float32)


def block_of(rows: jax.Array, i: jax.Array, length: int) -> jax.Array:
    """Returns the rows of block `i`."""
    return lax.dynamic_slice_in_dim(rows, i * length, length)
