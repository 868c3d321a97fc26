"""Linear attention: a layer whose memory of a row is a matrix a head (`model.delta_rule`), in the place of attention.

    x ─┬─ q ─┐
       ├─ k ─┼─ convolution over 4 tokens, silu ─ q, k over their norms ─┐
       ├─ v ─┘                                                           ├─ rule ── norm ── x silu(z) ── out
       ├─ beta ── sigmoid ───────────────────────────────────────────────┤                     │
       ├─ decay ── -exp(decay_log) softplus(· + decay_bias) ─────────────┘                     │
       └─ z ───────────────────────────────────────────────────────────────────────────────────┘

Yang et al. 2024 ("Gated Delta Networks"), with the norm and gates of Qwen3-Next; by `model.linear.kind` too:

    kda      decay and z out of value_dim numbers a token, decay one a key channel; the norm times sigmoid(z)
             (Kimi Team 2025)
    mamba2   q, k, v are C, B, x: convolved with a bias, of no norm; softplus(decay + decay_bias) x in the place of v;
             out of the rule + skip x; heads that share keys have one norm, behind silu(z) (Dao & Gu 2024)

Heads are split over tensor, all of a head lies on one rank. The arrays before the convolution are kept for the
backward, and nothing behind them but the state at the beginning of a row's piece.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config import LoraConfig, ModelConfig
from meshtrain.model.attention import Heads
from meshtrain.model.collectives import Collectives
from meshtrain.model.delta_rule import Documents, RuleInputs, delta_rule
from meshtrain.model.dropout import Dropout
from meshtrain.model.products import (
    keeping_arguments,
    linear,
    make_adapters,
    make_parameters,
    project,
    rows_of,
    unrounded,
)
from meshtrain.model.rope import Sequence

L2_EPS = 1e-6


class Projected(NamedTuple):
    """The projections of R pieces of rows, and the q, k, v of the tokens before each, which the convolution reaches."""

    qkv: Heads  # [R, T, heads, width]
    earlier: Heads  # [R, conv - 1, heads, width]
    beta: Array | None  # [R, T, H]
    decay: Array  # [R, T, H], or [R, T, H, K]


class Kernels(NamedTuple):
    """The weights between the projections and the rule."""

    qkv: Heads  # [conv, heads, width]
    decay_log: Array  # [H], float32, as the next
    decay_bias: Array  # [H], or [H, K]
    biases: Any = (None,) * 3  # or `Heads`, [heads, width]
    skip: Array | None = None  # [H]


class LinearAttention(nnx.Module):
    """A rule's layer: its projections column-parallel by heads, out row-parallel."""

    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    z: nnx.Param | None = None
    q_conv: nnx.Param
    k_conv: nnx.Param
    v_conv: nnx.Param
    q_conv_bias: nnx.Param | None = None
    k_conv_bias: nnx.Param | None = None
    v_conv_bias: nnx.Param | None = None
    beta: nnx.Param | None = None
    decay: nnx.Param | None = None
    decay_down: nnx.Param | None = None
    decay_up: nnx.Param | None = None
    z_down: nnx.Param | None = None
    z_up: nnx.Param | None = None
    decay_log: nnx.Param
    decay_bias: nnx.Param
    skip: nnx.Param | None = None
    out: nnx.Param
    lora_scale: float
    lora_drop: Callable[[str, Array], Array] | None
    float8: Any = None  # `float8.Float8Products`, where products are

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        rngs: nnx.Rngs,
        lora: LoraConfig | None = None,
    ) -> None:
        self.mix: Callable[..., Array] = partial(mixed, chunk=config.linear.chunk)
        make_parameters(self, name, config, rngs)
        make_adapters(self, name, config, rngs, lora)
        self.norm = GatedNorm(f"{name}.norm", config, rngs)

    def __call__(
        self,
        x_BTD: Any,
        sequence: Sequence,
        collectives: Collectives,
        dropout: Dropout,
    ) -> Array:
        shape, rows = rows_of(self, x_BTD)
        of = partial(self.project_heads, shape[0], rows)
        q, k, v, z, decay = map(of, ("q", "k", "v", "z", "decay"))
        beta = None if self.beta is None else of("beta")
        segments = sequence.segments_BT
        o = self.mix(Heads(q, k, v), beta, decay, self.kernels(), segments, collectives)
        gated = self.norm(checkpoint_name(o.astype(z.dtype), "attention"), z)
        y = project(self, "out", gated.reshape(z.shape[0] * z.shape[1], -1)).reshape(
            shape
        )
        return checkpoint_name(collectives.leave(y), "attention_out")

    def project_heads(self, batch: int, rows: Any, name: str) -> Array:
        """Returns x W, [B, T, everything else of W], or x W_down W_up."""
        plain = unrounded(rows)
        weight = getattr(self, name)
        of = lambda y: y.reshape(batch, -1, *weight.shape[1:])
        if weight is None:
            weight = getattr(self, f"{name}_up")
            few = linear(plain, getattr(self, f"{name}_down")[...])
            return of(linear(checkpoint_name(few, "qkv"), weight[...]))
        exact = name in ("beta", "decay")
        y = linear(plain, weight[...]) if exact else project(self, name, rows)
        return checkpoint_name(of(y), "qkv")

    def kernels(self) -> Kernels:
        """Returns the weights between the projections and the rule."""
        of: Any = lambda name: (
            None if (weight := getattr(self, name)) is None else weight[...]
        )
        return Kernels(
            Heads(*(of(f"{name}_conv") for name in "qkv")),
            self.decay_log[...],
            self.decay_bias[...],
            Heads(*(of(f"{name}_conv_bias") for name in "qkv")),
            of("skip"),
        )


