"""Products in float8 (Micikevicius et al. 2022): numbers of 8 bits, each group of them divided by a scale that is made
anew each time.

                   x                 weight           cotangent         rounded to
    rowwise        a row             a column         a row             e4m3, cotangents e5m2
    tensorwise     all               all              all               likewise
    blockwise      128 of a row      128 x 128        128 of a row      e4m3 (DeepSeek-V3, section 3.3)

A group lies along what the product sums over, so that for the weight's gradient, which sums over tokens, columns take
the place of rows. Scales are powers of two, as torchao has them for rowwise: to divide by one is exact, so that what
was rounded stays what it is when it is rounded once more, and has the same value in bfloat16. The cast does not
saturate, so all is clipped before it. An inf makes its group's
scale inf and the group NaN: a step that bfloat16 would skip is skipped here.

XLA has no kernel that takes a scale for each block, and experts' grouped products are loops or kernels of the compute
dtype: what is rounded is multiplied in that, which holds it exactly.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.compat import vary, varying
from meshtrain.config.schema import FLOAT8_BLOCK
from meshtrain.model.collectives import Collectives
from meshtrain.model.grouped import implementation

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
OVER_ROWS = (((0,), (0,)), ((), ()))
Groups = tuple[int, ...]  # along each dimension, the numbers that share a scale; 0: all


class Rounded(NamedTuple):
    """An array in float8, and its scales, float32: 1, as many as it has, or one for each block, along every dimension.

    Kept or sent values are e4m3 as bytes: XLA's CPU widens float8 on its way, and has made NaN of what loops kept of
    it.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def numbers(self) -> jax.Array:
        """The values in float8."""
        if self.values.dtype == jnp.uint8:
            return lax.bitcast_convert_type(self.values, E4M3)
        return self.values

    def packed(self) -> "Rounded":
        """Returns the same as bytes."""
        return Rounded(lax.bitcast_convert_type(self.values, jnp.uint8), self.scale)

    def matrix(self, rows: int) -> "Rounded":
        """Returns the matrix whose `rows` are the first dimensions."""
        cut = next(
            d
            for d in range(1, self.values.ndim)
            if math.prod(self.values.shape[:d]) == rows
        )
        return Rounded(
            self.values.reshape(rows, -1),
            self.scale.reshape(math.prod(self.scale.shape[:cut]), -1),
        )


class RoundedWeight(NamedTuple):
    """A weight in float8 as a layer's products take it.

    `forward` is what the forward multiplies; `turned` is that in the groups of the backward, if these are others and it
    was not left to the product; `wide` is the weight in the compute dtype, where layers are skipped.
    """

    forward: Rounded
    turned: Rounded | None = None
    wide: jax.Array | None = None

    def unread(self, dtype: Any) -> jax.Array:
        """Returns what stands for the weight where its gradient is taken and no product reads it: NaN."""
        values = self.forward.values
        return vary(jnp.full(values.shape, jnp.nan, dtype), varying(values))


class Rows(NamedTuple):
    """The operand of products, [N, D], and its rounded form: the first carries the gradient, the second is multiplied.

    Without the second the first is what to multiply.
    """

    x: jax.Array
    rounded: Rounded | None
    values: jax.Array | None = None  # what is rounded, where several adapters take it


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


def rounded(
    x: jax.Array, groups: Groups, dtype: Any = E4M3, over: tuple[str, ...] = ()
) -> Rounded:
    """Rounds an array; `over` are mesh axes that share each scale."""
    blocks = _blocks(x, [group or n for group, n in zip(groups, x.shape, strict=True)])
    within = tuple(range(1, blocks.ndim, 2))
    amax = jnp.max(jnp.abs(blocks.astype(jnp.float32)), within, keepdims=True)
    scale = scale_of(lax.pmax(amax, over) if over else amax, dtype)
    return Rounded(
        _unblocked(cast(blocks, scale, dtype), x.shape), jnp.squeeze(scale, within)
    )


