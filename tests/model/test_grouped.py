"""A grouped product gives what a loop over experts gives, by a loop over blocks and by kernels, however the rows fall
to the experts.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshtrain.compat import residuals
from meshtrain.model.grouped import grouped

# Of a block, K and N: sizes in which the kernels have several tiles, and ones that only the loop takes.
IN_TILES, ODD = (128, 48, 80), (4, 7, 11)


def given(
    counts: list[float], spare: int, sizes: tuple[int, int, int] = ODD
) -> tuple[Any, ...]:
    """Rows, weight, experts of blocks, blocks in use, and a cotangent: `counts` blocks an expert, of which the last may
    be partly full, and `spare` blocks in which nothing is a number.
    """
    length, k, n = sizes
    random = np.random.default_rng(len(counts))
    of_block = np.repeat(np.arange(len(counts)), np.ceil(counts).astype(int))
    blocks = len(of_block)
    rows, cotangent = (
        random.standard_normal(((blocks + spare) * length, width)) for width in (k, n)
    )
    for end, count in zip(np.cumsum(np.ceil(counts)), counts, strict=True):
        empty = round(float(np.ceil(count) - count) * length)
        rows[int(end) * length - empty : int(end) * length] = 0
    rows[blocks * length :] = cotangent[blocks * length :] = np.nan
    of_block = np.concatenate([of_block, np.full(spare, len(counts) - 1)])
    rows, weight, cotangent = (
        jnp.asarray(a, jnp.float32)
        for a in (rows, random.standard_normal((len(counts), k, n)), cotangent)
    )
    return rows, weight, jnp.asarray(of_block, jnp.int32), jnp.int32(blocks), cotangent


def graded(
    platform: str,
    rows: jax.Array,
    weight: jax.Array,
    experts: jax.Array,
    blocks: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, ...]:
    """Output, and the gradients of rows and weight."""
    out, vjp = jax.vjp(
        lambda rows, weight: grouped(rows, weight, experts, blocks, platform),
        rows,
        weight,
    )
    return out, *vjp(cotangent)


def by_experts(
    rows: Any, weight: Any, experts: Any, blocks: Any, cotangent: Any
) -> tuple[np.ndarray, ...]:
    """The same by a dense product an expert, in float64."""
    used = np.arange(len(rows)) < int(blocks) * (len(rows) // len(experts))
    of_row = np.repeat(experts, len(rows) // len(experts))
    rows, weight, cotangent = (
        np.asarray(a, np.float64) for a in (rows, weight, cotangent)
    )
    out, to_rows, to_weight = (
        np.zeros_like(cotangent),
        np.zeros_like(rows),
        np.zeros_like(weight),
    )
    for e in range(len(weight)):
        its = used & (of_row == e)
        out[its], to_rows[its] = rows[its] @ weight[e], cotangent[its] @ weight[e].T
        to_weight[e] = rows[its].T @ cotangent[its]
    return out, to_rows, to_weight


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas kernels as plain JAX, on any device."""
    call = pallas.pallas_call
    monkeypatch.setattr(
        pallas,
        "pallas_call",
        lambda *given, **keys: call(*given, **{**keys, "interpret": True}),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "platform, sizes, kernels", [("cpu", ODD, 0), ("gpu", ODD, 0), ("gpu", IN_TILES, 3)]
)
@pytest.mark.parametrize(
    "counts, spare", [([1, 1, 1], 0), ([2.25, 0, 0.25, 0, 1.5], 3), ([0, 0], 2)]
)
def test_a_grouped_product_and_its_gradients_are_those_of_a_loop_over_experts(
    interpreted, platform, sizes, kernels, counts, spare
):
    args = given(counts, spare, sizes)
    assert (
        str(jax.make_jaxpr(partial(graded, platform))(*args)).count(" pallas_call[")
        == kernels
    )
    for found, right in zip(
        jax.jit(partial(graded, platform))(*args), by_experts(*args), strict=True
    ):
        np.testing.assert_allclose(found, right, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_weights_side_by_side_give_what_each_gives_alone(interpreted, platform):
    rows, weight, experts, blocks, cotangent = given([2.25, 0, 1.5], 1, IN_TILES)
    both = weight, 2 * weight[::-1]

    def run(rows, weights):
        return grouped(rows, weights, experts, blocks, platform)

    y, vjp = jax.vjp(run, rows, both)
    to_rows, to_weights = vjp(jnp.concatenate([cotangent, 3 * cotangent], 1))
    apart = [jax.vjp(run, rows, w) for w in both]
    right = jnp.concatenate([y for y, _ in apart], 1)
    np.testing.assert_allclose(y, right, atol=1e-6 * np.abs(right).max())
    gradients = [vjp(n * cotangent) for n, (_, vjp) in zip((1, 3), apart, strict=True)]
    total = sum(to_rows for to_rows, _ in gradients)
    np.testing.assert_allclose(to_rows, total, atol=1e-5 * np.abs(total).max())
    for got, (_, alone) in zip(to_weights, gradients, strict=True):
        np.testing.assert_allclose(got, alone, atol=1e-6 * np.abs(alone).max())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_sums_are_in_float32_and_rounded_once(interpreted, platform):
    """To the rows' dtype: by half of the last of bfloat16's 8 bits."""
    rows, weight, experts, blocks, cotangent = given([2.5, 0, 3], 1, IN_TILES)
    args = (
        *(a.astype(jnp.bfloat16) for a in (rows, weight)),
        experts,
        blocks,
        cotangent.astype(jnp.bfloat16),
    )
    for found, right in zip(
        jax.jit(partial(graded, platform))(*args), by_experts(*args), strict=True
    ):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            found.astype(jnp.float32), right, rtol=2**-8, atol=1e-4
        )


