"""The parts of a transformer block as Flax NNX modules, written for whatever shard of a weight this device has.

`weights` has every parameter's name and shape, `parallel.placement` says how it is split. Sizes are read off the
arrays, never off the config, so the same code runs on whole weights and on shards. Suffixes: B batch, T sequence, D
d_model, H query heads, G key/value heads, K head width, F d_ff, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import vary, varying
from meshtrain.config import LoraConfig, ModelConfig
from meshtrain.families import FAMILIES
from meshtrain.model.attention import attend, attention_arguments
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.products import (
    hidden,
    keeping_arguments,
    linear,
    make_adapters,
    make_parameters,
    project,
    rows_of,
    unrounded,
)
from meshtrain.model.rope import Sequence, rotate


def normalised(
    eps: float,
    centred: bool,
    plus_one: bool,
    over_ranks: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Returns x over its root mean square along the dimensions of `scale` (`centred`: less its mean first), times
    `scale` (`plus_one`: and 1); float32 but for the result. `over_ranks` takes the mean of the squares over the ranks
    that share these dimensions.
    """
    axes = tuple(range(-scale.ndim, 0))
    # Here and not where they meet in float32: the gradient is summed over tensor in x's dtype.
    y = vary(x, varying(scale)).astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=axes, keepdims=True)
    mean_square = over_ranks(jnp.mean(y * y, axis=axes, keepdims=True))
    y = y * jax.lax.rsqrt(mean_square + eps)
    scale = scale.astype(jnp.float32)
    return (y * (1 + scale if plus_one else scale)).astype(x.dtype)


