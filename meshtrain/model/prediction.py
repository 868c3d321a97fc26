"""Prediction of several tokens ahead (DeepSeek-V3, section 2.2): a layer more for each, with shared embedding and head.

    h of the model, normed ─ norm ─────────┐
                                           ├─ project [2 D, D] ─► block ─► h ─ norm ─► head: the token after the next
    embedding of the next token ─ norm ────┘                              │
                                                                          └─► the next depth, with the token after it

As in the published files the embedding comes first. A depth takes the stream of the one before through that one's last
norm; the first takes the model's through the head's. `parallel.predictions` has the losses.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.compat import vary, varying
from meshtrain.config import ModelConfig
from meshtrain.config.stacks import last_of_stacks
from meshtrain.model.collectives import Collectives
from meshtrain.model.layers import Norm
from meshtrain.model.products import linear, make_parameters


class Prediction(nnx.Module):
    """One depth: `make_block` is `decoder.Block`, `project` is row-parallel, as the output of an MLP is."""

    project: nnx.Param

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        make_block: Callable,
        rngs: nnx.Rngs,
    ) -> None:
        self.embedding_norm = Norm(f"{name}.embedding_norm", config, rngs)
        self.stream_norm = Norm(f"{name}.stream_norm", config, rngs)
        self.norm = Norm(f"{name}.norm", config, rngs)
        make_parameters(self, name, config, rngs)
        self.block = make_block(last_of_stacks(config), rngs)

    def join(
        self, h_BTD: jax.Array, embedded_BTD: jax.Array, collectives: Collectives
    ) -> jax.Array:
        """Returns what the block takes, in the residual stream, from what is there of the depth before and of the
        tokens.
        """
        weight = self.project[...]
        both = [
            collectives.enter(norm(x))
            for norm, x in (
                (self.embedding_norm, embedded_BTD),
                (self.stream_norm, h_BTD),
            )
        ]
        joined = jnp.concatenate(both, axis=-1)
        first = collectives.first_head(len(weight))
        own = jax.lax.dynamic_slice_in_dim(joined, first, len(weight), axis=-1)
        own = vary(own, varying(weight))
        y = linear(own.reshape(-1, len(weight)), weight)
        return collectives.leave(y.reshape(*own.shape[:2], -1))


class Predictions(nnx.Module):
    """All depths, `depth_0` the first."""

    def __init__(
        self, config: ModelConfig, make_block: Callable, rngs: nnx.Rngs
    ) -> None:
        for name in depths(config):
            setattr(self, name, Prediction(f"mtp.{name}", config, make_block, rngs))


def depths(config: ModelConfig) -> list[str]:
    return [f"depth_{depth}" for depth in range(config.mtp)]
