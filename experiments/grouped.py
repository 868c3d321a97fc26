"""The grouped product beside its ideal, one dense product of as many rows, and beside `jax.lax.ragged_dot`: seconds on this machine.

    python -m experiments.grouped                            4096 rows, K 256, N 512, 8 and 16 experts, blocks of 128
    python -m experiments.grouped --rows 8192 --dtype bfloat16

Rows fall to the experts unevenly, in whole blocks that are all in use. A time is the least of several, after one that compiles. FLOPs are
those of the dense product, forward and backward; bytes read and written are those of arguments and results, each once, and beside them
are the temporaries that the compiler allocates for the backward.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.model.grouped import grouped


def seconds(run: Callable, *args: Any, repeats: int = 15) -> float:
    jax.block_until_ready(run(*args))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return min(taken)


def both(product: Callable) -> tuple[Any, Any]:
    """The product, and its two gradients alone."""

    def backward(rows: jax.Array, weight: jax.Array, cotangent: jax.Array, *others: jax.Array) -> Any:
        return jax.vjp(lambda rows, weight: product(rows, weight, *others), rows, weight)[1](cotangent)

    return jax.jit(product), jax.jit(backward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--k", type=int, default=256)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    blocks = asked.rows // asked.block

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), asked.dtype)

    rows, cotangent = numbers(asked.rows, asked.k), numbers(asked.rows, asked.n)
    print(
        f"{asked.rows} rows, K {asked.k}, N {asked.n}, blocks of {asked.block}, {asked.dtype}, {jax.default_backend()}"
    )
    print(
        f"{'':22}{'forward':>10}{'x ideal':>9}{'backward':>11}{'x ideal':>9}{'GFLOP':>8}{'GFLOP/s':>9}{'MB':>8}{'temp MB':>9}"
    )
    flops = 2 * asked.rows * asked.k * asked.n
    ideal: list[float] = []

    def row(name: str, product: Callable, weight: jax.Array, *others: jax.Array) -> None:
        forward, backward = both(product)
        taken = seconds(forward, rows, weight, *others), seconds(backward, rows, weight, cotangent, *others)
        ideal[:] = ideal or taken
        ratios = [t / i for t, i in zip(taken, ideal, strict=True)]
        read_and_written = 3 * (rows.nbytes + weight.nbytes) + 2 * cotangent.nbytes
        memory = backward.lower(rows, weight, cotangent, *others).compile().memory_analysis()
        print(
            f"{name:22}{1e3 * taken[0]:8.2f}ms{ratios[0]:9.2f}{1e3 * taken[1]:9.2f}ms{ratios[1]:9.2f}"
            f"{3 * flops / 1e9:8.2f}{3 * flops / sum(taken) / 1e9:9.1f}{read_and_written / 1e6:8.1f}{memory.temp_size_in_bytes / 1e6:9.1f}"
        )

    row("dense", lambda rows, weight: rows @ weight, numbers(asked.k, asked.n))
    for experts in asked.experts:
        weight = numbers(experts, asked.k, asked.n)
        of_block = jnp.asarray(np.sort(random.choice(experts, blocks, p=random.dirichlet(np.ones(experts)))), jnp.int32)
        row(f"grouped, {experts} experts", grouped, weight, of_block, jnp.int32(blocks))
        sizes = jnp.bincount(of_block, length=experts) * asked.block
        row(f"ragged_dot, {experts} experts", lax.ragged_dot, weight, sizes)


if __name__ == "__main__":
    main()
