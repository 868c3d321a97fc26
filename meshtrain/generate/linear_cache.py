"""The memory of linear attention: of one size, however much a model has read.

    one layer on one device    state [S, H, K, V] float32        behind the last token
                               q, k, v [S, heads, conv - 1, width]    of the last tokens, before the convolution

Heads come before tokens and are split over tensor, as those of `generate.cache` are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshtrain.compat import vary, varying
from meshtrain.config.model import LinearConfig
from meshtrain.model.attention import Heads
from meshtrain.model.delta_rule import read_state, step
from meshtrain.model.linear_attention import Kernels, Projected, rule_inputs


class LinearCache(NamedTuple):
    """The memory of one layer for S slots."""

    state: Array
    q: Array
    k: Array
    v: Array

    def put(self, new: "LinearCache", slot: Array, length: Array) -> "LinearCache":
        """Returns the cache with one sequence's in a slot; one that lies on another rank changes nothing."""

        def put(old: Array, new: Array) -> Array:
            here = (jnp.arange(len(old)) == slot).reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(here, vary(new.astype(old.dtype), varying(old)), old)

        return jax.tree.map(put, self, new)

    def laid_out(self, lengths: Array, positions: int) -> "LinearCache":
        """Returns what is remembered of sequences as that of slots, which is the same."""
        return self


def no_memory(linear: LinearConfig, slots: int, dtype: Any) -> LinearCache:
    """Returns the cache of slots that have read nothing, all heads of it."""
    reach = linear.conv - 1
    keys = jnp.zeros((slots, linear.key_heads, reach, linear.key_dim), dtype)
    values = jnp.zeros((slots, linear.value_heads, reach, linear.value_dim), dtype)
    state = (slots, linear.value_heads, linear.key_dim, linear.value_dim)
    return LinearCache(jnp.zeros(state, jnp.float32), keys, keys, values)


class PromptMix:
    """The rule over prompts, of which it keeps what is remembered behind each: `cache`, [B, ...]."""

    def __init__(self, chunk: int, lengths: Array | None = None) -> None:
        self.chunk = chunk
        self.lengths = lengths  # [B]; None: all tokens are read
        self.cache: LinearCache

    def __call__(
        self,
        qkv: Heads,
        beta: Array | None,
        decay: Array,
        kernels: Kernels,
        *_: Any,
    ) -> Array:
        reach = kernels.qkv[0].shape[0] - 1
        lengths = (
            jnp.full(len(decay), decay.shape[1])
            if self.lengths is None
            else self.lengths
        )
        earlier = Heads(*(jnp.zeros_like(x[:, :1]).repeat(reach, axis=1) for x in qkv))
        inputs = rule_inputs((Projected(qkv, earlier, beta, decay), kernels), None)
        # a token that neither decays nor adds anything
        read = (jnp.arange(decay.shape[1]) < lengths[:, None])[..., None, None]
        decays = inputs.log_decay.reshape(*decay.shape[:3], -1) * read
        inputs = inputs._replace(
            k=inputs.k * read, log_decay=decays.reshape(decay.shape)
        )
        heads = (len(decay), *inputs.v.shape[2:3], inputs.k.shape[3], inputs.v.shape[3])
        start = vary(
            jnp.zeros(heads, jnp.float32), varying(inputs.v) | varying(inputs.log_decay)
        )
        out, state = read_state(inputs, self.chunk, start)

        def tail(earlier: Array, x: Array) -> Array:
            cut = lambda row, length: lax.dynamic_slice_in_dim(row, length, reach)
            return jax.vmap(cut)(
                jnp.concatenate([earlier, x], axis=1), lengths
            ).swapaxes(1, 2)

        self.cache = LinearCache(state, *map(tail, earlier, qkv))
        return out


class DecodeMix:
    """The rule for one more token of every slot, which the cache then has read."""

    def __init__(self, cache: LinearCache) -> None:
        self.cache = cache

    def __call__(
        self,
        qkv: Heads,
        beta: Array | None,
        decay: Array,
        kernels: Kernels,
        *_: Any,
    ) -> Array:
        earlier = Heads(*(x.swapaxes(1, 2) for x in self.cache[1:]))
        inputs = rule_inputs((Projected(qkv, earlier, beta, decay), kernels), None)
        out, state = step(jax.tree.map(lambda x: x[:, 0], inputs), self.cache.state)
        later = (
            jnp.concatenate([old[:, 1:], new.astype(old.dtype)], axis=1).swapaxes(1, 2)
            for old, new in zip(earlier, qkv, strict=True)
        )
        self.cache = LinearCache(state, *later)
        return out[:, None]