def unchanged(x: jax.Array) -> jax.Array:
    return x


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or, with a bias, LayerNorm; computed in float32.

    Inside a mesh `scale` varies over `tensor`, x need not: where they meet is Megatron's f, whose transpose sums the
    gradient over the tensor ranks.
    """

    scale: nnx.Param
    bias: nnx.Param | None = None

    def __init__(self, name: str, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.eps = config.norm_eps
        self.plus_one = config.norm_plus_one
        make_parameters(self, name, config, rngs)

    def __call__(
        self,
        x: jax.Array,
        share: Callable[[jax.Array], jax.Array] = unchanged,
        over_ranks: Callable[[jax.Array], jax.Array] = unchanged,
    ) -> jax.Array:
        """`share` is what its weights go through first, where x is in the residual stream; `over_ranks` as in
        `normalised`.
        """
        function = keeping_arguments(
            partial(
                normalised, self.eps, self.bias is not None, self.plus_one, over_ranks
            )
        )
        y = function(x, share(self.scale[...]))
        if self.bias is None:
            return y
        return y + share(self.bias[...])


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
    sinks: nnx.Param | None = None
    z: nnx.Param | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    lora_scale: float
    lora_drop: Callable[[str, jax.Array], jax.Array] | None
    float8: Any = None  # `float8.Float8Products`, where products are

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        rngs: nnx.Rngs,
        lora: LoraConfig | None = None,
    ) -> None:
        self.attend: Callable[..., jax.Array] = partial(
            attend, **attention_arguments(config)
        )
        # Query heads that share a key/value head
        self.group = config.heads // config.kv_heads
        make_parameters(self, name, config, rngs)
        make_adapters(self, name, config, rngs, lora)
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                Norm(f"{name}.{which}", config, rngs) for which in ("q_norm", "k_norm")
            )
        self.joint_norm = FAMILIES[config.family].joint_qk_norm

    def __call__(
        self,
        x_BTD: jax.Array,
        sequence: Sequence,
        collectives: Collectives,
        dropout: Dropout,
    ) -> jax.Array:
        (shape, rows) = rows_of(self, x_BTD)
        more = {} if self.sinks is None else {"sinks": self.sinks[...]}
        if sequence.maxima is not None:
            more["counted"] = sequence.maxima.counted_BT
        a = self.attended(
            shape, rows, sequence, collectives, dropout, local=sequence.local, **more
        )
        if sequence.maxima is not None:
            a = sequence.maxima.record(*a)
        if self.z is not None:
            z = checkpoint_name(project(self, "z", rows), "qkv")
            a = keeping_arguments(gated)(a, z)
        y = project(self, "out", a).reshape(shape)
        if self.out_bias is not None:
            y = y + collectives.share(self.out_bias[...])
        return checkpoint_name(collectives.leave(y), "attention_out")

    def attended(
        self,
        shape: tuple[int, ...],
        rows: Any,
        sequence: Sequence,
        collectives: Collectives,
        *more: Any,
        **how: Any,
    ) -> jax.Array:
        """Returns what attention makes of rows [N, D] as products take them, [N, H*K]; the rest of its arguments are
        those of `attend`.
        """
        heads_of = []
        for name in "qkv":
            weight = getattr(self, name)
            bias = getattr(self, f"{name}_bias")
            y = project(self, name, rows).reshape(shape[0], -1, *weight.shape[-2:])
            heads_of.append(y if bias is None else y + bias[...])
        q, k, v = heads_of
        keep = partial(checkpoint_name, name="qkv")
        if self.q_norm is not None and self.k_norm is not None:
            # Kept as the norms take them: what they give is soon computed again, a product is not.
            over_ranks = collectives.mean_over_heads if self.joint_norm else unchanged
            q, k = (
                norm(keep(x), over_ranks=over_ranks)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        if sequence.rotary_TK is not None:
            q = rotate(q, *sequence.rotary_TK)
            k = rotate(k, *sequence.rotary_TK)
        heads = q.shape[2]
        groups = k.shape[2]
        # Key/value heads that are replicated over tensor: this rank takes those of its query heads.
        if groups * self.group != heads:
            mine = (collectives.first_head(heads) + jnp.arange(heads)) // self.group
            k = jnp.take(k, mine, axis=2)
            v = jnp.take(v, mine, axis=2)
        if self.q_norm is None:
            q = keep(q)
            k = keep(k)
        v = keep(v)
        return self.attend(q, k, v, sequence.segments_BT, collectives, *more, **how)


def gated(x: jax.Array, z: jax.Array) -> jax.Array:
    """Returns x times the sigmoid of z."""
    return x * jax.nn.sigmoid(z)


class MLP(nnx.Module):
    """Two or, gated, three products: d_ff split over the ranks, in column-parallel and out row-parallel."""

    gate: nnx.Param | None = None
    up: nnx.Param
    down: nnx.Param
    up_bias: nnx.Param | None = None
    down_bias: nnx.Param | None = None
    token_gate: nnx.Param | None = None
    lora_scale: float
    lora_drop: Callable[[str, jax.Array], jax.Array] | None
    float8: Any = None  # `float8.Float8Products`, where products are

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        rngs: nnx.Rngs,
        lora: LoraConfig | None = None,
    ) -> None:
        self.activation = config.activation
        self.limit = FAMILIES[config.family].gate_limit
        make_parameters(self, name, config, rngs)
        make_adapters(self, name, config, rngs, lora)

    def __call__(self, x_BTD: jax.Array, collectives: Collectives) -> jax.Array:
        shape, rows = rows_of(self, x_BTD)
        up = project(self, "up", rows)
        if self.up_bias is not None:
            up = up + self.up_bias[...]
        branches: tuple[jax.Array, ...] = (up,)
        if self.gate is not None:
            branches = (project(self, "gate", rows), up)
        branches = tuple(checkpoint_name(b, "mlp_in") for b in branches)
        function = hidden(self.activation, self.gate is not None, self.limit)
        if self.token_gate is None:
            h = function(*branches)
        else:
            # before the last product, so that its output is not kept for the gate's gradient
            z = linear(unrounded(rows), self.token_gate[...])
            h = keeping_arguments(lambda z, *xs: gated(function(*xs), z))(z, *branches)
        y = project(self, "down", checkpoint_name(h, "mlp_hidden")).reshape(shape)
        if self.down_bias is not None:
            y = y + collectives.share(self.down_bias[...])
        return checkpoint_name(collectives.leave(y), "mlp_out")