@pytest.mark.thorough
def test_of_a_frozen_weight_no_rows_are_kept_and_no_gradient_is_made():
    rows, weight, experts, blocks, cotangent = given([1, 1, 1], 0)
    _, vjp = jax.vjp(lambda rows: grouped(rows, weight, experts, blocks), rows)
    assert rows.shape not in [r.shape for r in residuals(vjp)]
    assert str(jax.make_jaxpr(vjp)(cotangent)).count("dot_general") == 1
    _, vjp = jax.vjp(
        lambda rows, weight: grouped(rows, weight, experts, blocks), rows, weight
    )
    assert str(jax.make_jaxpr(vjp)(cotangent)).count("dot_general") == 2


@pytest.mark.thorough
@pytest.mark.parametrize("replicated", [False, True])
def test_devices_of_a_mesh_have_rows_experts_and_blocks_in_use_of_their_own(replicated):
    """And weights too; of those that they share the gradient is summed over the mesh.

    Of kernels the types are those of the loops.
    """
    a, b = given([1, 0, 2], 2, (16, 16, 32)), given([0.25, 0.5, 2.25], 0, (16, 16, 32))
    assert len(a[0]) == len(b[0]) and a[3] != b[3]
    if replicated:
        b = (b[0], a[1], *b[2:])
    mesh, weights = (
        Mesh(np.array(jax.devices()[:2]), "x"),
        P() if replicated else P("x"),
    )
    args = [
        jnp.concatenate([jnp.atleast_1d(x), jnp.atleast_1d(y)])
        for x, y in zip(a, b, strict=True)
    ]
    args[1] = a[1] if replicated else args[1]

    def local(platform: str, *args: jax.Array) -> tuple[jax.Array, ...]:
        return graded(platform, *args[:3], args[3][0], args[4])

    loops, kernels = (
        jax.shard_map(
            partial(local, platform),
            mesh=mesh,
            in_specs=(P("x"), weights, *[P("x")] * 3),
            out_specs=(P("x"), P("x"), weights),
        )
        for platform in ("cpu", "gpu")
    )
    *found, to_weight = jax.jit(loops)(*args)
    *right, right_to_weight = zip(by_experts(*a), by_experts(*b), strict=True)
    for x, parts in zip(found, right, strict=True):
        np.testing.assert_allclose(x, np.concatenate(parts), atol=2e-5)
    total = sum(right_to_weight) if replicated else np.concatenate(right_to_weight)
    np.testing.assert_allclose(to_weight, total, atol=2e-5)
    assert [x.shape for x in jax.eval_shape(kernels, *args)] == [
        x.shape for x in (*found, to_weight)
    ]
