"""Keys and values of what a model has read, and attention of a new token against them.

    one layer's keys on one device [S, G, P, K]        S slots of this data rank, G key/value heads of this tensor rank

            position 0 1 2 3 4 5 6 7
    slot 0           k k k k k · · ·     prefill writes a whole slot, with zeros behind the prompt: no earlier keys stay
    slot 1           k k · · · · · ·     decode writes one position of every slot, in place, and attends up to it

An array a layer and heads before positions, so that a product reads the cache as it lies: with one array of all layers,
or positions first, XLA copies it every step (experiments/generate/decode.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.config import ModelConfig
from meshtrain.model.attention import MASKED, within
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.parallel.placement import local_kv_heads


class LayerCache(NamedTuple):
    """Keys and values of one layer, [S, G, P, K] each, in the compute dtype.

    With latent attention both are made of latents, which stand in the place of keys: [S, 1, P, kv_rank + rope].
    """

    keys: jax.Array
    values: jax.Array | None

    def put(
        self, new: "LayerCache", slot: jax.Array, length: jax.Array
    ) -> "LayerCache":
        """Returns the cache with the first `length` positions of one sequence in a slot."""
        return jax.tree.map(lambda old, new: written(old, new, slot, length), self, new)

    def laid_out(self, lengths: jax.Array, positions: int) -> "LayerCache":
        """Returns the keys and values of sequences, [B, T, G, K], as those of slots."""
        return jax.tree.map(lambda x: laid_out(x, lengths, positions), self)


@dataclass(frozen=True)
class OwnGroups:
    """The key/value heads that one of `ranks` tensor ranks needs for its query heads, each once.

    Where `ranks` does not divide them every rank computes all (see `parallel.placement`), and keeps but these:

        6 query heads, 3 key/value heads, 2 ranks       rank 0   q 0 1 2   kv 0 0 1    keeps 0 1
                                                        rank 1   q 3 4 5   kv 1 2 2    keeps 1 2
    """

    heads: int
    groups: int
    ranks: int

    @property
    def split(self) -> bool:
        """Returns whether each rank has its own without choosing."""
        return local_kv_heads(self.groups, self.ranks) * self.ranks == self.groups

    @property
    def each(self) -> int:
        """Returns how many a rank keeps: as many as the rank that needs the most."""
        if self.split:
            return self.groups // self.ranks
        local = self.heads // self.ranks
        group = self.heads // self.groups
        firsts = range(0, self.heads, local)
        return max(
            (first + local - 1) // group - first // group + 1 for first in firsts
        )

    def select(self, by_head: jax.Array, first: jax.Array | int) -> jax.Array:
        """Returns [B, T, G, K] from [B, T, H, K] with one for each query head from `first` on; what splits comes as it
        is.
        """
        if self.split:
            return by_head
        group = self.heads // self.groups
        # the first query head of each
        heads = (first // group + jnp.arange(self.each)) * group - first
        return jnp.take(by_head, jnp.clip(heads, 0, by_head.shape[2] - 1), axis=2)

    def indices(self, first: jax.Array | int) -> jax.Array:
        """Returns int [H]: which of the cached ones each query head from `first` on reads."""
        group = self.heads // self.groups
        return (first + jnp.arange(self.heads // self.ranks)) // group - first // group


def cache_heads(model: ModelConfig, tensor: int) -> tuple[int, int, int]:
    """Returns the heads that a tensor rank caches, the width of their keys, and that of their values, 0 for none."""
    if model.mla.kv_rank:
        return 1, model.mla.kv_rank + model.mla.rope, 0
    return (
        OwnGroups(model.heads, model.kv_heads, tensor).each,
        model.head_dim,
        model.head_dim,
    )


def written(
    cache: jax.Array, new_STGK: jax.Array, slot: jax.Array, length: jax.Array
) -> jax.Array:
    """Returns [S, G, P, K] with the first `length` positions of one sequence [1, T, G, K] in `slot`, zeros behind them.

    A slot that lies on another rank, below 0 or from S on, changes nothing.
    """
    slots, _, positions, _ = cache.shape
    new = laid_out(new_STGK, length, positions).astype(cache.dtype)
    place = (jnp.clip(slot, 0, slots - 1), 0, 0, 0)
    here = (slot >= 0) & (slot < slots)
    new = jnp.where(
        here,
        vary(new, varying(cache)),
        lax.dynamic_slice(cache, place, (1, *cache.shape[1:])),
    )
    return lax.dynamic_update_slice(cache, new, place)


def laid_out(new_STGK: jax.Array, lengths: jax.Array, positions: int) -> jax.Array:
    """Returns [S, G, P, K] with the first of T positions as a cache has them, of each sequence its `lengths` (of all
    one, or [S]), and zeros behind them.
    """
    read = jnp.arange(new_STGK.shape[1]) < jnp.reshape(lengths, (-1, 1))
    new = jnp.where(read[:, :, None, None], new_STGK, 0).transpose(0, 2, 1, 3)
    return jnp.pad(new, ((0, 0), (0, 0), (0, positions - new.shape[2]), (0, 0)))


def appended(cache: jax.Array, new_STGK: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns [S, G, P, K] with T positions of every slot written, from `positions` [S] on."""
    new = new_STGK.transpose(0, 2, 1, 3).astype(cache.dtype)
    for slot in range(cache.shape[0]):
        cache = lax.dynamic_update_slice(
            cache, new[slot : slot + 1], (slot, 0, positions[slot], 0)
        )
    return cache