def widened(q: Rounded, dtype: Any) -> jax.Array:
    """Returns the numbers that were rounded to, exact in every dtype that holds them."""
    shape = q.values.shape
    # the last block is as long as it is
    size = [
        FLOAT8_BLOCK if 1 < s == -(-n // FLOAT8_BLOCK) else n // s
        for n, s in zip(shape, q.scale.shape, strict=True)
    ]
    scale = jnp.expand_dims(q.scale, tuple(range(1, 2 * len(shape), 2)))
    return _unblocked(
        _blocks(q.numbers, size).astype(jnp.float32) * scale, shape
    ).astype(dtype)


def _blocks(x: jax.Array, size: list[int]) -> jax.Array:
    padding = [(0, -n % s) for n, s in zip(x.shape, size, strict=True)]
    x = jnp.pad(x, padding) if any(map(sum, padding)) else x
    return x.reshape(
        [m for n, s in zip(x.shape, size, strict=True) for m in (n // s, s)]
    )


def _unblocked(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = blocks.reshape(
        [a * b for a, b in zip(blocks.shape[::2], blocks.shape[1::2], strict=True)]
    )
    return x if x.shape == shape else x[tuple(map(slice, shape))]


class Float8Recipe(NamedTuple):
    """A recipe, and whether the weight's gradient is a product in float8 too."""

    recipe: str
    wgrad: bool
    products: str = "float8"  # of a layer, see `parallel.layout.Segment`

    @property
    def cotangent_dtype(self) -> Any:
        """The dtype of cotangents: what e5m2 lacks in precision it has in range, which blocks do not need."""
        return E4M3 if self.recipe == "blockwise" else E5M2

    def groups(self, summed: int, weight: bool = False) -> Groups:
        """Returns those of a matrix, activations or a `weight`, whose dimension `summed` a product sums over."""
        if self.recipe == "tensorwise":
            return 0, 0
        along, across = (
            (FLOAT8_BLOCK, FLOAT8_BLOCK if weight else 1)
            if self.recipe == "blockwise"
            else (0, 1)
        )
        return (across, along) if summed else (along, across)

    def weight(self, w_KF: jax.Array) -> Rounded:
        """Rounds a weight for the forward."""
        return rounded(w_KF, self.groups(0, weight=True))

    def turned(self, q: Rounded, summed: int, weight: bool = False) -> Rounded:
        """Rounds what the forward multiplied once more, for the product that sums over its other dimension, now
        `summed`.
        """
        groups = self.groups(summed, weight)
        if self.groups(1 - summed, weight) == groups:
            return q
        return rounded(widened(q, jnp.float32), groups)

    def times(
        self,
        a: Rounded,
        b: Rounded,
        summed: tuple[int, int],
        dtype: Any,
    ) -> jax.Array:
        """Returns the product in `dtype`, summed over one dimension of each."""
        dimensions = (((summed[0],), (summed[1],)), ((), ()))
        # float16 would not hold the sums before they are scaled
        inner = jnp.float32 if dtype == jnp.float16 else dtype
        y = lax.dot_general(
            a.numbers, b.numbers, dimensions, preferred_element_type=inner
        )
        return (
            y
            * a.scale.reshape(-1, 1).astype(inner)
            * b.scale.reshape(1, -1).astype(inner)
        ).astype(dtype)

    def selected(
        self,
        skip: jax.Array | None,
        x: jax.Array,
        summed: int,
        weight: bool = False,
        dtype: Any = E4M3,
        turned: bool = False,
    ) -> jax.Array:
        """Returns what x is rounded to, each of its matrices by itself; where a layer is skipped x as it is.

        `turned`: it is for the other dimension already.
        """
        groups = self.groups(summed, weight)
        if self.products == "compute" or (
            turned and groups == self.groups(1 - summed, weight)
        ):
            return x
        y = widened(rounded(x, (1,) * (x.ndim - 2) + groups, dtype), x.dtype)
        return y if skip is None else jnp.where(skip, x, y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    how: Float8Recipe,
    keeps_x: bool,
    x: Any,
    q: Rounded,
    weight: Any,
    b: RoundedWeight | None,
) -> jax.Array:
    """x W by what they are rounded to, `q` and `b`.

    For the backward q is kept, or x if something else keeps that in any case.
    """
    rows = x.shape[1]
    w = how.weight(weight.reshape(rows, -1)) if b is None else b.forward.matrix(rows)
    return how.times(q, w, (1, 0), x.dtype)


def _product_forward(
    how: Float8Recipe, keeps_x: bool, *operands: Any
) -> tuple[jax.Array, Any]:
    """Keeps nothing for the gradient of a frozen weight, since it has none."""
    trained = operands[2].perturbed
    x, q, weight, b = _values(operands)
    kept = (x if keeps_x else q) if trained else None
    return _product(how, keeps_x, x, q, weight, b), (
        kept,
        weight if b is None else None,
        b,
    )


def _product_backward(
    how: Float8Recipe, keeps_x: bool, residuals: Any, g_NF: jax.Array
) -> tuple[Any, ...]:
    kept, weight, b = residuals
    shape = (weight if b is None else b.forward.values).shape
    width = g_NF.shape[1]
    rows = math.prod(shape) // width
    if b is not None and b.turned is not None:
        turned = b.turned.matrix(rows)
    else:
        w = (
            how.weight(weight.reshape(rows, width))
            if b is None
            else b.forward.matrix(rows)
        )
        turned = how.turned(w, 1, weight=True)
    to_x = how.times(
        rounded(g_NF, how.groups(1), how.cotangent_dtype), turned, (1, 1), g_NF.dtype
    )
    if kept is None:
        return to_x, None, None, None
    q = rounded(kept, how.groups(1)) if keeps_x else kept
    if how.wgrad:
        to_weight = how.times(
            how.turned(q, 0),
            rounded(g_NF, how.groups(0), how.cotangent_dtype),
            (0, 0),
            g_NF.dtype,
        )
    else:
        to_weight = lax.dot_general(widened(q, g_NF.dtype), g_NF, OVER_ROWS)
    return to_x, None, to_weight.reshape(shape), None


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


def _values(operands: Any) -> Any:
    return jax.tree.map(
        lambda p: p.value, operands, is_leaf=lambda p: isinstance(p, CustomVJPPrimal)
    )


# By powers of two the same sums as of numbers of 8 bits. Where layers of both kinds run by one program, as in the
# stages of a pipeline, operands are selected. With `blocks` the product is a grouped one.
def _times(
    platform: str,
    x: jax.Array,
    w: jax.Array,
    blocks: Sequence[Any],
    transposed: bool = False,
) -> jax.Array:
    if not blocks:
        return x @ (w.T if transposed else w)
    return implementation(platform, x, w, blocks[0]).multiply_blocks(
        x, w, *blocks, transposed=transposed
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_product(
    how: Float8Recipe,
    platform: str,
    skip: Any,
    x: Any,
    q: Rounded | None,
    weight: Any,
    b: RoundedWeight | None,
    *blocks: Any,
) -> jax.Array:
    """x W in the compute dtype, of what they are rounded to: `q` and `b`, where these are there."""
    x = how.selected(skip, x, 1) if q is None else widened(q, x.dtype)
    return _times(
        platform,
        x,
        _wide_weight(how, skip, weight, b, None if blocks else (x.shape[1], -1)),
        blocks,
    )


def _wide_weight(
    how: Float8Recipe,
    skip: Any,
    weight: Any,
    b: RoundedWeight | None,
    shape: Any,
    turned: bool = False,
) -> jax.Array:
    """Returns the weight as it is multiplied; `turned`: for the product that sums over its outputs."""
    there = None if b is None else (b.turned if turned else None) or b.forward
    w = weight if there is None else widened(there, weight.dtype)
    if skip is not None and b is not None and b.wide is not None:
        w = jnp.where(skip, b.wide, w)
    w = w if shape is None else w.reshape(shape)
    if b is None:
        w = how.selected(skip, w, 0, weight=True)
    if not turned or (b is not None and b.turned is not None):
        return w
    return how.selected(skip, w, 1, weight=True, turned=True)


def _wide_forward(
    how: Float8Recipe, platform: str, *operands: Any
) -> tuple[jax.Array, Any]:
    trained = operands[3].perturbed
    skip, x, q, weight, b, *blocks = _values(operands)
    kept = (x if q is None else None, q) if trained else None
    # of a weight that is there in float8 its dtype
    like = weight if b is None else jnp.zeros((), weight.dtype)
    return _wide_product(how, platform, skip, x, q, weight, b, *blocks), (
        skip,
        kept,
        like,
        b,
        blocks,
    )


def _wide_backward(
    how: Float8Recipe, platform: str, residuals: Any, g: jax.Array
) -> tuple[Any, ...]:
    skip, kept, weight, b, blocks = residuals
    others = (None,) * len(blocks)
    shape = None if blocks else (-1, g.shape[1])
    to_x = _times(
        platform,
        how.selected(skip, g, 1, dtype=how.cotangent_dtype),
        _wide_weight(how, skip, weight, b, shape, turned=True),
        blocks,
        transposed=True,
    )
    if kept is None:
        return None, to_x, None, None, None, *others
    x, q = kept
    x = how.selected(skip, x, 1) if q is None else widened(q, g.dtype)
    if how.wgrad:
        x = how.selected(skip, x, 0, turned=True)
        g = how.selected(skip, g, 0, dtype=how.cotangent_dtype)
    if blocks:
        w = _wide_weight(how, skip, weight, b, shape)
        to_weight = implementation(platform, g, w, blocks[0]).weight_gradient(
            x, g, *blocks, w
        )
    else:
        to_weight = lax.dot_general(x, g, OVER_ROWS)
    return (
        None,
        to_x,
        None,
        to_weight.reshape((weight if b is None else b.forward.values).shape),
        None,
        *others,
    )


_wide_product.defvjp(_wide_forward, _wide_backward, symbolic_zeros=True)


@jax.custom_vjp
def _straight_through(x: jax.Array, instead: jax.Array) -> jax.Array:
    """Returns what stands for x, whose gradient is x's."""
    return instead


_straight_through.defvjp(lambda x, instead: (instead, None), lambda _, g: (g, None))


class Float8Products:
    """The products of a layer in float8.

    `skip`, a boolean on the device where both kinds run by one program: in the compute dtype if it is true.

    `weights` are those that are there in float8, by name; `gathers`: what goes into column-parallel products is
    gathered so.
    """

    def __init__(
        self,
        how: Float8Recipe,
        skip: jax.Array | None,
        weights: Mapping[str, RoundedWeight],
        gathers: bool,
    ) -> None:
        self.how = how
        self.skip = skip
        self.weights = weights
        self.gathers = gathers

    def round(self, x_ND: jax.Array) -> Rows:
        """Rounds what goes into products, for the forward."""
        if self.how.products != "float8":
            return Rows(x_ND, None)
        return Rows(x_ND, rounded(lax.stop_gradient(x_ND), self.how.groups(1)).packed())

    def enter(self, x_BTD: jax.Array, collectives: Collectives) -> jax.Array | Rows:
        """`collectives.enter`, where it `gathers` of rows as they are rounded: what it does to x itself nobody reads
        then, but for its gradient.
        """
        x = collectives.enter(x_BTD)
        width = x_BTD.shape[-1]
        if self.how.products != "float8" or not self.gathers:
            return x

        def entered(part: jax.Array) -> jax.Array:
            part = collectives.enter(part.reshape(*x_BTD.shape[:2], -1))
            return part.reshape(-1, part.shape[-1])

        of_all = self.how.recipe == "tensorwise"
        over = collectives.stream_axes() if of_all else ()
        code, scale = rounded(
            lax.stop_gradient(x_BTD).reshape(-1, width), self.how.groups(1), over=over
        ).packed()
        return Rows(x, Rounded(entered(code), scale if of_all else entered(scale)))

    def linear(self, name: str, rows: Rows, weight: jax.Array) -> jax.Array:
        """x W of the weight `name`. Attention keeps what it gives to its output projection itself."""
        (x, q, _), b = rows, self.weights.get(name)
        if q is None or self.how.recipe == "blockwise":
            return _wide_product(
                self.how, "", self.skip, x, None if name == "out" else q, weight, b
            )
        return _product(self.how, name == "out", x, q, weight, b)

    def grouped(
        self,
        name: str,
        rows: Rows,
        weight: jax.Array,
        platform: str,
        blocks: tuple[jax.Array, ...],
    ) -> jax.Array:
        """`grouped.grouped` of the weights `name`: its `blocks` are the expert of each, and how many are in use."""
        operands = (self.skip, *rows[:2], weight, self.weights.get(name), *blocks)
        axes = frozenset[str]().union(*map(varying, jax.tree.leaves(operands)))
        return _wide_product(self.how, platform, *vary(operands, axes))

    def values(self, rows: Rows) -> jax.Array:
        """Returns the rounded rows, for other products."""
        x, q, values = rows
        if values is not None:
            return values
        chosen = (
            self.how.selected(self.skip, x, 1) if q is None else widened(q, x.dtype)
        )
        return _straight_through(x, lax.stop_gradient(chosen))
