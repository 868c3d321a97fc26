"""Products in float8 (Micikevicius et al. 2022): numbers of 8 bits, each group of them divided by a scale that is made anew each time.

                   x                 weight           cotangent         rounded to
    rowwise        a row             a column         a row             e4m3, cotangents e5m2
    tensorwise     all               all              all               likewise
    blockwise      128 of a row      128 x 128        128 of a row      e4m3 (DeepSeek-V3, section 3.3)

A group lies along what the product sums over, so that for the weight's gradient, which sums over tokens, columns take the place of rows.
Scales are powers of two, as torchao has them for rowwise: to divide by one is exact, so that what was rounded stays what it is when it is
rounded once more, and has the same value in bfloat16. The cast does not saturate, so all is clipped before it. An inf makes its group's
scale inf and the group NaN: a step that bfloat16 would skip is skipped here.

XLA has no kernel that takes a scale for each block: blockwise multiplies the rounded numbers in the compute dtype, for the same sums.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.model.collectives import Collectives

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BLOCK = 128
OVER_ROWS = (((0,), (0,)), ((), ()))
Groups = tuple[int, int]  # rows and columns that share a scale; 0: all


class Rounded(NamedTuple):
    """A matrix in float8, and its scales, float32: 1, as many as it has, or one for each `BLOCK`, along either dimension.

    What is kept or sent is e4m3 as bytes: XLA's CPU widens float8 on its way, and has made NaN of what loops kept of it.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def numbers(self) -> jax.Array:
        """The values in float8."""
        return lax.bitcast_convert_type(self.values, E4M3) if self.values.dtype == jnp.uint8 else self.values

    def packed(self) -> "Rounded":
        """Returns the same as bytes."""
        return Rounded(lax.bitcast_convert_type(self.values, jnp.uint8), self.scale)


class Rows(NamedTuple):
    """What goes into products, [N, D], and what it was rounded to: the first carries the gradient, the second is multiplied.

    Without the second the first is what to multiply.
    """

    x: jax.Array
    rounded: Rounded | None


def scale_of(amax: jax.Array, dtype: Any) -> jax.Array:
    """Returns the least power of two by which numbers up to `amax` fit into a dtype; of inf and NaN these."""
    ratio = jnp.maximum(amax / float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32).tiny)
    bits = lax.bitcast_convert_type(ratio, jnp.int32)
    power = lax.bitcast_convert_type((bits + (2**23 - 1)) & -(2**23), jnp.float32)
    return jnp.where(jnp.isnan(ratio), ratio, power)


