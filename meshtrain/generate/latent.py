"""Latent attention's cache: the kv_rank + rope numbers of a position, from which keys and values are never made.

    q [H, nope | rope] ─ nope x k_up ─► [H, kv_rank | rope] ─ x cache ─► scores ─ x cache ─► [H, kv_rank] ─ x v_up ─►

The products up are absorbed into the query and the output (DeepSeek-V2, section 2.1.2): a position costs each head
2 kv_rank + rope products, and its cache (kv_rank + rope) numbers of all heads together. Each tensor rank has them all.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.generate.cache import (
    DecodeAttention,
    LayerCache,
    PromptAttention,
    against,
    seen,
)
from meshtrain.model.collectives import Collectives
from meshtrain.model.latent import LatentAttention, Latents


def together(latents: Latents) -> jax.Array:
    """Returns latents as a cache has them, [B, T, 1, kv_rank + rope]."""
    return jnp.concatenate(latents, axis=-1)[:, :, None]


class LatentPrompt(PromptAttention):
    """Attends as the training program does, and keeps the latents of a prompt as `cache`."""

    def attend_latents(
        self,
        q: jax.Array,
        latents: Latents,
        module: LatentAttention,
        *more: Any,
        **how: Any,
    ) -> jax.Array:
        self.cache = LayerCache(together(latents), None)
        return self.attend(q, *module.expanded(latents), *more, **how)


class LatentDecode(DecodeAttention):
    """Attends with the new tokens of every slot to its cached latents, to which theirs are added first."""

    def attend_latents(
        self,
        q: jax.Array,
        latents: Latents,
        module: LatentAttention,
        segments: jax.Array | None,
        collectives: Collectives,
        *more: Any,
        local: jax.Array | bool | None = None,
    ) -> jax.Array:
        cached = self._appended(self.cache.keys, together(latents))
        self.cache = LayerCache(cached, None)
        plain, turned = jnp.split(q, [module.sizes.nope], axis=-1)
        absorbed = jnp.einsum("sthk,rhk->sthr", plain, module.k_up[...])
        visible = seen(self.positions, cached.shape[2], self.model.window, local)
        queries = jnp.concatenate([absorbed, turned], axis=-1)
        # the positions' part of the output is left out afterwards: the cache is read as it lies
        out = against(queries, LayerCache(cached, cached), visible, self.model)
        content = out.reshape(len(out), q.shape[2], -1)[..., : module.sizes.kv_rank]
        values = jnp.einsum("shr,rhv->shv", content, module.v_up[...])
        return values.reshape(len(out), -1)
