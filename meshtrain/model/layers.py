"""The parts of a transformer block as Flax NNX modules, written for whatever share of a weight this device holds.

`weights` has every parameter's name and shape, `parallel.placement` says how it is split. Sizes are read off the arrays, never off
the config, so the same code runs on whole weights and on shards. Suffixes: B batch, T sequence, D d_model,
H query heads, G key/value heads, K head width, F d_ff, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import vary, varying
from meshtrain.config import ModelConfig
from meshtrain.families import FAMILIES
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.weights import weights


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What a block must know of the sequences besides their activations."""

    # cos, sin: [T, K/2], or [B, T, K/2] where positions differ by sequence
    rotary_TK: tuple[jax.Array, jax.Array] | None = None
    # documents packed in a sequence; attention stays within one
    segments_BT: jax.Array | None = None


def make_parameters(module: nnx.Module, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
    """Gives a module its float32 parameters: those whose names in `weights` begin with the module's own, `name`."""
    for weight in weights(config):
        parent, _, attribute = weight.name.rpartition(".")
        if parent == name:
            shape = tuple(n for _, n in weight.dims)
            # of a dtype that is given: with a weak one the first step would be compiled once more for the second
            filled = jnp.full(shape, weight.fill, jnp.float32)
            drawn = weight.std * jax.random.normal(rngs.params(), shape) if weight.std else filled
            setattr(module, attribute, nnx.Param(drawn))


def _product(x_ND: jax.Array, weight: jax.Array) -> jax.Array:
    """x W, [N, everything else of W], where W's first dimensions make up D.

    Weights meet rows, never [B, T, D]: with two dimensions to sum over in the weight's gradient, XLA's CPU backend copies the
    cotangent into its transpose, element by element and fused with what made it; a SwiGLU's backward then takes twice the time.
    Kept for the backward are the arguments as they are: of a weight in another shape the pipeline would stash a copy.
    """
    return x_ND @ weight.reshape(x_ND.shape[1], -1)


linear = jax.custom_vjp(_product)


def _linear_backward(kept: tuple[jax.Array, jax.Array], g_NF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, weight = kept
    over_rows = (((0,), (0,)), ((), ()))
    gradient = jax.lax.dot_general(x_ND, g_NF, over_rows).reshape(weight.shape)
    return g_NF @ weight.reshape(x_ND.shape[1], -1).T, gradient


linear.defvjp(lambda x, weight: (_product(x, weight), (x, weight)), _linear_backward)


@jax.custom_vjp
def linear_float32(x_ND: jax.Array, weight_DV: jax.Array) -> jax.Array:
    """x W in float32, of operands as they are; its cotangent is rounded to theirs, or both products of the backward were float32's."""
    return jnp.matmul(x_ND, weight_DV, preferred_element_type=jnp.float32)


linear_float32.defvjp(
    lambda x, weight: (linear_float32(x, weight), (x, weight)),
    lambda kept, g_NV: _linear_backward(kept, g_NV.astype(kept[0].dtype)),
)


def keeping_arguments(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` with nothing but its arguments kept for the backward pass, which computes the rest again: for cheap functions.

    jax.checkpoint would not do: a policy of a checkpoint around it reaches inside.
    """
    run = jax.custom_vjp(function)
    run.defvjp(lambda *xs: (function(*xs), xs), lambda xs, cotangent: jax.vjp(function, *xs)[1](cotangent))
    return run


@cache
def hidden(activation: str, gated: bool) -> Callable[..., jax.Array]:
    """The MLP's own function: activation(gate) * up where it is `gated` (SwiGLU: Shazeer 2020), else activation(up)."""
    function = getattr(jax.nn, activation)
    return keeping_arguments((lambda gate, up: function(gate) * up) if gated else (lambda up: function(up)))


def normalised(eps: float, centred: bool, x: jax.Array, scale: jax.Array) -> jax.Array:
    """x over its root mean square along the last dimension (`centred`: less its mean first), times `scale`; float32 but for the result."""
    # Here and not where they meet in float32: the gradient is summed over tensor in x's dtype.
    y = vary(x, varying(scale)).astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or, with a bias, LayerNorm; computed in float32.

    Inside a mesh `scale` varies over `tensor`, x need not: where they meet is Megatron's f, whose transpose sums the gradient over
    the tensor ranks.
    """

    scale: nnx.Param
    bias: nnx.Param | None = None

    def __init__(self, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.eps = config.norm_eps
        make_parameters(self, name, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = keeping_arguments(partial(normalised, self.eps, self.bias is not None))(x, self.scale[...])
        return y if self.bias is None else y + self.bias[...]


class Attention(nnx.Module):
    """Grouped-query attention: q, k, v column-parallel by heads, out row-parallel."""

    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    out: nnx.Param
    q_bias: nnx.Param | None = None
    k_bias: nnx.Param | None = None
    v_bias: nnx.Param | None = None
    out_bias: nnx.Param | None = None

    def __init__(self, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attend: Callable[..., jax.Array] = attend
        self.group = config.heads // config.kv_heads  # query heads that share a key/value head
        make_parameters(self, name, config, rngs)

    def __call__(self, x_BTD: jax.Array, sequence: Sequence, collectives: Collectives, dropout: Dropout) -> jax.Array:
        rows = x_BTD.reshape(-1, x_BTD.shape[-1])
        sequences = x_BTD.shape[0]
        q = project(rows, sequences, self.q, self.q_bias)
        k = project(rows, sequences, self.k, self.k_bias)
        v = project(rows, sequences, self.v, self.v_bias)
        if sequence.rotary_TK is not None:
            q, k = rotate(q, *sequence.rotary_TK), rotate(k, *sequence.rotary_TK)
        heads, groups = q.shape[2], k.shape[2]
        # Key/value heads that are replicated over tensor: this rank takes those of its query heads.
        if groups * self.group != heads:
            mine = (collectives.first_head(heads) + jnp.arange(heads)) // self.group
            k, v = jnp.take(k, mine, axis=2), jnp.take(v, mine, axis=2)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        a = self.attend(q, k, v, sequence.segments_BT, collectives, dropout)
        y = linear(a, self.out[...]).reshape(x_BTD.shape)
        if self.out_bias is not None:
            y = y + collectives.share(self.out_bias[...])
        return checkpoint_name(collectives.leave(y), "attention_out")


class MLP(nnx.Module):
    """Two or, gated, three products: d_ff split over the ranks, in column-parallel and out row-parallel."""

    gate: nnx.Param | None = None
    up: nnx.Param
    down: nnx.Param
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None

    def __init__(self, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.activation = FAMILIES[config.family].activation
        make_parameters(self, name, config, rngs)

    def __call__(self, x_BTD: jax.Array, collectives: Collectives) -> jax.Array:
        rows = x_BTD.reshape(-1, x_BTD.shape[-1])
        up = linear(rows, self.up[...])
        if self.up_bias is not None:
            up = up + self.up_bias[...]
        branches = (up,) if self.gate is None else (linear(rows, self.gate[...]), up)
        h = hidden(self.activation, self.gate is not None)(*(checkpoint_name(b, "mlp_in") for b in branches))
        y = linear(checkpoint_name(h, "mlp_hidden"), self.down[...]).reshape(x_BTD.shape)
        if self.down_bias is not None:
            y = y + collectives.share(self.down_bias[...])
        return checkpoint_name(collectives.leave(y), "mlp_out")


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = Norm("blocks.attention_norm", config, rngs)
        self.attention = Attention("blocks.attention", config, rngs)
        self.mlp_norm = Norm("blocks.mlp_norm", config, rngs)
        self.mlp = MLP("blocks.mlp", config, rngs)

    def __call__(self, x_BTD: jax.Array, sequence: Sequence, collectives: Collectives, dropout: Dropout) -> jax.Array:
        first = collectives.first_position(x_BTD.shape[1])
        a = self.attention(collectives.enter(self.attention_norm(x_BTD)), sequence, collectives, dropout.at(0))
        x_BTD = x_BTD + dropout.at(1).stream(a, first)
        m = self.mlp(collectives.enter(self.mlp_norm(x_BTD)), collectives)
        return x_BTD + dropout.at(2).stream(m, first)


def project(x_ND: jax.Array, sequences: int, weight_DHK: nnx.Param, bias_HK: nnx.Param | None) -> jax.Array:
    """x W (+ b) into heads: rows [B T, D] to [B, T, H, K]."""
    y = linear(x_ND, weight_DHK[...]).reshape(sequences, -1, *weight_DHK.shape[-2:])
    return y if bias_HK is None else y + bias_HK[...]


def rotary(positions: jax.Array, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of RoPE (Su et al. 2021) at `positions`: [..., width / 2] each, float32."""
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _turned(x_BTHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + K/2]) by the angles of their positions."""
    cos, sin = cos[..., None, :].astype(x_BTHK.dtype), sin[..., None, :].astype(x_BTHK.dtype)
    low, high = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


# Its transpose turns back: nothing is kept but the angles.
rotate = jax.custom_vjp(_turned)
rotate.defvjp(
    lambda x, cos, sin: (_turned(x, cos, sin), (cos, sin)),
    lambda angles, cotangent: (_turned(cotangent, angles[0], -angles[1]), None, None),
)