class PromptAttention:
    """Attends as the training program does, and keeps the keys and values of a prompt as `cache`."""

    def __init__(self, attend: Callable[..., jax.Array], groups: OwnGroups) -> None:
        self.attend = attend
        self.groups = groups
        self.cache: LayerCache

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Any,
        collectives: Collectives,
        *more: Any,
        **how: Any,
    ) -> jax.Array:
        first = collectives.first_head(q.shape[2])
        self.cache = LayerCache(
            self.groups.select(k, first), self.groups.select(v, first)
        )
        return self.attend(q, k, v, segments, collectives, *more, **how)


class DecodeAttention:
    """Attends with the new tokens of every slot to its cache, to which they are added first."""

    def __init__(
        self,
        model: ModelConfig,
        groups: OwnGroups,
        cache: LayerCache,
        positions: jax.Array,
    ) -> None:
        """`positions` [S, T]: those of a slot's new tokens, one behind the other."""
        self.model = model
        self.groups = groups
        self.cache = cache
        self.positions = positions

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        collectives: Collectives,
        dropout: Dropout,
        local: jax.Array | bool | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        first = collectives.first_head(q.shape[2])
        keys = self._appended(self.cache.keys, self.groups.select(k, first))
        assert self.cache.values is not None
        values = self._appended(self.cache.values, self.groups.select(v, first))
        self.cache = LayerCache(keys, values)
        visible = seen(self.positions, keys.shape[2], self.model.window, local)
        if not self.groups.split:
            at = self.groups.indices(first)
            keys = jnp.take(keys, at, axis=1)
            values = jnp.take(values, at, axis=1)
        return against(q, LayerCache(keys, values), visible, self.model, sinks)

    def _appended(self, cache: jax.Array, new_STGK: jax.Array) -> jax.Array:
        return appended(cache, new_STGK, self.positions[:, 0])


def seen(
    positions: jax.Array, length: int, window: int, local: jax.Array | bool | None
) -> jax.Array:
    """Returns bool [S, T, P]: which positions the tokens at each slot's `positions` [S, T] see."""
    back = positions[..., None] - jnp.arange(length)
    visible = back >= 0
    if not 0 < window < length:
        return visible
    near = visible & (back < window)
    return near if local is None else jnp.where(local, near, visible)


def against(
    q_STHK: jax.Array,
    cache: LayerCache,
    visible: jax.Array,
    model: ModelConfig,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns attention of queries [S, T, H, K] to a cache where `visible` [S, T, P]: [S T, H K] in q's dtype.

    The same sums in the same precision as `model.attention.blockwise` does.
    """
    slots, length, _, width = q_STHK.shape
    keys = cache.keys
    values = cache.values
    assert values is not None
    cap = model.score_cap
    groups = keys.shape[1]
    q = (q_STHK * model.query_scalar**-0.5).reshape(slots, length, groups, -1, width)
    scores = jnp.einsum(
        "stgrk,sgpk->sgtrp", q, keys, preferred_element_type=jnp.float32
    )
    scores = within(cap, scores) if cap else scores
    scores = jnp.where(visible[:, None, :, None], scores, MASKED)
    p = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks_H is not None:
        total = total + jnp.exp(
            sinks_H.astype(jnp.float32).reshape(groups, 1, -1, 1)
            - jnp.max(scores, axis=-1, keepdims=True)
        )
    out = (
        jnp.einsum(
            "sgtrp,sgpk->sgtrk",
            p.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        / total
    )
    return out.astype(q_STHK.dtype).swapaxes(1, 2).reshape(slots * length, -1)
