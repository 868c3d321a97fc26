"""The grouped product beside its ideal, one dense product of as many rows, and beside `jax.lax.ragged_dot`: seconds on this machine.

    python -m experiments.grouped                            4096 rows, K 256, N 512, 8 and 16 experts, blocks of 128
    python -m experiments.grouped --rows 8192 --dtype bfloat16

Rows fall to the experts unevenly, in whole blocks that are all in use. A time is the least of several, which all products take in turn, so
that other work of the machine falls on all. FLOPs are those of the dense product, forward and backward; MB are read and written if each
argument and result is once; beside them are the temporaries that the compiler allocates for the backward.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.model.grouped import grouped


class Timed:
    """A product forward, and both of its gradients, compiled."""

    def __init__(self, name: str, product: Callable, rows: jax.Array, cotangent: jax.Array, weight: jax.Array, *others: jax.Array) -> None:  # fmt: skip
        self.name, self.arrays = name, (rows, weight, cotangent)

        def backward(rows: jax.Array, weight: jax.Array, cotangent: jax.Array, *others: jax.Array) -> Any:
            return jax.vjp(lambda rows, weight: product(rows, weight, *others), rows, weight)[1](cotangent)

        given = [(rows, weight, *others), (rows, weight, cotangent, *others)]
        self.runs = [
            (jax.jit(f).lower(*args).compile(), args) for f, args in zip((product, backward), given, strict=True)
        ]
        self.seconds = [float("inf")] * 2

    def take(self) -> None:
        for i, (run, args) in enumerate(self.runs):
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            self.seconds[i] = min(self.seconds[i], time.perf_counter() - start)

    def line(self, ideal: "Timed") -> str:
        rows, weight, cotangent = self.arrays
        flops = 6 * rows.size * cotangent.shape[1]
        once = 3 * (rows.nbytes + weight.nbytes) + 2 * cotangent.nbytes
        times = "".join(f"{1e3 * s:9.2f} ms{s / i:9.2f}" for s, i in zip(self.seconds, ideal.seconds, strict=True))
        temporaries = self.runs[1][0].memory_analysis().temp_size_in_bytes
        return f"{self.name:24}{times}{flops / 1e9:8.2f}{flops / sum(self.seconds) / 1e9:10.1f}{once / 1e6:8.1f}{temporaries / 1e6:9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 4096), ("k", 256), ("n", 512), ("block", 128), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    random, blocks = np.random.default_rng(0), asked.rows // asked.block

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), asked.dtype)

    both = numbers(asked.rows, asked.k), numbers(asked.rows, asked.n)
    timed = [Timed("dense", jnp.matmul, *both, numbers(asked.k, asked.n))]
    product = partial(grouped, platform=jax.default_backend())
    for experts in asked.experts:
        weight = numbers(experts, asked.k, asked.n)
        of_block = jnp.asarray(np.sort(random.choice(experts, blocks, p=random.dirichlet(np.ones(experts)))), jnp.int32)
        sizes = jnp.bincount(of_block, length=experts) * asked.block
        timed.append(Timed(f"grouped, {experts} experts", product, *both, weight, of_block, jnp.int32(blocks)))
        timed.append(Timed(f"ragged_dot, {experts} experts", lax.ragged_dot, *both, weight, sizes))
    for _ in range(asked.repeats):
        for each in timed:
            each.take()
    print(
        f"{asked.rows} rows, K {asked.k}, N {asked.n}, blocks of {asked.block}, {asked.dtype}, {jax.default_backend()}"
    )
    print(f"{'':24}{'forward':>12}{'x ideal':>9}{'backward':>12}{'x ideal':>9}{'GFLOP':>8}{'GFLOP/s':>10}{'MB':>8}{'temp MB':>9}")  # fmt: skip
    for each in timed:
        print(each.line(timed[0]))


if __name__ == "__main__":
    main()
