"""The decoder's three parts (embedding, a run of layers, loss) as functions of the weights that one device holds."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshtrain import scopes
from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.config.model import positions_of
from meshtrain.families import FAMILIES
from meshtrain.inputs import LABELS, MIX, OTHER_LABELS, TOKENS, inputs
from meshtrain.mesh import PIPELINE
from meshtrain.model.decoder import Decoder, add_rows
from meshtrain.model.dpo import dpo
from meshtrain.model.dropout import ADAPTER_SITE, Dropout
from meshtrain.model.hooks import Hooks, Parts
from meshtrain.model.loss import Mixed
from meshtrain.model.products import use_adapters
from meshtrain.model.sequence import sequences
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.remat import checkpointed
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.parallel.zero import Weights, Zero

Tree = Any
# tokens, labels, rows and where needed positions, segments, weights, pairs, reference: [.., b, T] ([.., b] for rows);
# or of images what `meshtrain.inputs` lists
Batch = dict[str, jax.Array]
# a loss summed over what it is of, and sums of what else is measured
Totals = tuple[jax.Array, dict[str, jax.Array]]


class Judged(NamedTuple):
    """What each label came to, [.., b, T]: one of a token, or of an image."""

    losses: jax.Array  # float32
    hits: jax.Array | None = None  # of images: float32, 1 where the likeliest class is the label's


class Forward:
    """Embedding, layers and loss on one device of the mesh, of what `zero.open` made of its masters."""

    def __init__(self, layout: Layout, zero: Zero, platform: str, hooks: Hooks | None = None) -> None:
        self.config: Config = layout.config
        self.layout, self.zero, self.adapters = layout, zero, True
        self.of_images = FAMILIES[layout.config.model.family].images
        self.collectives = MeshCollectives(layout.config, platform)
        self.parts = Parts(layout.config, self.collectives, hooks or Hooks())
        # Idle work is skipped there; elsewhere a predicate would stall the device.
        self.skips = platform == "cpu"
        # There collectives are waited for at once.
        self.overlaps = platform != "cpu"
        decoder = nnx.eval_shape(lambda: Decoder(layout.config.model, nnx.Rngs(0), layout.config.lora))
        self.embedding_graph, _ = nnx.split(decoder.embedding)
        self.block_graph, _ = nnx.split(decoder.blocks)
        self.head_graph, _ = nnx.split(decoder.head)

    def without_adapters(self) -> "Forward":
        """The same with LoRA's adapters off."""
        other = copy.copy(self)
        other.adapters = False
        return other

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the residual stream varies."""
        return (*self.config.mesh.data_axes, PIPELINE, *self.collectives.stream_axes())

    @jax.named_scope(scopes.EMBEDDING)
    def embed(self, weights: Weights, batch: Batch, key: jax.Array | None) -> jax.Array:
        """Tokens [b, T], or patches, to the residual stream [b, T, D] (T / tensor of it with sequence parallelism)."""
        embedding = self._embedding(weights.part("embedding"))
        x = embedding(inputs(batch), self._positions(batch), self.collectives, self._dropout(key, batch))
        return vary(x.astype(self.zero.compute), self.stream_axes)

    def add_embedding_gradient(
        self, total: Tree, weights: Weights, batch: Batch, key: jax.Array | None, gx: jax.Array
    ) -> Tree:
        """`total` with the gradient of `embed`'s weights added, where its output's cotangent is `gx`.

        That of patches' weights is a product; of the tokens' table rows go straight to their places.
        """
        if self.of_images:
            embedded = lambda w: self.embed(weights._replace(differentiated=w), batch, key)  # noqa: E731
            (gradient,) = jax.vjp(embedded, weights.differentiated)[1](gx)
            return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), total, gradient["embedding"])
        part, tokens = weights.part("embedding"), batch["tokens"]
        rows = vary(jnp.zeros((*tokens.shape, gx.shape[-1]), self.zero.compute), self.config.mesh.axes)

        def stream(rows: jax.Array, others: Tree) -> jax.Array:
            embedding = self._embedding(part._replace(differentiated={**part.differentiated, **others}))
            x = embedding.stream(rows, self._positions(batch), self.collectives, self._dropout(key, batch))
            return vary(x.astype(self.zero.compute), self.stream_axes)

        others = {name: w for name, w in part.differentiated.items() if name != "tokens"}
        gradient, more = jax.vjp(stream, rows, others)[1](gx)
        added = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), {n: total[n] for n in more}, more)
        table = self.layout.weights["embedding"]["tokens"]
        if not table.trained:
            return {**added, "tokens": None}
        add = lambda total: add_rows(total, tokens, gradient, self.collectives)  # noqa: E731
        return {**added, "tokens": self.zero.accumulated(table, total["tokens"], add)}

    def _embedding(self, weights: Weights) -> Any:
        return nnx.merge(self.embedding_graph, self.zero.use("embedding", weights))

    def layer(self, batch: Batch, key: jax.Array | None, remat: str) -> Callable:
        """The function (weights of a layer, its index, x) -> x; where stages have fewer layers than others, index -1 changes nothing."""
        sequence = sequences(self.config.model, self._positions(batch), batch.get("segments"))
        dropout = self._dropout(key, batch)
        of_adapters = Dropout(self.config.lora.dropout, key, batch["rows"]).at(ADAPTER_SITE)

        @jax.named_scope(scopes.LAYER)
        def layer(weights: Weights, index: jax.Array, x: jax.Array) -> jax.Array:
            def run(x: jax.Array) -> jax.Array:
                block = nnx.merge(self.block_graph, self.zero.use("blocks", weights))
                use_adapters(block, self.adapters, of_adapters.at(index), self.collectives)
                return vary(self.parts.block(block, x, sequence(index), dropout.at(index)), varying(x))

            if self.layout.even:
                return run(x)
            return lax.cond(index >= 0, run, lambda x: x, x) if self.skips else jnp.where(index >= 0, run(x), x)

        gathers = self.zero.gathers_at_use or self.collectives.sequence_parallel
        return checkpointed(layer, self.config.parallel, remat, gathers, self.config.lora.rank)

    def layers(self, batch: Batch, key: jax.Array | None, layer_at: jax.Array, remat: str) -> Callable:
        """The function (weights, x) -> x of stacked layers; `layer_at` holds their indices."""
        layer = self.layer(batch, key, remat)

        def stack(weights: Weights, x: jax.Array) -> jax.Array:
            return lax.scan(lambda x, of_layer: (layer(*of_layer, x), None), x, (weights, layer_at))[0]

        return stack

    def logits(self, weights: Weights, x: jax.Array, here: jax.Array) -> jax.Array:
        """This device's share of the logits, float32 [b, T, V share], from the last stage's x (where `here` is true)."""
        head = nnx.merge(self.head_graph, self.zero.use("head", weights.part("head")))
        tied = self.zero.use("embedding", weights.part("embedding"))["tokens"] if self.config.model.tied_head else None
        return head(self.collectives.from_last_stage(head.read(x), here), tied, self.collectives)

    @jax.named_scope(scopes.HEAD)
    def loss(self, weights: Weights, x: jax.Array, batch: Batch, here: jax.Array) -> Totals:
        """`total` of this data rank's microbatch, from the last stage's x (where `here` is true)."""
        losses = self.parts.loss(self.logits(weights, x, here), batch[LABELS], _mixed(batch))
        return _where(here, self.total(losses, batch))

    @jax.named_scope(scopes.HEAD)
    def judged(self, weights: Weights, x: jax.Array, batch: Batch, here: jax.Array) -> Judged:
        """Its labels one by one."""
        logits = self.logits(weights, x, here)
        losses, hits = self.parts.loss(logits, batch[LABELS], _mixed(batch)), None
        if self.of_images:
            hits = (self.parts.vocabulary.likeliest(logits) == batch[LABELS]).astype(jnp.float32)
        return _where(here, Judged(losses, hits))

    def total(self, losses: jax.Array, batch: Batch) -> Totals:
        """The loss of labels with these losses, float32 [.., T], not yet divided by what counts of a batch (`model.dpo.counted`)."""
        if self.config.train.objective == "dpo":
            return dpo(losses, batch, self.config.train.dpo_beta)
        return weighted(losses, batch), {}

    def length(self, batch: Batch) -> int:
        """Positions of a row."""
        return positions_of(self.config.model) or batch[TOKENS].shape[-1]

    def _positions(self, batch: Batch) -> jax.Array:
        return batch.get("positions", jnp.arange(self.length(batch)))

    def _dropout(self, key: jax.Array | None, batch: Batch) -> Dropout:
        return Dropout(self.config.model.dropout, key, batch["rows"])


def _mixed(batch: Batch) -> Mixed | None:
    return Mixed(batch[OTHER_LABELS], batch[MIX]) if MIX in batch else None


def weighted(values: jax.Array, batch: Batch) -> jax.Array:
    """The sum of what labels have each, times their weights where there are any."""
    return jnp.sum(values * batch["weights"] if "weights" in batch else values)


def _where(here: jax.Array, values: Tree) -> Tree:
    """What the stage has made where `here` is true, zeros elsewhere; what all stages have alike as it is."""
    return jax.tree.map(lambda x: jnp.where(here, x, 0.0) if PIPELINE in varying(x) else x, values)
