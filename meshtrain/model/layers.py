"""The parts of a transformer block as Flax NNX modules, written for whatever share of a weight this device holds.

Every parameter names the axes of its dimensions; `mesh.RULES` says over which mesh axis a name is split. Sizes are read off the
arrays, never off the config, so the same code runs on whole weights and on shards. Suffixes: B batch, T sequence, D d_model,
H query heads, G key/value heads, K head width, F d_ff, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config import ModelConfig
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What a block must know of the sequences besides their activations."""

    rotary_TK: tuple[jax.Array, jax.Array] | None = (
        None  # cos, sin: [T, K/2], or [B, T, K/2] where positions differ by sequence
    )
    segments_BT: jax.Array | None = None  # documents packed in a sequence; attention stays within one


def parameter(rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], std: float | None) -> nnx.Param:
    """A float32 parameter with named axes: normal with `std`, zeros for std 0, ones for std None."""
    if std:
        value = std * jax.random.normal(rngs.params(), shape)
    else:
        value = jnp.ones(shape) if std is None else jnp.zeros(shape)
    return nnx.Param(value, axes=axes)


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


def keeping_arguments(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` with nothing but its arguments kept for the backward pass, which computes the rest again: for cheap functions.

    jax.checkpoint would not do: a policy of a checkpoint around it reaches inside.
    """
    run = jax.custom_vjp(function)
    run.defvjp(lambda *xs: (function(*xs), xs), lambda xs, cotangent: jax.vjp(function, *xs)[1](cotangent))
    return run


swiglu = keeping_arguments(lambda gate, up: jax.nn.silu(gate) * up)
gelu = keeping_arguments(lambda x: jax.nn.gelu(x))


def normalised(eps: float, centred: bool, x: jax.Array) -> jax.Array:
    """x over its root mean square along the last dimension (`centred`: less its mean first), in float32 but for the result."""
    y = x.astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or, with a bias, LayerNorm; computed in float32.

    Inside a mesh `scale` varies over `tensor`: its product with the replicated, normalised x is where Megatron's f sits,
    whose transpose sums the gradient over the tensor ranks.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.eps = config.norm_eps
        self.scale = parameter(rngs, ("embed",), (config.d_model,), None)
        self.bias = parameter(rngs, ("embed",), (config.d_model,), 0.0) if config.family == "gpt2" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = keeping_arguments(partial(normalised, self.eps, self.bias is not None))(x) * self.scale[...]
        return y if self.bias is None else y + self.bias[...]


class Attention(nnx.Module):
    """Grouped-query attention: q, k, v column-parallel by heads, out row-parallel."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        d, h, g, k = config.d_model, config.heads, config.kv_heads or config.heads, config.head_dim or 1
        std, biases = config.init_std, config.family == "gpt2"
        self.attend: Callable[..., jax.Array] = attend
        self.group = h // g  # query heads that share a key/value head
        self.q = parameter(rngs, ("embed", "heads", "head"), (d, h, k), std)
        self.k = parameter(rngs, ("embed", "kv_heads", "head"), (d, g, k), std)
        self.v = parameter(rngs, ("embed", "kv_heads", "head"), (d, g, k), std)
        self.out = parameter(rngs, ("heads", "head", "embed"), (h, k, d), std / (2 * config.layers) ** 0.5)
        self.q_bias = parameter(rngs, ("heads", "head"), (h, k), 0.0) if biases else None
        self.k_bias = parameter(rngs, ("kv_heads", "head"), (g, k), 0.0) if biases else None
        self.v_bias = parameter(rngs, ("kv_heads", "head"), (g, k), 0.0) if biases else None
        self.out_bias = parameter(rngs, ("embed",), (d,), 0.0) if biases else None

    def __call__(self, x_BTD: jax.Array, sequence: Sequence, collectives: Collectives, dropout: Dropout) -> jax.Array:
        rows = x_BTD.reshape(-1, x_BTD.shape[-1])
        sequences = x_BTD.shape[0]
        q = project(rows, sequences, self.q, self.q_bias)
        k = project(rows, sequences, self.k, self.k_bias)
        v = project(rows, sequences, self.v, self.v_bias)
        if sequence.rotary_TK is not None:
            q, k = rotate(q, *sequence.rotary_TK), rotate(k, *sequence.rotary_TK)
        heads, groups = q.shape[2], k.shape[2]
        if (
            groups * self.group != heads
        ):  # key/value heads are replicated over tensor: pick those of this rank's query heads
            mine = (collectives.first_head(heads) + jnp.arange(heads)) // self.group
            k, v = jnp.take(k, mine, axis=2), jnp.take(v, mine, axis=2)
        q, k, v = (checkpoint_name(a, "qkv") for a in (q, k, v))
        a = self.attend(q, k, v, sequence.segments_BT, collectives, dropout)
        y = linear(a, self.out[...]).reshape(x_BTD.shape)
        if self.out_bias is not None:
            y = y + collectives.share(self.out_bias[...])
        return checkpoint_name(collectives.leave(y), "attention_out")


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020) or GELU: d_ff split over the ranks, in column-parallel and out row-parallel."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        d, f, std, gpt2 = config.d_model, config.d_ff or 1, config.init_std, config.family == "gpt2"
        self.gate = None if gpt2 else parameter(rngs, ("embed", "mlp"), (d, f), std)
        self.up = parameter(rngs, ("embed", "mlp"), (d, f), std)
        self.down = parameter(rngs, ("mlp", "embed"), (f, d), std / (2 * config.layers) ** 0.5)
        self.up_bias = parameter(rngs, ("mlp",), (f,), 0.0) if gpt2 else None
        self.down_bias = parameter(rngs, ("embed",), (d,), 0.0) if gpt2 else None

    def __call__(self, x_BTD: jax.Array, collectives: Collectives) -> jax.Array:
        rows = x_BTD.reshape(-1, x_BTD.shape[-1])
        up = linear(rows, self.up[...])
        if self.up_bias is not None:
            up = up + self.up_bias[...]
        h = gelu(up) if self.gate is None else swiglu(linear(rows, self.gate[...]), up)
        y = linear(checkpoint_name(h, "mlp_hidden"), self.down[...]).reshape(x_BTD.shape)
        if self.down_bias is not None:
            y = y + collectives.share(self.down_bias[...])
        return checkpoint_name(collectives.leave(y), "mlp_out")


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = Norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config, rngs)
        self.mlp = MLP(config, rngs)

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


rotate = jax.custom_vjp(_turned)  # its transpose turns back: nothing is kept but the angles
rotate.defvjp(
    lambda x, cos, sin: (_turned(x, cos, sin), (cos, sin)),
    lambda angles, cotangent: (_turned(cotangent, angles[0], -angles[1]), None, None),
)
