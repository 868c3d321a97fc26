"""Grouped products as kernels on GPUs, in Pallas for Triton: `grouped.multiply_blocks` and `grouped.weight_gradient`
side by side in place of a loop.

    multiply_blocks    a program is a tile of the result: of a block's rows and of the columns of its expert, whose
                       number it reads
    weight_gradient    a program is a tile of an expert's weight; it goes through the rows of that expert's
                       blocks, first to last

In `multiply_blocks`, programs that run side by side are tiles of a few rows and a few columns, here in groups of two
rows of tiles:

    0 2 4 │ ..      row by row the device would read all columns of an expert for every 128 tokens
    1 3 5 │

Nothing of the size of experts x rows meets memory, nor is anything summed by atomics: results are the same every time.

Why not JAX's own (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, 0.10 to 0.12): it runs on Hopper alone, on a GPU
with 132 multiprocessors, and unrolls a search through all experts in each program. It leaves unused rows unwritten, and
its kernel for the weight's gradient asks for a GPU while it is compiled.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from meshtrain.compat import struct_like
from meshtrain.model.grouped import first_blocks

# Bytes of a side of a result's tile, and of the steps that are summed over: with more, accumulators leave the
# registers. `multiply_blocks` takes tiles of twice as many columns: Mixtral's products reach 690 TFLOP/s so on an H100,
# and 530 to 590 in squares (`experiments/gpu`).
SIDE = 256
STEP = 128
GROUP = 8  # rows of tiles


# jit, since before 0.12 a kernel call that nothing reads stays in a program, as where remat keeps what it returned
@partial(jax.jit, static_argnames="transposed")
def multiply_blocks(
    rows: jax.Array,
    weight: jax.Array,
    experts: jax.Array,
    blocks: jax.Array,
    transposed: bool = False,
) -> jax.Array:
    """Returns what `grouped.multiply_blocks` does."""
    over, width = weight.shape[1:][::-1] if transposed else weight.shape[1:]
    height = _tile(SIDE, rows, len(rows) // len(experts))
    columns = _tile(2 * SIDE, rows, width)
    of_columns = (
        (len(weight), columns, over) if transposed else (len(weight), over, columns)
    )
    place = partial(_place, len(rows) // height, width // columns)
    return _call(
        partial(
            _product_kernel,
            transposed,
            place,
            len(rows) // len(experts) // height,
            _tile(STEP, rows, over),
        ),
        (len(rows) // height * (width // columns),),
        [
            pl.BlockSpec((height, over), lambda p: (place(p)[0], 0)),
            pl.BlockSpec(
                of_columns,
                lambda p: (0, place(p)[1], 0) if transposed else (0, 0, place(p)[1]),
            ),
            pl.BlockSpec(experts.shape, lambda p: (0,)),
            pl.BlockSpec((1,), lambda p: (0,)),
        ],
        pl.BlockSpec((height, columns), place),
        struct_like((len(rows), width), rows.dtype, rows),
    )(rows, weight, experts, blocks[None])


@jax.jit
def weight_gradient(
    rows: jax.Array,
    g_RN: jax.Array,
    experts: jax.Array,
    blocks: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """Returns what `grouped.weight_gradient` does."""
    firsts = first_blocks(experts, blocks, len(weight))
    step = _tile(STEP, rows, len(rows) // len(experts))
    (height, width) = weight.shape[1:]
    tall = _tile(SIDE, rows, height)
    wide = _tile(SIDE, rows, width)
    return _call(
        partial(_weight_kernel, step),
        (width // wide, height // tall, len(weight)),
        [
            pl.BlockSpec((len(rows), tall), lambda j, i, e: (0, i)),
            pl.BlockSpec((len(rows), wide), lambda j, i, e: (0, j)),
            pl.BlockSpec(firsts.shape, lambda j, i, e: (0,)),
        ],
        pl.BlockSpec((None, tall, wide), lambda j, i, e: (e, i, j)),
        struct_like(weight.shape, weight.dtype, rows),
    )(rows, g_RN, firsts * (len(rows) // len(experts) // step))


def _product_kernel(  # type: ignore[no-untyped-def]
    transposed,
    place,
    tiles,
    step,
    rows,
    weight,
    experts,
    blocks,
    out,
) -> None:
    block = jax.lax.div(place(pl.program_id(0))[0], jnp.int32(tiles))
    expert = experts[block]

    def add(k, sums):  # type: ignore[no-untyped-def]
        at = pl.ds(k * step, step)
        of_expert = weight[expert, :, at] if transposed else weight[expert, at, :]
        return sums + triton.dot(rows[:, at], of_expert, trans_b=transposed)

    # of a block that is not in use there is nothing to add: zeros are written
    steps = jnp.where(block < blocks[0], jnp.int32(rows.shape[1] // step), 0)
    out[...] = jax.lax.fori_loop(
        0, steps, add, jnp.zeros(out.shape, jnp.float32)
    ).astype(out.dtype)


def _weight_kernel(step, rows, cotangents, firsts, out) -> None:  # type: ignore[no-untyped-def]
    expert = pl.program_id(2)

    def add(i, sums):  # type: ignore[no-untyped-def]
        at = pl.ds(i * step, step)
        return sums + triton.dot(rows[at, :], cotangents[at, :], trans_a=True)

    sums = jax.lax.fori_loop(
        firsts[expert], firsts[expert + 1], add, jnp.zeros(out.shape, jnp.float32)
    )
    out[...] = sums.astype(out.dtype)


def _place(tall: int, wide: int, p: Any) -> tuple[Any, Any]:
    """Returns the row and column of program p's tile, of `tall` x `wide` tiles (Triton's own tutorial of matrix
    products, "L2 cache").
    """
    in_group = jax.lax.rem(p, jnp.int32(GROUP * wide))
    first = jax.lax.div(p, jnp.int32(GROUP * wide)) * GROUP
    rows = jnp.minimum(tall - first, GROUP)
    return first + jax.lax.rem(in_group, rows), jax.lax.div(in_group, rows)


def _tile(limit: int, rows: jax.Array, size: int) -> int:
    """The largest power of two that divides `size` and in the dtype of the rows has no more than `limit` bytes."""
    return math.gcd(size, limit // rows.dtype.itemsize)


def _call(
    kernel: partial,
    grid: tuple[int, ...],
    in_specs: list,
    out_spec: pl.BlockSpec,
    out_shape: Any,
) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        name=kernel.func.__name__.strip("_"),
    )