class GatedNorm(nnx.Module):
    """RMSNorm of each head, times silu(z) or sigmoid(z); or of several heads together, behind silu(z)."""

    scale: nnx.Param

    def __init__(self, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
        linear = config.linear
        together = (
            linear.value_heads // linear.key_heads if linear.kind == "mamba2" else 0
        )
        gate = jax.nn.sigmoid if linear.kind == "kda" else jax.nn.silu
        self.function = keeping_arguments(
            partial(normed_gated, config.norm_eps, gate, together)
        )
        make_parameters(self, name, config, rngs)

    def __call__(self, x: Array, z: Array) -> Array:
        return self.function(x, z, self.scale[...])


def normed_gated(
    eps: float,
    gate: Callable[[Array], Array],
    together: int,
    x: Array,
    z: Array,
    scale: Array,
) -> Array:
    y = x.astype(jnp.float32)
    scale = scale.astype(jnp.float32)
    opening = gate(z.astype(jnp.float32))
    if together:
        y = (y * opening).reshape(*y.shape[:-2], -1, together * y.shape[-1])
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y.reshape(x.shape) * scale if together else y * scale * opening
    return y.astype(x.dtype)


def mixed(
    qkv: Heads,
    beta: Array | None,
    decay: Array,
    kernels: Kernels,
    segments_BT: Array | None,
    collectives: Collectives,
    chunk: int,
) -> Array:
    """Returns the rule's output [B, T, H, V], float32, for the tokens that are here."""
    batch, length = decay.shape[:2]
    reach = kernels.qkv[0].shape[0] - 1
    pieces = lambda x: x.reshape(batch * collectives.pieces, -1, *x.shape[2:])
    qkv, beta, decay = jax.tree.map(pieces, (qkv, beta, decay))
    tail = lambda x: x[:, -reach:].reshape(*x.shape[:1], reach, -1)
    # in one message
    joined = jnp.concatenate([tail(x) for x in qkv], axis=-1)
    tails = collectives.tails_before(joined)
    widths = [x.shape[2] * x.shape[3] for x in qkv]
    parts = jnp.split(tails, [widths[0], widths[0] + widths[1]], axis=-1)
    earlier = Heads(
        *(
            part.reshape(*part.shape[:2], *x.shape[2:])
            for part, x in zip(parts, qkv, strict=True)
        )
    )
    documents = None
    if segments_BT is not None:
        ids = pieces(segments_BT)
        documents = Documents(ids, collectives.tails_before(ids[:, -reach:]))
    arrays = Projected(qkv, earlier, beta, decay), kernels
    out = delta_rule(rule_inputs, chunk, collectives, arrays, documents)
    return out.reshape(batch, length, *out.shape[2:])


def rule_inputs(
    arrays: tuple[Projected, Kernels], documents: Documents | None
) -> RuleInputs:
    """Returns what the rule computes with, float32."""
    projected, kernels = arrays
    q, k, v = (
        jax.nn.silu(convolved(*of, documents))
        for of in zip(
            projected.earlier, projected.qkv, kernels.qkv, kernels.biases, strict=True
        )
    )
    steps = jax.nn.softplus(projected.decay.astype(jnp.float32) + kernels.decay_bias)
    rates = jnp.exp(kernels.decay_log)
    if kernels.skip is not None:
        more = v * kernels.skip[:, None]
        return RuleInputs(q, k, v * steps[..., None], -rates * steps, more=more)
    assert projected.beta is not None
    return RuleInputs(
        unit(q) * q.shape[-1] ** -0.5,
        unit(k),
        v,
        -rates.reshape(-1, *(1,) * (steps.ndim - 3)) * steps,
        jax.nn.sigmoid(projected.beta.astype(jnp.float32)),
    )


def convolved(
    earlier: Array,
    x: Array,
    kernel: Array,
    bias: Array | None,
    documents: Documents | None,
) -> Array:
    """Returns Σ kernel_j x_(t - conv + 1 + j) + bias of each channel, within documents, float32 [R, T, ...]."""
    length = x.shape[1]
    seen = jnp.concatenate([earlier, x], axis=1).astype(jnp.float32)
    kernel = kernel.astype(jnp.float32)
    if documents is not None:
        ids = jnp.concatenate([documents.earlier, documents.segments], axis=1)
    total = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for at in range(len(kernel)):
        term = seen[:, at : at + length] * kernel[at]
        if documents is not None:
            same = ids[:, at : at + length] == documents.segments
            term = jnp.where(same[:, :, None, None], term, 0)
        total = total + term
    return total


def unit(x: Array) -> Array:
    """Returns vectors over their norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)
