"""The pieces of attention, MLP and experts: their parameters, products with them, LoRA's beside, and the functions
between two products.

    y = x W + scale (x A) B        W frozen: of x nothing is kept for its gradient; A and B are weights like others

A product keeps its arguments for its backward as they are, so that the pipeline stashes no copy of a weight.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.custom_derivatives import CustomVJPPrimal

from meshtrain.config import LoraConfig, ModelConfig
from meshtrain.config.model import PROJECTIONS
from meshtrain.families import EXACT_GELU, QUICK_GELU
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.weights import Weight, adapters, lora_scale, weights

ProductResiduals = tuple[jax.Array | None, jax.Array]


# --- parameters


def make_parameters(
    module: nnx.Module, name: str, config: ModelConfig, rngs: nnx.Rngs
) -> None:
    """Gives a module its float32 parameters: those whose names in `weights` begin with the module's own, `name`."""
    for weight in weights(config):
        _make(module, name, weight, rngs)


def make_adapters(
    module: Any,
    name: str,
    config: ModelConfig,
    rngs: nnx.Rngs,
    lora: LoraConfig | None,
) -> None:
    """Makes LoRA's parameters likewise, from random numbers of their own, so that the model is the one without them."""
    module.lora_scale = 0.0
    module.lora_drop = None
    if lora is not None and lora.rank:
        module.lora_scale = lora_scale(lora)
        for weight in adapters(config, lora):
            _make(module, name, weight, rngs)


def _make(module: nnx.Module, name: str, weight: Weight, rngs: nnx.Rngs) -> None:
    """Gives the module `name` the parameter of a weight, if it is one of its own."""
    parent, _, attribute = weight.name.rpartition(".")
    if parent != name:
        return
    shape = tuple(n for _, n in weight.dims)
    if weight.bound:
        drawn = jax.random.uniform(
            rngs.lora(), shape, minval=-weight.bound, maxval=weight.bound
        )
    elif weight.std:
        drawn = weight.std * jax.random.normal(rngs.params(), shape)
    else:
        # of a dtype that is given: with a weak one the first step would be compiled once more for the second
        drawn = jnp.full(shape, np.asarray(weight.fill), jnp.float32)
    setattr(module, attribute, nnx.Param(drawn))


# --- products


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
    if float8 is None:
        return collectives.enter(x_BTD)
    return float8.enter(x_BTD, collectives)


def unrounded(x_BTD: Any) -> jax.Array:
    """Returns what has entered as it is in the compute dtype."""
    return x_BTD if isinstance(x_BTD, jax.Array) else x_BTD.x


def rows_of(module: Any, x_BTD: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape of what a module is called with, entered or not, and its rows as `project` takes them."""
    x = unrounded(x_BTD)
    rows = _rows(x)
    if module.float8 is None:
        return x.shape, rows
    rows = module.float8.round(rows) if x is x_BTD else x_BTD._replace(x=rows)
    if not module.lora_scale:
        return x.shape, rows
    return x.shape, rows._replace(values=module.float8.values(rows))


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
    lambda residuals, g_NV: _linear_backward(
        residuals, g_NV.astype(residuals[0].dtype)
    ),
)


def use_adapters(
    block: Any, on: bool, dropout: Dropout, collectives: Collectives
) -> None:
    """Sets whether the block's adapters count, and the dropout of their inputs: the same on every mesh."""

    def drop(name: str, x_ND: jax.Array) -> jax.Array:
        # what goes into row-parallel weights is split over the ranks
        first = collectives.first_head(x_ND.shape[1]) if name in ("out", "down") else 0
        return dropout.at(PROJECTIONS.index(name)).rows_of(
            x_ND, first, collectives.positions
        )

    for module in filter(None, (block.attention, block.mlp)):
        module.lora_scale = module.lora_scale if on else 0.0
        module.lora_drop = drop if dropout.rate else None


# --- the functions between two products


def keeping_arguments(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function` with its arguments as the only residuals, and the rest computed again in the backward pass:
    for cheap functions.

    jax.checkpoint would not do: a policy of a checkpoint around it reaches inside.
    """
    run = jax.custom_vjp(function)
    run.defvjp(
        lambda *xs: (function(*xs), xs),
        lambda xs, cotangent: jax.vjp(function, *xs)[1](cotangent),
    )
    return run


@cache
def hidden(
    activation: str, gated: bool, limit: float = 0.0
) -> Callable[..., jax.Array]:
    """Returns the MLP's own function: activation(gate) * up where it is `gated` (SwiGLU: Shazeer 2020), else
    activation(up).

    With a `limit` gate is at most that, and up, to which 1 is added, within it (gpt-oss: OpenAI 2025).
    """
    others: dict[str, Callable[[jax.Array], jax.Array]] = {
        EXACT_GELU: partial(jax.nn.gelu, approximate=False),
        QUICK_GELU: lambda x: x * jax.nn.sigmoid(1.702 * x),
    }
    function = others.get(activation) or getattr(jax.nn, activation)
    if limit and gated:
        return keeping_arguments(
            lambda gate, up: (
                function(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)
            )
        )
    return keeping_arguments(
        (lambda gate, up: function(gate) * up) if gated else (lambda up: function(up))
    )
