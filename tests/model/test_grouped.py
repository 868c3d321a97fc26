"""A grouped product gives what a loop over experts gives, in the FLOPs of one dense product, however the rows fall to the experts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshtrain.compat import residuals
from meshtrain.model.grouped import grouped

K, N = 7, 11


def given(experts: int, counts: list[int], length: int, spare: int, dtype: Any = jnp.float32, k: int = K, n: int = N) -> tuple[Any, ...]:  # fmt: skip
    """Rows, weight, experts of blocks, blocks in use, and a cotangent: `counts` rows an expert, in blocks of `length`, and `spare` blocks.

    What is not in use is not a number.
    """
    random = np.random.default_rng(len(counts))
    of_block = np.repeat(np.arange(experts), [-(-count // length) for count in counts])
    blocks = len(of_block)
    rows, cotangent = (random.standard_normal(((blocks + spare) * length, width)) for width in (k, n))
    start = 0
    for count in counts:
        stop = start + -(-count // length) * length
        rows[start + count : stop] = 0
        start = stop
    rows[start:] = cotangent[start:] = np.nan
    of_block = np.concatenate([of_block, np.full(spare, experts - 1)])
    weight = random.standard_normal((experts, k, n))
    return (
        *(jnp.asarray(a, dtype) for a in (rows, weight)),
        jnp.asarray(of_block, jnp.int32),
        jnp.int32(blocks),
        jnp.asarray(cotangent, dtype),
    )


def graded(rows: jax.Array, weight: jax.Array, experts: jax.Array, blocks: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:  # fmt: skip
    out, vjp = jax.vjp(lambda rows, weight: grouped(rows, weight, experts, blocks), rows, weight)
    return out, *vjp(cotangent)


def by_experts(rows: Any, weight: Any, experts: Any, blocks: Any, cotangent: Any) -> tuple[np.ndarray, ...]:
    """The same by a dense product an expert, in float64."""
    used = np.arange(len(rows)) < int(blocks) * (len(rows) // len(experts))
    of_row = np.repeat(experts, len(rows) // len(experts))
    rows, weight, cotangent = (np.asarray(a, np.float64) for a in (rows, weight, cotangent))
    out, to_rows, to_weight = np.zeros_like(cotangent), np.zeros_like(rows), np.zeros_like(weight)
    for e in range(len(weight)):
        its = used & (of_row == e)
        out[its], to_rows[its] = rows[its] @ weight[e], cotangent[its] @ weight[e].T
        to_weight[e] = rows[its].T @ cotangent[its]
    return out, to_rows, to_weight


CASES = {
    "even": (3, [4, 4, 4], 4, 0),
    "crowded, empty, a row of its own, room left": (5, [9, 0, 1, 0, 6], 4, 3),
    "none in use": (2, [0, 0], 4, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grouped_product_and_its_gradients_are_those_of_a_loop_over_experts(case):
    args = given(*CASES[case])
    for found, right in zip(jax.jit(graded)(*args), by_experts(*args), strict=True):
        np.testing.assert_allclose(found, right, atol=2e-6)


def test_sums_are_in_float32_and_the_results_in_the_dtype_of_the_rows():
    """Ones: in bfloat16 a sum of more than 256 of them would not grow."""
    rows, weight = jnp.ones((2 * 300, 300), jnp.bfloat16), jnp.ones((1, 300, 4), jnp.bfloat16)
    found = jax.jit(graded)(rows, weight, jnp.zeros(2, jnp.int32), jnp.int32(2), jnp.ones((600, 4), jnp.bfloat16))
    assert [x.dtype for x in found] == [jnp.bfloat16] * 3
    for x, right in zip(found, (300, 4, 600), strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), jnp.bfloat16(right).astype(jnp.float32))


def test_of_a_frozen_weight_no_rows_are_kept_and_no_gradient_is_made():
    rows, weight, experts, blocks, cotangent = given(*CASES["even"])
    _, vjp = jax.vjp(lambda rows: grouped(rows, weight, experts, blocks), rows)
    assert rows.shape not in [r.shape for r in residuals(vjp)]
    assert str(jax.make_jaxpr(vjp)(cotangent)).count("dot_general") == 1
    _, vjp = jax.vjp(lambda rows, weight: grouped(rows, weight, experts, blocks), rows, weight)
    assert str(jax.make_jaxpr(vjp)(cotangent)).count("dot_general") == 2


@pytest.mark.parametrize("replicated", [False, True])
def test_devices_of_a_mesh_have_rows_experts_and_blocks_in_use_of_their_own(replicated):
    """And weights too; of those that they share the gradient is summed over the mesh."""
    a, b = given(3, [4, 0, 8], 4, 2), given(3, [1, 2, 9], 4, 0)
    assert len(a[0]) == len(b[0]) and a[3] != b[3]
    if replicated:
        b = (b[0], a[1], *b[2:])
    mesh, weights = Mesh(np.array(jax.devices()[:2]), "x"), P() if replicated else P("x")
    args = [jnp.concatenate([jnp.atleast_1d(x), jnp.atleast_1d(y)]) for x, y in zip(a, b, strict=True)]
    args[1] = a[1] if replicated else args[1]

    def local(*args: jax.Array) -> tuple[jax.Array, ...]:
        return graded(*args[:3], args[3][0], args[4])

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), weights, *[P("x")] * 3), out_specs=(P("x"), P("x"), weights)
    )
    *found, to_weight = jax.jit(run)(*args)
    *right, right_to_weight = zip(by_experts(*a), by_experts(*b), strict=True)
    for x, parts in zip(found, right, strict=True):
        np.testing.assert_allclose(x, np.concatenate(parts), atol=2e-6)
    np.testing.assert_allclose(
        to_weight, sum(right_to_weight) if replicated else np.concatenate(right_to_weight), atol=2e-6
    )
