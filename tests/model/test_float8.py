"""Products in float8 beside a quantiser written in NumPy, which looks the nearest number up in a table of all that
there are.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model.collectives import Collectives
from meshtrain.model.float8 import (
    E4M3,
    E5M2,
    Float8Products,
    Float8Recipe,
    RoundedWeight,
    rounded,
    widened,
)
from meshtrain.model.products import linear, project, rows_of

RECIPES = (
    "rowwise",
    *[
        pytest.param(name, marks=pytest.mark.thorough)
        for name in ("tensorwise", "blockwise")
    ],
)
# (bits of the fraction, least exponent, largest number)
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}


def all_of(dtype):
    """Every finite number of a format from 0 on, in order: of an even index the last bit is 0."""
    bits, least, top = FORMATS[dtype]
    small = [f * 2.0 ** (least - bits) for f in range(2**bits)]
    large = [
        (1 + f / 2**bits) * 2.0**e for e in range(least, 20) for f in range(2**bits)
    ]
    return np.array([x for x in small + large if x <= top])


def nearest(x, dtype):
    table = all_of(dtype)
    high = np.clip(np.searchsorted(table, np.abs(x)), 1, len(table) - 1)
    below, above = table[high - 1], table[high]
    down, up = np.abs(x) - below, above - np.abs(x)
    take_above = (up < down) | ((up == down) & (high % 2 == 0))
    return np.sign(x) * np.where(take_above, above, below)


def quantised(x, group, dtype):
    """x [n, m] in float64, each group over the least power of two by which it fits, rounded, and times it again."""
    out, (n, m) = np.zeros_like(x), x.shape
    rows, columns = group[0] or n, group[1] or m
    for i in range(0, n, rows):
        for j in range(0, m, columns):
            part = x[i : i + rows, j : j + columns]
            if largest := np.abs(part).max():
                scale = 2.0 ** np.ceil(np.log2(largest / FORMATS[dtype][2]))
                out[i : i + rows, j : j + columns] = (
                    nearest(part / scale, dtype) * scale
                )
    return out


def expected(recipe, wgrad, x, w, g):
    """(y, dx, dw) in float64."""
    along = {"rowwise": (1, 0), "tensorwise": (0, 0), "blockwise": (1, 128)}[recipe]
    of_weight = {"rowwise": (0, 1), "tensorwise": (0, 0), "blockwise": (128, 128)}[
        recipe
    ]
    cotangents = E4M3 if recipe == "blockwise" else E5M2
    a, b = quantised(x, along, E4M3), quantised(w, of_weight, E4M3)
    dx = quantised(g, along, cotangents) @ quantised(b, of_weight[::-1], E4M3).T
    tokens = quantised(a, along[::-1], E4M3).T @ quantised(g, along[::-1], cotangents)
    return a @ b, dx, tokens if wgrad else a.T @ g


def module(how, skip=None, gathers=True, **weights):
    how = how if skip is None else how._replace(products="either")
    return SimpleNamespace(
        float8=Float8Products(how, skip, {}, gathers), lora_scale=0.0, **weights
    )


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def products(how, x, w, g, skip=None, name="up"):
    """(y, dx, dw) by the code."""

    def y(x, w):
        held = module(how, skip, **{name: w})
        return project(held, name, rows_of(held, x)[1])

    out, vjp = jax.vjp(y, jnp.asarray(x), jnp.asarray(w))
    return out, *vjp(jnp.asarray(g, out.dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["float8", "either"])
def test_a_product_and_its_gradients_are_those_of_operands_rounded_in_numpy(
    recipe, wgrad, kind
):
    x, w, g = (
        numbers(0, 48, 160),
        0.05 * numbers(1, 160, 144),
        1e-3 * numbers(2, 48, 144),
    )
    x[:, 7] *= 300  # an outlier channel
    skip = None if kind == "float8" else jnp.array(False)
    for mine, theirs in zip(
        products(Float8Recipe(recipe, wgrad), x, w, g, skip),
        expected(recipe, wgrad, x, w, g),
        strict=True,
    ):
        np.testing.assert_allclose(
            mine, theirs, rtol=2e-6, atol=2e-6 * np.abs(theirs).max()
        )


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_that_is_skipped_has_the_products_of_the_compute_dtype(recipe):
    x, w, g = (
        jnp.asarray(numbers(i, *shape))
        for i, shape in enumerate(((16, 32), (32, 48), (16, 48)))
    )
    y, vjp = jax.vjp(linear, x, w)
    for mine, plain in zip(
        products(Float8Recipe(recipe, True), x, w, g, jnp.array(True)),
        (y, *vjp(g)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_was_rounded_stays_as_it_is_in_every_dtype(dtype):
    x = jnp.asarray(numbers(3, 64, 256) * np.exp(3 * numbers(4, 64, 1)), dtype)
    for groups in ((1, 0), (0, 1), (0, 0), (1, 128), (128, 128)):
        for of in (E4M3, E5M2):
            once = widened(rounded(x, groups, of), dtype)
            np.testing.assert_array_equal(
                once, widened(rounded(once, groups, of), dtype)
            )


@pytest.mark.thorough
def test_a_zero_row_an_inf_and_an_outlier_end_as_in_the_compute_dtype():
    x, w = numbers(0, 6, 32), numbers(1, 32, 16)
    x[1], x[2, 3], x[3, 3], x[4, 5] = 0, np.inf, np.nan, 1e6
    for recipe in ("rowwise", "blockwise"):
        y, dx, dw = products(
            Float8Recipe(recipe, False), x, w, np.ones((6, 16), np.float32)
        )
        np.testing.assert_array_equal(
            np.isfinite(y).all(axis=1), np.isfinite(x @ w).all(axis=1)
        )
        assert not np.any(y[1])
        np.testing.assert_allclose(y[4], (x @ w)[4], rtol=0.1)
        assert np.isfinite(dx).all()
        assert (
            not np.isfinite(dw).all(axis=1).any()
        )  # a row that is NaN reaches every weight, as its scale is NaN
    assert not np.isfinite(
        products(Float8Recipe("tensorwise", False), x, w, np.ones((6, 16), np.float32))[
            0
        ]
    ).any()


@pytest.mark.thorough
def test_of_a_frozen_weight_nothing_is_kept_and_of_another_one_byte_a_number():
    from meshtrain.compat import residuals

    x, w = jnp.asarray(numbers(0, 64, 256)), jnp.asarray(numbers(1, 256, 128))
    how = Float8Recipe("rowwise", False)

    def kept(name, w_differs):
        def y(x, *w_or_none):
            held = module(how, **{name: w_or_none[0] if w_or_none else w})
            return project(held, name, rows_of(held, jnp.sin(x) * 2)[1])

        vjp = jax.vjp(y, x, *([w] if w_differs else []))[1]
        return [r.dtype for r in residuals(vjp) if r.shape == x.shape]

    assert kept("up", True).count(jnp.uint8) == 1 and not kept("up", False).count(
        jnp.uint8
    )
    # attention keeps its output, which the product out of it shares
    assert not kept("out", True).count(jnp.uint8)


@pytest.mark.thorough
def test_an_array_that_has_not_entered_is_rounded_all_the_same():
    how, x = Float8Recipe("rowwise", False), jnp.asarray(numbers(0, 2, 8, 32))
    held = module(how, up=jnp.asarray(numbers(1, 32, 16)))
    shape, rows = rows_of(held, held.float8.enter(x, Collectives()))
    other, again = rows_of(held, x)
    assert shape == other == (2, 8, 32)
    np.testing.assert_array_equal(project(held, "up", rows), project(held, "up", again))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["float8", "either", "compute"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_beside_a_frozen_weight_in_float8_have_the_gradients_of_one_rounded_in_numpy(
    recipe, kind
):
    x, w, g = (
        numbers(0, 48, 128),
        0.05 * numbers(1, 128, 2, 64),
        1e-3 * numbers(2, 48, 128),
    )
    a, b = 0.1 * numbers(3, 128, 4), 0.1 * numbers(4, 4, 2, 64)
    blocks = {"rowwise": (0, 1, 1), "tensorwise": (0, 0, 0), "blockwise": (128, 2, 64)}[
        recipe
    ]
    how = Float8Recipe(recipe, False, kind)
    q = RoundedWeight(rounded(jnp.asarray(w), blocks).packed())
    skip = jnp.array(False) if kind == "either" else None

    def y(x, a, b):
        held = SimpleNamespace(
            float8=Float8Products(how, skip, {"q": q}, True),
            q=jnp.zeros(w.shape),
            q_lora_a=a,
            q_lora_b=b,
            lora_scale=0.5,
            lora_drop=None,
        )
        return project(held, "q", rows_of(held, x)[1])

    out, vjp = jax.vjp(y, *map(jnp.asarray, (x, a, b)))
    x, w, g, a, b = (array.astype(np.float64) for array in (x, w, g, a, b))
    along, of_weight = {
        "rowwise": ((1, 0), (0, 1)),
        "tensorwise": ((0, 0),) * 2,
        "blockwise": ((1, 128), (128, 128)),
    }[recipe]
    cotangents = E4M3 if recipe == "blockwise" else E5M2
    wide = quantised(w.reshape(128, 128), of_weight, E4M3)
    rows, turned, seen = (
        quantised(x, along, E4M3),
        quantised(wide, of_weight[::-1], E4M3),
        quantised(g, along, cotangents),
    )
    if kind == "compute":
        rows, turned, seen = x, wide, g
    flat = b.reshape(4, 128)
    theirs = (
        rows @ wide + 0.5 * rows @ a @ flat,
        seen @ turned.T + 0.5 * g @ flat.T @ a.T,
        0.5 * rows.T @ (g @ flat.T),
        (0.5 * (rows @ a).T @ g).reshape(b.shape),
    )
    for mine, other in zip((out, *vjp(jnp.asarray(g))), theirs, strict=True):
        np.testing.assert_allclose(
            mine, other, rtol=5e-6, atol=5e-6 * np.abs(other).max()
        )


@pytest.mark.thorough
@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("held", [False, True])
def test_grouped_products_are_those_of_slots_and_experts_rounded_in_numpy(
    recipe, wgrad, held
):
    """Three experts, of which the second has no block, and a block that is not in use."""
    x, w, g = (
        numbers(0, 64, 160),
        0.05 * numbers(1, 3, 160, 144),
        1e-3 * numbers(2, 64, 144),
    )
    x[48:], x[10], g[48:] = 0, 0, 0
    blocks = jnp.array([0, 0, 2, 2], jnp.int32), jnp.int32(3)
    groups = {
        "rowwise": (1, 0, 1),
        "tensorwise": (1, 0, 0),
        "blockwise": (1, 128, 128),
    }[recipe]
    weights = (
        {"up": RoundedWeight(rounded(jnp.asarray(w), groups).packed())} if held else {}
    )
    float8 = Float8Products(Float8Recipe(recipe, wgrad), None, weights, True)
    y, vjp = jax.vjp(
        lambda x, w: float8.grouped("up", float8.round(x), w, "cpu", blocks),
        *map(jnp.asarray, (x, w)),
    )
    dx, dw = vjp(jnp.asarray(g))
    cotangents = E4M3 if recipe == "blockwise" else E5M2
    along = {"rowwise": (1, 0), "tensorwise": (0, 0), "blockwise": (1, 128)}[recipe]
    of_weight = groups[1:]
    rows, seen = quantised(x, along, E4M3), quantised(g, along, cotangents)
    tokens, over = (
        (quantised(rows, along[::-1], E4M3), quantised(g, along[::-1], cotangents))
        if wgrad
        else (rows, g)
    )
    mine = [np.zeros_like(y), np.zeros_like(dx), np.zeros_like(dw)]
    for at, expert in ((slice(0, 32), 0), (slice(32, 48), 2)):
        b = quantised(w[expert], of_weight, E4M3)
        mine[0][at] = rows[at] @ b
        mine[1][at] = seen[at] @ quantised(b, of_weight[::-1], E4M3).T
        mine[2][expert] = tokens[at].T @ over[at]
    for there, here in zip((y, dx, dw), mine, strict=True):
        np.testing.assert_allclose(
            there, here, rtol=5e-6, atol=5e-6 * np.abs(here).max()
        )
