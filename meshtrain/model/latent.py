"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads from a few numbers a token.

    x ─ q_down ─ norm ─► [q_rank] ─ q_up ──────────────► H x (nope | rope, turned)             queries
    x ─ kv_down ─┬ norm ─► [kv_rank] ─┬─ k_up ─► H x nope ─┐
                 │                    │                    ├─ nope | rope                      keys
                 └─ turned ─► [rope] ─│────────────────────┘ the same of all heads
                                      └─ v_up ─► H x value                                     values

Heads lie over tensor; the two products down are the same on all tensor ranks, which sum the gradients of their weights.
Under remat the name `qkv` keeps what these two give, and what is made of it is computed again, as DeepSeek does.
Where keys and values would be gathered over context, the kv_rank + rope numbers are, and each rank makes its own heads'
keys and values of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config import LoraConfig, ModelConfig
from meshtrain.model.collectives import Collectives
from meshtrain.model.layers import Attention, Norm
from meshtrain.model.products import project
from meshtrain.model.rope import Sequence, rotate

NORM_EPS = 1e-6  # of the norms between two products, whatever the others add


class Latents(NamedTuple):
    """The numbers that keys and values are made of, [.., T, kv_rank] and [.., T, rope], turned."""

    content: jax.Array
    position: jax.Array


class LatentAttention(Attention):
    """Attention whose heads are made of latents; its output is that of `Attention`."""

    q: nnx.Param | None = None  # type: ignore[assignment]
    q_down: nnx.Param | None = None
    q_up: nnx.Param | None = None
    kv_down: nnx.Param
    k_up: nnx.Param
    v_up: nnx.Param
    kv_norm: Norm

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        rngs: nnx.Rngs,
        lora: LoraConfig | None = None,
    ) -> None:
        super().__init__(name, config, rngs, lora)
        self.sizes = config.mla
        self.kv_norm = Norm(f"{name}.kv_norm", config, rngs)
        self.kv_norm.eps = NORM_EPS
        if config.mla.q_rank:
            self.q_norm = Norm(f"{name}.q_norm", config, rngs)
            self.q_norm.eps = NORM_EPS

    def attended(
        self,
        shape: tuple[int, ...],
        rows: jax.Array,
        sequence: Sequence,
        collectives: Collectives,
        *more: object,
        **how: object,
    ) -> jax.Array:
        q = self.queries(shape, rows, sequence)
        latents = self.latents(shape, rows, sequence)
        arguments = (sequence.segments_BT, collectives, *more)
        # a cache has latents in the place of keys and values (`generate.latent`)
        if (attend := getattr(self.attend, "attend_latents", None)) is not None:
            return attend(q, latents, self, *arguments, **how)
        gathered = collectives.gather_row(latents)
        return self.attend(q, *self.expanded(gathered), *arguments, **how)

    def queries(
        self, shape: tuple[int, ...], rows: jax.Array, sequence: Sequence
    ) -> jax.Array:
        """Returns queries [B, T, H, nope + rope] of rows [N, D]."""
        name = "q"
        if self.q_norm is not None:
            name = "q_up"
            rows = self.q_norm(checkpoint_name(project(self, "q_down", rows), "qkv"))
        y = project(self, name, rows)
        width = self.sizes.nope + self.sizes.rope
        q = (checkpoint_name(y, "qkv") if self.q_norm is None else y).reshape(
            shape[0], -1, y.shape[-1] // width, width
        )
        plain, turned = jnp.split(q, [self.sizes.nope], axis=-1)
        assert sequence.rotary_TK is not None
        return jnp.concatenate([plain, rotate(turned, *sequence.rotary_TK)], axis=-1)

    def latents(
        self, shape: tuple[int, ...], rows: jax.Array, sequence: Sequence
    ) -> Latents:
        """Returns the latents of rows [N, D]."""
        y = checkpoint_name(project(self, "kv_down", rows), "qkv").reshape(
            shape[0], -1, self.sizes.kv_rank + self.sizes.rope
        )
        content, position = jnp.split(y, [self.sizes.kv_rank], axis=-1)
        assert sequence.rotary_TK is not None
        turned = rotate(position[..., None, :], *sequence.rotary_TK)[..., 0, :]
        return Latents(self.kv_norm(content), turned)

    def expanded(self, latents: Latents) -> tuple[jax.Array, jax.Array]:
        """Returns the keys [.., T, H, nope + rope] and values [.., T, H, value] of this rank's heads."""
        content, position = latents
        rows = content.reshape(-1, content.shape[-1])
        plain, values = (
            project(self, name, rows).reshape(*content.shape[:-1], -1, width)
            for name, width in (("k_up", self.sizes.nope), ("v_up", self.sizes.value))
        )
        shared = jnp.broadcast_to(
            position[..., None, :], (*plain.shape[:-1], position.shape[-1])
        )
        return jnp.concatenate([plain, shared], axis=-1), values
