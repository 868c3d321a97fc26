"""Products with weights, and LoRA's beside them.

    y = x W + scale (x A) B        W frozen: of x nothing is kept for its gradient; A and B are weights like others

A product keeps its arguments for its backward as they are, so that the pipeline stashes no copy of a weight."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.config.model import PROJECTIONS
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout

ProductResiduals = tuple[jax.Array | None, jax.Array]


def _product(x_ND: jax.Array, weight: jax.Array) -> jax.Array:
    """x W, [N, everything else of W], where W's first dimensions make up D.

    Weights meet rows, never [B, T, D]: with two dimensions to sum over in the weight's gradient, XLA's CPU backend
    copies the cotangent into its transpose, element by element and fused with what made it; a SwiGLU's backward then
    takes twice the time. Kept for the backward are the arguments as they are: of a weight in another shape the pipeline
    would stash a copy.
    """
    return x_ND @ weight.reshape(x_ND.shape[1], -1)


linear = jax.custom_vjp(_product)


def _linear_forward(
    x_ND: CustomVJPPrimal, weight: CustomVJPPrimal
) -> tuple[jax.Array, ProductResiduals]:
    """Keeps no x for the gradient of a frozen weight, since it has none."""
    residual = x_ND.value if weight.perturbed else None
    return _product(x_ND.value, weight.value), (residual, weight.value)


def _linear_backward(
    residuals: ProductResiduals, g_NF: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    x_ND, weight = residuals
    width = math.prod(weight.shape) // g_NF.shape[1]
    to_x = g_NF @ weight.reshape(width, -1).T
    if x_ND is None:
        return to_x, None
    over_rows = (((0,), (0,)), ((), ()))
    return to_x, jax.lax.dot_general(x_ND, g_NF, over_rows).reshape(weight.shape)


linear.defvjp(_linear_forward, _linear_backward, symbolic_zeros=True)


def enter(x_BTD: jax.Array, collectives: Collectives, module: Any) -> Any:
    """Returns what `collectives.enter` makes of x, as the products of a module take it, where there is one."""
    float8 = module and module.float8
    return collectives.enter(x_BTD) if float8 is None else float8.enter(x_BTD, collectives)


def unrounded(x_BTD: Any) -> jax.Array:
    """Returns what has entered as it is in the compute dtype."""
    return x_BTD if isinstance(x_BTD, jax.Array) else x_BTD.x


def rows_of(module: Any, x_BTD: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape of what a module is called with, entered or not, and its rows as `project` takes them."""
    if not isinstance(x_BTD, jax.Array):
        return x_BTD.x.shape, x_BTD._replace(x=_rows(x_BTD.x))
    return x_BTD.shape, _rows(x_BTD) if module.float8 is None else module.float8.round(_rows(x_BTD))


def _rows(x_BTD: jax.Array) -> jax.Array:
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def project(module: Any, name: str, x_ND: Any) -> jax.Array:
    """x W, [N, everything else of W], of the module's weight `name`; with an adapter scale (x A) B more (Hu et al.
    2021, section 4.1).

    The two are never multiplied into W: that would be a second W, and for the backward another one.
    """
    weight = getattr(module, name)[...]
    float8 = module.float8
    if float8 is None:
        y = linear(x_ND, weight)
    else:
        rows = float8.round(x_ND) if isinstance(x_ND, jax.Array) else x_ND
        y = float8.linear(name, rows, weight)
        x_ND = float8.values(rows)
    if getattr(module, f"{name}_lora_a", None) is None or not module.lora_scale:
        return y
    a, b = (getattr(module, f"{name}_lora_{which}")[...] for which in "ab")
    dropped = x_ND if module.lora_drop is None else module.lora_drop(name, x_ND)
    return y + linear(_times(module.lora_scale, linear(dropped, a)), b)


# Plain multiplication keeps its constant for the backward: a scalar for every product in the pipeline's stash.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _times(scale: float, x: jax.Array) -> jax.Array:
    return x * scale


_times.defvjp(lambda scale, x: (x * scale, None), lambda scale, _, g: (g * scale,))


@jax.custom_vjp
def linear_float32(x_ND: jax.Array, weight_DV: jax.Array) -> jax.Array:
    """x W in float32, of operands as they are; its cotangent is rounded to theirs, or both products of the backward
    were float32's.
    """
    return jnp.matmul(x_ND, weight_DV, preferred_element_type=jnp.float32)


linear_float32.defvjp(
    lambda x, weight: (linear_float32(x, weight), (x, weight)),
    lambda residuals, g_NV: _linear_backward(residuals, g_NV.astype(residuals[0].dtype)),
)


def use_adapters(block: Any, on: bool, dropout: Dropout, collectives: Collectives) -> None:
    """Sets whether the block's adapters count, and the dropout of their inputs: the same on every mesh."""

    def drop(name: str, x_ND: jax.Array) -> jax.Array:
        # what goes into row-parallel weights is split over the ranks
        first = collectives.first_head(x_ND.shape[1]) if name in ("out", "down") else 0
        return dropout.at(PROJECTIONS.index(name)).rows_of(x_ND, first, collectives.positions)

    for module in filter(None, (block.attention, block.mlp)):
        module.lora_scale = module.lora_scale if on else 0.0
        module.lora_drop = drop if dropout.rate else None