def cast(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns x over a scale that it broadcasts with, in float8."""
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -top, top).astype(dtype)


def rounded(x: jax.Array, groups: Groups, dtype: Any = E4M3, over: tuple[str, ...] = ()) -> Rounded:
    """Rounds a matrix; `over` are mesh axes that share each scale."""
    size = [group or n for group, n in zip(groups, x.shape, strict=True)]
    blocks = _blocks(x, size)
    amax = jnp.max(jnp.abs(blocks.astype(jnp.float32)), (1, 3))
    scale = scale_of(lax.pmax(amax, over) if over else amax, dtype)
    return Rounded(_unblocked(cast(blocks, scale[:, None, :, None], dtype), x.shape), scale)


def widened(q: Rounded, dtype: Any) -> jax.Array:
    """Returns the numbers that were rounded to, exact in every dtype that holds them."""
    shape = q.values.shape
    size = [n if s == 1 else 1 if s == n else BLOCK for n, s in zip(shape, q.scale.shape, strict=True)]
    return _unblocked(_blocks(q.numbers, size).astype(jnp.float32) * q.scale[:, None, :, None], shape).astype(dtype)


def _blocks(x: jax.Array, size: list[int]) -> jax.Array:
    (n, m), (r, c) = x.shape, size
    padding = (0, -n % r), (0, -m % c)
    x = jnp.pad(x, padding) if any(map(sum, padding)) else x
    return x.reshape(x.shape[0] // r, r, x.shape[1] // c, c)


def _unblocked(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    a, r, b, c = blocks.shape
    x = blocks.reshape(a * r, b * c)
    return x if x.shape == shape else x[: shape[0], : shape[1]]


class Float8Recipe(NamedTuple):
    """A recipe, and whether the weight's gradient is a product in float8 too."""

    recipe: str
    wgrad: bool

    @property
    def of_gradients(self) -> Any:
        """The dtype of cotangents: what e5m2 lacks in precision it has in range, which blocks do not need."""
        return E4M3 if self.recipe == "blockwise" else E5M2

    def groups(self, summed: int, weight: bool = False) -> Groups:
        """Returns those of a matrix, activations or a `weight`, whose dimension `summed` a product sums over."""
        if self.recipe == "tensorwise":
            return 0, 0
        along, across = (BLOCK, BLOCK if weight else 1) if self.recipe == "blockwise" else (0, 1)
        return (across, along) if summed else (along, across)

    def weight(self, w_KF: jax.Array) -> Rounded:
        """Rounds a weight for the forward."""
        return rounded(w_KF, self.groups(0, weight=True))

    def turned(self, q: Rounded, summed: int, weight: bool = False) -> Rounded:
        """Rounds what the forward multiplied once more, for the product that sums over its other dimension, now `summed`."""
        groups = self.groups(summed, weight)
        return q if self.groups(1 - summed, weight) == groups else rounded(widened(q, jnp.float32), groups)

    def times(self, a: Rounded, b: Rounded, summed: tuple[int, int], dtype: Any) -> jax.Array:
        """Returns the product in `dtype`, summed over one dimension of each."""
        dimensions = (((summed[0],), (summed[1],)), ((), ()))
        # float16 would not hold the sums before they are scaled
        inner = jnp.float32 if dtype == jnp.float16 else dtype
        if self.recipe == "blockwise":
            wide = jnp.bfloat16 if dtype == jnp.float16 else dtype
            y = lax.dot_general(widened(a, wide), widened(b, wide), dimensions, preferred_element_type=inner)
            return y.astype(dtype)
        y = lax.dot_general(a.numbers, b.numbers, dimensions, preferred_element_type=inner)
        return (y * a.scale.reshape(-1, 1).astype(inner) * b.scale.reshape(1, -1).astype(inner)).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    how: Float8Recipe, shape: Any, keeps_x: bool, x: Any, q: Rounded, weight: Any, b: Rounded | None
) -> jax.Array:
    """x W by what they are rounded to, `q` and `b`. For the backward q is kept, or x if something else keeps that in any case."""
    return how.times(q, b or how.weight(weight.reshape(x.shape[1], -1)), (1, 0), x.dtype)


def _product_forward(how: Float8Recipe, shape: Any, keeps_x: bool, *given: Any) -> tuple[jax.Array, Any]:
    """Of a frozen weight there is no gradient to come, so nothing is kept for one."""
    trained = given[2].perturbed
    x, q, weight, b = jax.tree.map(lambda p: p.value, given, is_leaf=lambda p: isinstance(p, CustomVJPPrimal))
    kept = (x if keeps_x else q) if trained else None
    return _product(how, shape, keeps_x, x, q, weight, b), (kept, weight if b is None else None, b)


def _product_backward(how: Float8Recipe, shape: Any, keeps_x: bool, residuals: Any, g_NF: jax.Array) -> tuple[Any, ...]:
    kept, weight, b = residuals
    b = b or how.weight(weight.reshape(-1, g_NF.shape[1]))
    to_x = how.times(rounded(g_NF, how.groups(1), how.of_gradients), how.turned(b, 1, weight=True), (1, 1), g_NF.dtype)
    if kept is None:
        return to_x, None, None, None
    q = rounded(kept, how.groups(1)) if keeps_x else kept
    if how.wgrad:
        to_weight = how.times(how.turned(q, 0), rounded(g_NF, how.groups(0), how.of_gradients), (0, 0), g_NF.dtype)
    else:
        to_weight = lax.dot_general(widened(q, g_NF.dtype), g_NF, OVER_ROWS)
    return to_x, None, to_weight.reshape(shape), None


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


