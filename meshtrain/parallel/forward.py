"""The decoder's three parts (embedding, a run of layers, loss) as functions of the weights that one device holds."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshtrain import xla
from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.config.follow import loss_chunk, skips_idle_work
from meshtrain.config.model import positions_of
from meshtrain.families import FAMILIES
from meshtrain.inputs import LABELS, MIX, OTHER_LABELS, TOKENS, WEIGHTS, inputs
from meshtrain.mesh import PIPELINE
from meshtrain.model.decoder import Decoder, add_rows
from meshtrain.model.dropout import ADAPTER_SITE, Dropout
from meshtrain.model.hooks import ModelParts
from meshtrain.model.loss import LabelLosses, Mixed, dpo
from meshtrain.model.products import use_adapters
from meshtrain.model.rope import Routing, sequences
from meshtrain.parallel.layout import Layout, Segment
from meshtrain.parallel.remat import checkpointed
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.parallel.zero import Weights, Zero

Tree = Any
# tokens, labels, rows and where needed positions, segments, weights, pairs, reference: [.., b, T] ([.., b] for rows);
# or of images what `meshtrain.inputs` lists
Batch = dict[str, jax.Array]
# of each row, for experts: the seed of the gradient of a loss that layers make themselves, and the last place in the
# row that weighs
SEED = "seed"
LAST = "last"
# a loss summed over what it is of, and sums of what else is measured
Totals = tuple[jax.Array, dict[str, jax.Array]]


class LossAndGradients(NamedTuple):
    """Loss summed over the microbatches, on each data rank, and its gradient, in `precision.gradient_sums` where there
    are several.
    """

    totals: Totals
    gradients: Tree


class Forward:
    """Embedding, layers and loss on one device of the mesh, from what `zero.gather_params` made of its master
    weights.
    """

    def __init__(
        self, layout: Layout, zero: Zero, collectives: MeshCollectives, parts: ModelParts
    ) -> None:
        self.config: Config = layout.config
        self.layout = layout
        self.zero = zero
        self.collectives = collectives
        self.parts = parts
        self.adapters = True
        self.of_images = FAMILIES[layout.config.model.family].images
        self.skips = skips_idle_work(layout.config, collectives.platform)
        # On CPU collectives are waited for at once.
        self.overlaps = collectives.platform != "cpu"
        decoder = nnx.eval_shape(
            lambda: Decoder(layout.config.model, nnx.Rngs(0), layout.config.lora)
        )
        self.embedding_graph, _ = nnx.split(decoder.embedding)
        self.block_graph, _ = nnx.split(decoder.blocks)
        self.head_graph, _ = nnx.split(decoder.head)

    def disable_adapters(self) -> "Forward":
        """Returns the same with LoRA's adapters off."""
        other = copy.copy(self)
        other.adapters = False
        return other

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the residual stream varies."""
        return (*self.config.mesh.token_axes(), PIPELINE, *self.collectives.stream_axes())

    @jax.named_scope(xla.EMBEDDING)
    def embed(self, weights: Weights, batch: Batch, key: jax.Array | None) -> jax.Array:
        """Tokens [b, T], or patches, to the residual stream [b, T, D] (T / tensor of it with sequence parallelism)."""
        embedding = self._embedding(weights.part("embedding"))
        x = embedding(
            inputs(batch), self._positions(batch), self.collectives, self._dropout(key, batch)
        )
        return vary(x.astype(self.zero.compute), self.stream_axes)

    def add_embedding_gradient(
        self, total: Tree, weights: Weights, batch: Batch, key: jax.Array | None, gx: jax.Array
    ) -> Tree:
        """`total` with the gradient of `embed`'s weights added, where its output's cotangent is `gx`.

        The gradient of patches' weights is a product; rows of the tokens' table go straight to their places."""
        if self.of_images:
            embedded = lambda w: self.embed(weights._replace(differentiated=w), batch, key)
            (gradient,) = jax.vjp(embedded, weights.differentiated)[1](gx)
            return added(total, gradient["embedding"])
        part = weights.part("embedding")
        tokens = batch["tokens"]
        rows = vary(
            jnp.zeros((*tokens.shape, gx.shape[-1]), self.zero.compute), self.config.mesh.axes
        )

        def stream(rows: jax.Array, others: Tree) -> jax.Array:
            embedding = self._embedding(
                part._replace(differentiated={**part.differentiated, **others})
            )
            x = embedding.stream(
                rows, self._positions(batch), self.collectives, self._dropout(key, batch)
            )
            return vary(x.astype(self.zero.compute), self.stream_axes)

        others = {name: w for name, w in part.differentiated.items() if name != "tokens"}
        gradient, more = jax.vjp(stream, rows, others)[1](gx)
        totals = added({n: total[n] for n in more}, more)
        table = self.layout.weights["embedding"]["tokens"]
        if not table.trained:
            return {**totals, "tokens": None}
        add = lambda total: add_rows(total, tokens, gradient, self.collectives)
        return {**totals, "tokens": self.zero.add_gradient(table, total["tokens"], add)}

    def _embedding(self, weights: Weights) -> Any:
        return nnx.merge(self.embedding_graph, self.zero.gather_at_use("embedding", weights))

    def layer(
        self,
        batch: Batch,
        key: jax.Array | None,
        active: jax.Array | None = None,
        products: str = "compute",
    ) -> Callable[..., jax.Array]:
        """Returns the function (differentiated weights of a layer, x, constant weights, index) -> x, of layers with
        `products` of a kind.

        Where stages have fewer layers than others, index -1 changes nothing. Where not `active`, what x holds is of no
        microbatch.
        """
        sequence = sequences(self.config.model, self._positions(batch), batch.get("segments"))
        routing = self._routing(batch, active)
        dropout = self._dropout(key, batch)
        of_adapters = Dropout(self.config.lora.dropout, key, batch["rows"]).at(ADAPTER_SITE)

        def layer(
            differentiated: Tree, x: jax.Array, constant: Tree, index: jax.Array
        ) -> jax.Array:
            weights = Weights(differentiated, constant)
            block = nnx.merge(self.block_graph, self.zero.gather_at_use("blocks", weights))
            self.layout.storage.prepare(block, self.zero, weights, products, index)
            use_adapters(block, self.adapters, of_adapters.at(index), self.collectives)
            block.attention.attend = self.parts.attention
            of_layer = (
                sequence(index)
                if routing is None
                else replace(sequence(index), routing=routing(index))
            )
            y = self.parts.block(block, x, of_layer, self.collectives, dropout.at(index))
            self.parts.check_block(x, y)
            return vary(y, varying(x))

        def layer_or_padding(
            differentiated: Tree, x: jax.Array, constant: Tree, index: jax.Array
        ) -> jax.Array:
            if self.skips:
                run = lambda x: layer(differentiated, x, constant, index)
                return lax.cond(index >= 0, run, lambda x: x, x)
            return jnp.where(index >= 0, layer(differentiated, x, constant, index), x)

        named = jax.named_scope(xla.LAYER)(layer if self.layout.even else layer_or_padding)
        gathers = self.zero.gathers_at_use or self.collectives.sequence_parallel
        return checkpointed(named, self.config.parallel, gathers, self.config.lora.rank)

    def last_stream(self, weights: Weights, batch: Batch, key: jax.Array | None) -> jax.Array:
        """The residual stream after the last layer of a microbatch, on a mesh without pipeline stages."""
        x, layer_at = self.embed(weights, batch, key), jnp.asarray(self.layout.layer_at[0, 0])
        segments = self.layout.segments
        stacked = (weights.part("blocks"), layer_at)
        for segment, part in zip(segments, split_layers(stacked, segments), strict=True):
            layer = self.layer(batch, key, products=segment.products)

            def step(
                x: jax.Array, part: tuple[Weights, jax.Array], layer: Callable = layer
            ) -> tuple[jax.Array, None]:
                weights, index = part
                return layer(weights.differentiated, x, weights.constant, index), None

            x = lax.scan(step, x, part)[0]
        return x

    def logits(self, weights: Weights, x: jax.Array, here: jax.Array) -> jax.Array:
        """This device's share of the logits, float32 [b, T, V share], from the last stage's x (where `here` is
        true).
        """
        head, tied = self._head(weights)
        head = nnx.merge(self.head_graph, head)
        return head(self.collectives.share_last_stage(head.read(x), here), tied, self.collectives)

    def _head(self, weights: Weights) -> tuple[Tree, jax.Array | None]:
        """The weights that the head uses: its own, and those of the embedding where it is tied to them."""
        head = self.zero.gather_at_use("head", weights.part("head"))
        if not self.config.model.tied_head:
            return head, None
        return head, self.zero.gather_at_use("embedding", weights.part("embedding"))["tokens"]

    def _losses(
        self,
        weights: Weights,
        x: jax.Array,
        batch: Batch,
        here: jax.Array,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array | None, LabelLosses]:
        """Returns the sum weighted by `counts` if the losses are computed by chunks, else None; and the loss of each
        label, float32 [b, T], from the last stage's x (where `here` is true).
        """
        labels = batch[LABELS]
        ranks = self.collectives.vocabulary_ranks
        chunk = loss_chunk(self.config, labels.size, -(-self.config.model.vocab_size // ranks))
        if chunk is None:
            return None, self.parts.loss(self.logits(weights, x, here), labels, _mixed(batch))
        from meshtrain.model.chunked_loss import chunk_losses, sum_chunk_losses

        def loss(
            used: tuple[Tree, jax.Array | None], x: jax.Array, labels: jax.Array
        ) -> LabelLosses:
            head, tied = used
            return self.parts.loss(
                nnx.merge(self.head_graph, head)(x, tied, self.collectives), labels
            )

        given = loss, self._head(weights), self.collectives.share_last_stage(x, here), labels
        return (
            (None, chunk_losses(*given, chunk))
            if counts is None
            else sum_chunk_losses(*given, counts, chunk)
        )

    @jax.named_scope(xla.HEAD)
    def loss(
        self, weights: Weights, x: jax.Array, batch: Batch, here: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, Totals]:
        """`seed` times the loss of this data rank's microbatch, to be differentiated, and its `total`: from the last
        stage's x.
        """
        known = self.config.train.objective != "dpo"
        counts = seed * batch.get(WEIGHTS, jnp.ones(batch[LABELS].shape)) if known else None
        seeded, losses = self._losses(weights, x, batch, here, counts)
        total, measured = self.total(losses, batch)
        return _where(here, (seed * total if seeded is None else seeded, (total, measured)))

    @jax.named_scope(xla.HEAD)
    def label_losses(
        self, weights: Weights, x: jax.Array, batch: Batch, here: jax.Array
    ) -> LabelLosses:
        """Its labels one by one."""
        if not self.of_images:
            return _where(here, self._losses(weights, x, batch, here)[1])
        logits = self.logits(weights, x, here)
        losses = self.parts.loss(logits, batch[LABELS], _mixed(batch))
        correct = (self.parts.vocabulary.argmax(logits) == batch[LABELS]).astype(jnp.float32)
        return _where(here, losses._replace(correct=correct))

    def total(self, labels: LabelLosses, batch: Batch) -> Totals:
        """The loss of labels, [.., T], and their likelihood beside it where it holds more, not yet divided by what
        counts of a batch (`model.loss.counted`).
        """
        if self.config.train.objective == "dpo":
            return dpo(labels.losses, batch, self.config.train.dpo_beta, self.collectives)
        measured = {} if labels.nll is None else {"nll": weighted(labels.nll, batch)}
        return weighted(labels.losses, batch), measured

    def length(self, batch: Batch) -> int:
        """Positions of a row, or of the part of it that is here."""
        return positions_of(self.config.model) or batch[TOKENS].shape[-1]

    def _positions(self, batch: Batch) -> jax.Array:
        return (
            batch["positions"]
            if "positions" in batch
            else self.collectives.positions(self.length(batch))
        )

    def _routing(
        self, batch: Batch, active: jax.Array | None
    ) -> Callable[[jax.Array], Routing] | None:
        """The function (a layer's index) -> which tokens its experts compute; None without experts.

        Not padding: what is of no document, or behind all that counts in its row; nor what an idle stage or a place
        without a layer computes with.
        """
        if not self.config.model.moe.experts:
            return None
        if "segments" in batch:
            routed = batch["segments"] > 0
        elif LAST in batch:
            routed = self.collectives.positions(self.length(batch)) <= batch[LAST][:, None]
        else:
            routed = jnp.ones(batch[TOKENS].shape, bool)
        if active is not None:
            routed = routed & active
        return lambda index: Routing(routed & (index >= 0), batch.get(SEED))

    def last_weighing(self, weights: jax.Array) -> jax.Array:
        """The last place that weighs in each row, of which context may have parts here: int32 [b]; -1 where none
        does.
        """
        places = jnp.where(weights != 0, self.collectives.positions(weights.shape[1]), -1)
        return self.collectives.row_max(places.max(-1))

    def _dropout(self, key: jax.Array | None, batch: Batch) -> Dropout:
        return Dropout(self.config.model.dropout, key, batch["rows"])


def split_layers(stacked: Tree, segments: list[Segment]) -> list[Tree]:
    """Returns a tree of stacked layers in pieces; the pieces' gradients are joined again."""
    if len(segments) == 1:
        return [stacked]
    leaves, tree = jax.tree.flatten(stacked)
    pieces = [lax.split(leaf, [s.behind - s.first for s in segments]) for leaf in leaves]
    return [jax.tree.unflatten(tree, piece) for piece in zip(*pieces, strict=True)]


def added(totals: Tree, more: Tree) -> Tree:
    """`totals` with more added, in the dtypes of the totals."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, more)


def sum_at_once(sum_of: Callable[[jax.Array], jax.Array], scalars: Tree) -> Tree:
    """The sums of scalars that vary over the same axes, by one call of `sum_of`: one collective."""
    leaves, tree = jax.tree.flatten(scalars)
    assert len({frozenset(varying(leaf)) for leaf in leaves}) == 1
    return jax.tree.unflatten(
        tree, list(sum_of(jnp.stack(leaves))) if len(leaves) > 1 else [sum_of(leaves[0])]
    )


def _mixed(batch: Batch) -> Mixed | None:
    return Mixed(batch[OTHER_LABELS], batch[MIX]) if MIX in batch else None


def weighted(values: jax.Array, batch: Batch) -> jax.Array:
    """The sum of what labels have each, times their weights where there are any."""
    return jnp.sum(values * batch["weights"] if "weights" in batch else values)


def _where(here: jax.Array, values: Tree) -> Tree:
    """Returns the stage's output where `here` is true, else zeros; a value common to all stages stays as it is."""
    return jax.tree.map(lambda x: jnp.where(here, x, 0.0) if PIPELINE in varying(x) else x, values)
