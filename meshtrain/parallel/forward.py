"""The decoder's three parts (embedding, a run of layers, loss) as functions of the weights that one device holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.mesh import DATA, PIPELINE
from meshtrain.model.decoder import rotary_table
from meshtrain.model.dropout import Dropout
from meshtrain.model.hooks import Hooks, Parts
from meshtrain.model.layers import Sequence
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.parallel.zero import Zero

Tree = Any
Batch = dict[
    str, jax.Array
]  # tokens, labels, rows and where needed positions, segments, weights: [.., b, T] ([.., b] for rows)


class Forward:
    """Embedding, layers and loss on one device of the mesh. Weights come in pairs (differentiated, constant), see zero.Weights."""

    def __init__(self, layout: Layout, zero: Zero, platform: str, hooks: Hooks | None = None) -> None:
        self.config: Config = layout.config
        self.layout, self.zero = layout, zero
        self.collectives = MeshCollectives(layout.config, platform)
        self.parts = Parts(layout.config, self.collectives, hooks or Hooks())
        self.skips = platform == "cpu"  # idle work is skipped there; elsewhere a predicate would stall the device
        self.embedding_graph, _ = nnx.split(layout.abstract.embedding)
        self.block_graph, _ = nnx.split(layout.abstract.blocks)
        self.head_graph, _ = nnx.split(layout.abstract.head)
        self.slots = layout.slots

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the residual stream varies."""
        return (DATA, PIPELINE, *self.collectives.stream_axes())

    def embed(self, edge: Tree, constant: Tree | None, batch: Batch, key: jax.Array | None) -> jax.Array:
        """Tokens [b, T] to the residual stream [b, T, D] (T / tensor of it with sequence parallelism)."""
        leaves = self.layout.leaves["embedding"]
        weights = self.zero.use(leaves, edge["embedding"], None if constant is None else constant["embedding"])
        positions = batch.get("positions", jnp.arange(batch["tokens"].shape[-1]))
        embedding = nnx.merge(self.embedding_graph, weights)
        x = embedding(batch["tokens"], positions, self.collectives, self._dropout(key, batch))
        return vary(x.astype(self.zero.compute), self.stream_axes)

    def layers(self, batch: Batch, key: jax.Array | None, slots: jax.Array, remat: str) -> Callable:
        """The function (differentiated, constant, x) -> x of one chunk's stacked layers; `slots` holds their indices, -1: none."""
        positions = batch.get("positions", jnp.arange(batch["tokens"].shape[-1]))
        sequence = Sequence(rotary_table(self.config.model, positions), batch.get("segments"))
        dropout = self._dropout(key, batch)
        leaves = self.layout.leaves["blocks"]

        def layer(x: jax.Array, weights: tuple[Tree, Tree | None, jax.Array]) -> jax.Array:
            differentiated, constant, index = weights

            def run(x: jax.Array) -> jax.Array:
                block = nnx.merge(self.block_graph, self.zero.use(leaves, differentiated, constant))
                return vary(self.parts.block(block, x, sequence, dropout.at(index)), varying(x))

            if self.layout.even:
                return run(x)
            return lax.cond(index >= 0, run, lambda x: x, x) if self.skips else jnp.where(index >= 0, run(x), x)

        layer = self.zero.checkpointed(layer, _policy(self.config), remat != "none")

        def stack(differentiated: Tree, constant: Tree | None, x: jax.Array) -> jax.Array:
            return lax.scan(lambda x, weights: (layer(x, weights), None), x, (differentiated, constant, slots))[0]

        return stack

    def logits(self, edge: Tree, constant: Tree | None, x: jax.Array, here: jax.Array) -> jax.Array:
        """This device's share of the logits, float32 [b, T, V share], from the last stage's x (where `here` is true)."""
        use = lambda part: self.zero.use(  # noqa: E731
            self.layout.leaves[part], edge[part], None if constant is None else constant[part]
        )
        head = nnx.merge(self.head_graph, use("head"))
        tied = use("embedding")["tokens"] if self.config.model.tied_head else None
        return head(self.collectives.from_last_stage(x, here), tied, self.collectives)

    def loss(self, edge: Tree, constant: Tree | None, x: jax.Array, batch: Batch, here: jax.Array) -> jax.Array:
        """Sum of the weighted token losses of this data rank's microbatch, from the last stage's x (where `here` is true)."""
        losses = self.parts.loss(self.logits(edge, constant, x, here), batch["labels"])
        total = jnp.sum(losses * batch["weights"] if "weights" in batch else losses)
        return jnp.where(here, total, 0.0) if PIPELINE in varying(total) else total

    def _dropout(self, key: jax.Array | None, batch: Batch) -> Dropout:
        return Dropout(self.config.model.dropout, key, batch["rows"])


def _policy(config: Config) -> Callable | None:
    """What jax.checkpoint keeps of a layer: nothing for full, matmul outputs for dots, else the named activations."""
    policies, parallel = jax.checkpoint_policies, config.parallel
    if parallel.remat == "dots":
        return policies.dots_with_no_batch_dims_saveable  # products with weights; attention's have batch dimensions
    if parallel.remat == "names":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(parallel.remat_keep),
            names_which_can_be_offloaded=list(parallel.remat_offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return None