# Where layers of both kinds run by one program, as in the stages of a pipeline, operands are selected and the product is of the compute
# dtype: by powers of two the same sums.
def _selected(how: Float8Recipe, skip: jax.Array, x: jax.Array, groups: Groups, dtype: Any = E4M3) -> jax.Array:
    """Returns x as it is where `skip`, else what it is rounded to."""
    return jnp.where(skip, x, widened(rounded(x, groups, dtype), x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _selected_product(how: Float8Recipe, shape: Any, skip: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W, of a weight that is rounded unless `skip`; x is already."""
    return x @ _selected(how, skip, weight.reshape(x.shape[1], -1), how.groups(0, weight=True))


def _selected_forward(how: Float8Recipe, shape: Any, *given: Any) -> tuple[jax.Array, Any]:
    skip, x, weight = (p.value for p in given)
    return _selected_product(how, shape, skip, x, weight), (skip, x if given[2].perturbed else None, weight)


def _selected_backward(how: Float8Recipe, shape: Any, residuals: Any, g_NF: jax.Array) -> tuple[Any, ...]:
    skip, x, weight = residuals
    w = _selected(how, skip, weight.reshape(-1, g_NF.shape[1]), how.groups(0, weight=True))
    w = _selected(how, skip, w, how.groups(1, weight=True))
    to_x = _selected(how, skip, g_NF, how.groups(1), how.of_gradients) @ w.T
    if x is None:
        return None, to_x, None
    if how.wgrad:
        x = _selected(how, skip, x, how.groups(0))
        g_NF = _selected(how, skip, g_NF, how.groups(0), how.of_gradients)
    return None, to_x, lax.dot_general(x, g_NF, OVER_ROWS).reshape(shape)


_selected_product.defvjp(_selected_forward, _selected_backward, symbolic_zeros=True)


@jax.custom_vjp
def _straight_through(x: jax.Array, instead: jax.Array) -> jax.Array:
    """Returns what stands for x, whose gradient is x's."""
    return instead


_straight_through.defvjp(lambda x, instead: (instead, None), lambda _, g: (g, None))


class Float8Products:
    """The products of a layer in float8. Where `skip` is given, a boolean on the device, they are in the compute dtype if it is true.

    `weights` are those that were gathered in float8, by name; `gathers`: so is what goes into column-parallel products.
    """

    def __init__(
        self, how: Float8Recipe, skip: jax.Array | None, weights: Mapping[str, Rounded], gathers: bool
    ) -> None:
        self.how, self.skip, self.weights, self.gathers = how, skip, weights, gathers

    def round(self, x_ND: jax.Array) -> Rows:
        """Rounds what goes into products, for the forward."""
        groups = self.how.groups(1)
        if self.skip is None:
            return Rows(x_ND, rounded(lax.stop_gradient(x_ND), groups).packed())
        chosen = _selected(self.how, self.skip, lax.stop_gradient(x_ND), groups)
        return Rows(_straight_through(x_ND, chosen), None)

    def enter(self, x_BTD: jax.Array, collectives: Collectives) -> jax.Array | Rows:
        """`collectives.enter`, where it `gathers` of rows as they are rounded: what it does to x itself nobody reads then, but for its
        gradient."""
        x, width = collectives.enter(x_BTD), x_BTD.shape[-1]
        if self.skip is not None or not self.gathers:
            return x

        def entered(part: jax.Array) -> jax.Array:
            part = collectives.enter(part.reshape(*x_BTD.shape[:2], -1))
            return part.reshape(-1, part.shape[-1])

        of_all = self.how.recipe == "tensorwise"
        over = collectives.stream_axes() if of_all else ()
        code, scale = rounded(lax.stop_gradient(x_BTD).reshape(-1, width), self.how.groups(1), over=over).packed()
        return Rows(x, Rounded(entered(code), scale if of_all else entered(scale)))

    def linear(self, name: str, rows: Rows, weight: jax.Array) -> jax.Array:
        """x W of the weight `name`. Attention keeps what it gives to its output projection itself."""
        if rows.rounded is None:
            return _selected_product(self.how, weight.shape, self.skip, rows.x, weight)
        return _product(self.how, weight.shape, name == "out", rows.x, rows.rounded, weight, self.weights.get(name))

    def values(self, rows: Rows) -> jax.Array:
        """What the rows were rounded to, for other products."""
        return rows.x if rows.rounded is None else _straight_through(rows.x, widened(rows.rounded, rows.x.dtype))
