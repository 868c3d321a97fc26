"""The decoder's three parts (embedding, a run of layers, loss) as functions of the weights that one device holds.

    mesh.pipeline 1      embed ─► last_stream: each layer in turn ─► loss         (`parallel.accumulate`)
    more                 embed, layer, loss: each where the table has it          (`parallel.pipeline.stage`)

A loss is a sum over a microbatch until the step divides it by the tokens, images or pairs of the whole batch. It is
differentiated times a `seed`, which holds that divisor and the loss scale.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from meshtrain import xla
from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.config.follow import loss_chunk, skips_idle_work
from meshtrain.config.model import positions_of
from meshtrain.families import FAMILIES
from meshtrain.inputs import EXPERTS, LABELS, MIX, OTHER_LABELS, TOKENS, WEIGHTS, inputs
from meshtrain.mesh import CONTEXT, PIPELINE
from meshtrain.model.decoder import Decoder, add_rows
from meshtrain.model.dropout import ADAPTER_SITE, Dropout
from meshtrain.model.hooks import ModelParts
from meshtrain.model.loss import LabelLosses, Mixed, dpo
from meshtrain.model.policy_loss import policy_loss, row_gaps
from meshtrain.model.products import use_adapters
from meshtrain.model.rope import Routing, sequences
from meshtrain.parallel.layout import Layout, Segment, SlotKind
from meshtrain.parallel.remat import checkpointed
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.parallel.zero import Weights, Zero
from meshtrain.registry import late

Tree = Any
# tokens, labels and, where needed, positions, segments, weights, pairs, reference: [.., b, T]; rows: [.., b]. Images
# have the arrays that `meshtrain.inputs` lists.
Batch = dict[str, Array]
# Two more arrays of a batch, [.., b], for a model with experts: what the gradient of a row's auxiliary loss is scaled
# by, and the row's last place whose weight is not 0.
SEED = "seed"
LAST = "last"
# Of a step on drawn answers, the largest gap in the log-probabilities of each row, or of its part on a context rank.
ROW_GAPS = "rl/row_gaps"
# the loss, summed over labels (dpo: over pairs), and other sums by their names
Totals = tuple[Array, dict[str, Array]]
# the head's own, and the table of the embedding if it is tied to that
HeadWeights = tuple[Tree, Array | None]
# Few runs need chunks: these are imported when they are called.
chunk_losses = late("meshtrain.model.chunked_loss:chunk_losses")
sum_chunk_losses = late("meshtrain.model.chunked_loss:sum_chunk_losses")


class LossAndGradients(NamedTuple):
    """A data rank's loss summed over its microbatches, and the gradient: float32 for one microbatch, in
    `precision.gradient_sums` for several.
    """

    totals: Totals
    gradients: Tree
    maxima: Any = None  # the largest logit of each head, see `parallel.qk_clip`


class Forward:
    """Embedding, layers and loss on one device of the mesh, from its weights as `zero.gather_params` returns them."""

    # the losses of further tokens, where there are any: `PredictionLosses.seeded` of `parallel.predictions`
    predictions: Callable[..., tuple[Array, Array]] | None = None

    def __init__(
        self,
        layout: Layout,
        zero: Zero,
        collectives: MeshCollectives,
        parts: ModelParts,
    ) -> None:
        self.config: Config = layout.config
        self.layout = layout
        self.zero = zero
        self.collectives = collectives
        self.parts = parts
        self.adapters = True
        # (sequence, a layer's attention, batch) -> the sequence that takes largest logits, of `parallel.qk_clip`
        self.take_maxima: Callable[..., Any] | None = None
        self.of_images = FAMILIES[layout.config.model.family].images
        self.skips = skips_idle_work(layout.config, collectives.platform)
        # A CPU waits for a collective at once.
        self.overlaps = collectives.platform != "cpu"
        model = layout.config.model
        self.decoder = nnx.eval_shape(
            lambda: Decoder(model, nnx.Rngs(0), layout.config.lora)
        )
        self.embedding_graph = nnx.graphdef(self.decoder.embedding)
        self.block_graphs = {
            stack: nnx.graphdef(getattr(self.decoder, stack)) for stack in layout.stacks
        }
        self.head_graph = nnx.graphdef(self.decoder.head)

    def disable_adapters(self) -> "Forward":
        """Returns the same with LoRA's adapters off."""
        other = copy.copy(self)
        other.adapters = False
        return other

    @property
    def edge_parts(self) -> tuple[str, ...]:
        """The parts of the weights that embedding and loss work with."""
        return ("embedding", "head", *["mtp"] * (self.predictions is not None))

    def taken(self, source: str) -> float:
        """Returns in which share of the clocks a conditional is taken, by the source of an operation in it."""
        table = self.layout.table
        if table is None or not self.skips:
            return 1.0
        # The first embedding stands before the clocks, and the last one's gradient behind them.
        if f"shard_map/{xla.EMBEDDING}/cond/" in source:
            return 1.0
        # predictions of further tokens embed them with the head
        if xla.EMBEDDING in source and xla.HEAD not in source:
            return (table.microbatches - 1) / table.clocks
        # The head takes a microbatch once, layers in each chunk.
        chunks = 1 if xla.HEAD in source else table.chunks
        return table.microbatches * chunks / table.clocks

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the residual stream varies."""
        return (
            *self.config.mesh.token_axes(),
            PIPELINE,
            *self.collectives.stream_axes(),
        )

    @jax.named_scope(xla.EMBEDDING)
    def embed(self, weights: Weights, batch: Batch, key: Array | None) -> Array:
        """Returns the residual stream of tokens [b, T], or patches: [b, T, D], or T / tensor if sequence parallel."""
        embedding = self._embedding(weights.part("embedding"))
        dropout = self._dropout(key, batch)
        x = embedding(inputs(batch), self.positions(batch), self.collectives, dropout)
        return self._begin_stream(x)

    def add_embedding_gradient(
        self,
        total: Tree,
        weights: Weights,
        batch: Batch,
        key: Array | None,
        gx: Array,
    ) -> Tree:
        """Adds the gradient of `embed`'s weights to `total`; `gx` is the cotangent of its output.

        Images: the vjp of `embed`. Tokens: the vjp begins behind the look-up, and the gradients of the rows that it
        gave are added to the table's rows. No gradient of the whole table is made.
        """
        if self.of_images:

            def embed(differentiated: Tree) -> Array:
                replaced = weights._replace(differentiated=differentiated)
                return self.embed(replaced, batch, key)

            _, vjp = jax.vjp(embed, weights.differentiated)
            (gradient,) = vjp(gx)
            return added(total, gradient["embedding"])
        part = weights.part("embedding")
        tokens = batch[TOKENS]

        def stream(rows: Array, others: Tree) -> Array:
            differentiated = {**part.differentiated, **others}
            embedding = self._embedding(part._replace(differentiated=differentiated))
            dropout = self._dropout(key, batch)
            x = embedding.stream(rows, self.positions(batch), self.collectives, dropout)
            return self._begin_stream(x)

        # The stream is linear in the rows: zeros have the same gradient.
        shape = (*tokens.shape, gx.shape[-1])
        rows = vary(jnp.zeros(shape, self.zero.compute), self.config.mesh.axes)
        others = {n: w for n, w in part.differentiated.items() if n != "tokens"}
        _, vjp = jax.vjp(stream, rows, others)
        g_rows, g_others = vjp(gx)
        totals = added({name: total[name] for name in g_others}, g_others)
        table = self.layout.weights["embedding"]["tokens"]
        if not table.trained:
            return {**totals, "tokens": None}

        def add(g_table: Array) -> Array:
            return add_rows(g_table, tokens, g_rows, self.collectives)

        return {**totals, "tokens": self.zero.add_gradient(table, total["tokens"], add)}

    def _embedding(self, weights: Weights) -> Any:
        gathered = self.zero.gather_at_use("embedding", weights)
        return nnx.merge(self.embedding_graph, gathered)

    def _begin_stream(self, x: Array) -> Array:
        """Returns x as the residual stream has it: in the dtype that computes, varying over its axes."""
        return vary(x.astype(self.zero.compute), self.stream_axes)

    def layer(
        self,
        batch: Batch,
        key: Array | None,
        kind: SlotKind,
        active: Array | None = None,
    ) -> Callable[..., Array]:
        """Returns the function (a layer's differentiated weights, x, its constant weights, index) -> x.

        A layer with index -1 is padding, of a stage with fewer layers than others, and returns x as it is; one of a
        `skipped` slot is never called so. `kind` says which stack it is of and what its matrix products are. If a stage
        is not `active`, x belongs to no microbatch, and no expert computes it.
        """
        sequence_at = sequences(
            self.config.model, self.positions(batch), batch.get("segments")
        )
        routing_at = self.routing(batch, active)
        dropout = self._dropout(key, batch)
        lora_dropout = Dropout(self.config.lora.dropout, key, batch["rows"])
        adapter_dropout = lora_dropout.at(ADAPTER_SITE)

        def layer(
            differentiated: Tree,
            x: Array,
            constant: Tree,
            index: Array,
        ) -> Array:
            weights = Weights(differentiated, constant)
            modules = self.zero.gather_at_use(kind.stack, weights)
            sequence = sequence_at(index)
            if self.take_maxima is not None:
                sequence = self.take_maxima(sequence, modules["attention"], batch)
            block = nnx.merge(self.block_graphs[kind.stack], modules)
            self.layout.storage.prepare(block, self.zero, weights, kind, index)
            use_adapters(
                block, self.adapters, adapter_dropout.at(index), self.collectives
            )
            block.attention.attend = self.parts.attention
            if routing_at is not None:
                sequence = replace(sequence, routing=routing_at(index))
            y = self.parts.block(
                block, x, sequence, self.collectives, dropout.at(index)
            )
            self.parts.check_block(x, y)
            return vary(y, varying(x))

        def layer_or_padding(
            differentiated: Tree,
            x: Array,
            constant: Tree,
            index: Array,
        ) -> Array:
            def run(x: Array) -> Array:
                return layer(differentiated, x, constant, index)

            is_layer = index >= 0
            if self.skips:
                return lax.cond(is_layer, run, lambda x: x, x)
            return jnp.where(is_layer, run(x), x)

        function = layer
        if kind.padded and not kind.skipped:
            function = layer_or_padding
        named = jax.named_scope(xla.LAYER)(function)
        gathers = self.zero.gathers_at_use or self.collectives.sequence_parallel
        looped = all(len(segment.period) == 1 for segment in self.layout.segments)
        return checkpointed(
            named, self.config.parallel, gathers, self.config.lora.rank, looped
        )

    def last_stream(self, weights: Weights, batch: Batch, key: Array | None) -> Array:
        """Returns the residual stream after the last layer, on a mesh without pipeline stages."""
        x = self.embed(weights, batch, key)
        segments = self.layout.segments
        stacked = {
            stack: (weights.part(stack), jnp.asarray(layers.index_at[0]))
            for stack, layers in self.layout.stacks.items()
        }
        wide = {stack: self.layout.wide_places(stack, 1) for stack in stacked}
        parts = split_layers(stacked, segments, wide)
        for segment, part in zip(segments, parts, strict=True):
            layers = [self.layer(batch, key, kind) for kind in segment.period]

            def step(
                x: Array,
                part: list[tuple[Weights, Array]],
                layers: list[Callable] = layers,
            ) -> tuple[Array, None]:
                for layer, (weights, index) in zip(layers, part, strict=True):
                    x = layer(weights.differentiated, x, weights.constant, index)
                return x, None

            x, _ = lax.scan(step, x, part)
        return x

    @jax.named_scope(xla.HEAD)
    def loss(
        self,
        weights: Weights,
        x: Array,
        batch: Batch,
        here: Array,
        seed: Array,
    ) -> tuple[Array, Totals]:
        """Returns `seed` times the loss of a microbatch, to be differentiated, and its `total`. Both are zeros where
        not `here`, unless the stages share the vocabulary.
        """
        head = self.head_weights(weights)
        seeded, total, measured = self.seeded_loss(head, x, batch, here, seed)
        if self.predictions is not None:
            more, ahead = self.predictions(weights, head, x, batch, here, seed)
            seeded = seeded + more
            measured = {**measured, "mtp_loss": ahead}
        return _where(here, (seeded, (total, measured)))

    def seeded_loss(
        self,
        head: HeadWeights,
        x: Array,
        batch: Batch,
        here: Array,
        seed: Array,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Returns `seed` times the loss of a microbatch, and its `total`, wherever x is from."""
        labels = batch[LABELS]
        chunk = self._loss_chunk(labels)
        # In dpo a label counts by the losses of its pair, in grpo by those of its answer.
        counts_by_losses = self.config.train.objective in ("dpo", "grpo")
        if chunk is None or counts_by_losses:
            losses = self._losses(head, x, batch, here)
            total, measured = self.total(losses, batch)
            return seed * total, total, measured
        # One loop over the chunks makes the losses and the gradient of their sum.
        counts = seed * batch.get(WEIGHTS, jnp.ones(labels.shape))
        x = self.collectives.share_last_stage(x, here)
        chunk_loss = self._chunk_loss
        seeded, losses = sum_chunk_losses(chunk_loss, head, x, labels, counts, chunk)
        total, measured = self.total(losses, batch)
        return seeded, total, measured

    @jax.named_scope(xla.HEAD)
    def label_losses(
        self,
        weights: Weights,
        x: Array,
        batch: Batch,
        here: Array,
    ) -> LabelLosses:
        """Returns the loss of each label; of an image also whether the argmax is its class."""
        if not self.of_images:
            losses = self._losses(self.head_weights(weights), x, batch, here)
            return _where(here, losses)
        logits = self.logits(weights, x, here)
        losses = self.parts.loss(logits, batch[LABELS], _mixed(batch))
        correct = self.parts.vocabulary.argmax(logits) == batch[LABELS]
        losses = losses._replace(correct=correct.astype(jnp.float32))
        return _where(here, losses)

    def logits(self, weights: Weights, x: Array, here: Array) -> Array:
        """Returns this device's share of the logits, float32 [b, T, V share]; x counts on the stage where `here`."""
        return self._logits(self.head_weights(weights), x, here)

    def head_weights(self, weights: Weights) -> HeadWeights:
        own = self.zero.gather_at_use("head", weights.part("head"))
        if not self.config.model.tied_head:
            return own, None
        embedding = self.zero.gather_at_use("embedding", weights.part("embedding"))
        return own, embedding["tokens"]

    def _losses(
        self,
        head: HeadWeights,
        x: Array,
        batch: Batch,
        here: Array,
    ) -> LabelLosses:
        """Returns the loss of each label, float32 [b, T]; x counts on the stage where `here`."""
        labels = batch[LABELS]
        chunk = self._loss_chunk(labels)
        if chunk is None:
            logits = self._logits(head, x, here)
            return self.parts.loss(logits, labels, _mixed(batch))
        x = self.collectives.share_last_stage(x, here)
        return chunk_losses(self._chunk_loss, head, x, labels, chunk)

    def _loss_chunk(self, labels: Array) -> int | None:
        """Returns how many labels have logits at once; None: all."""
        ranks = self.collectives.vocabulary_ranks
        shard = -(-self.config.model.vocab_size // ranks)
        return loss_chunk(self.config, labels.size, shard)

    def _chunk_loss(self, head: HeadWeights, x: Array, labels: Array) -> LabelLosses:
        """Returns the losses of a chunk of labels; x is the same on all stages that share the vocabulary."""
        own, tied = head
        logits = nnx.merge(self.head_graph, own)(x, tied, self.collectives)
        return self.parts.loss(logits, labels)

    def _logits(self, weights: HeadWeights, x: Array, here: Array) -> Array:
        own, tied = weights
        head = nnx.merge(self.head_graph, own)
        x = self.collectives.share_last_stage(head.read(x), here)
        return head(x, tied, self.collectives)

    def total(self, labels: LabelLosses, batch: Batch) -> Totals:
        """Returns the sum of the losses of labels, [.., T], not yet divided by what counts in a batch
        (`model.loss.counted`).

        Beside it stands the sum of their negative log-likelihood, `nll`, if the loss has other terms too.
        """
        if self.config.train.objective == "dpo":
            return dpo(
                labels.losses, batch, self.config.train.dpo_beta, self.collectives
            )
        if self.config.train.objective == "grpo":
            loss, measured = policy_loss(
                labels.losses, batch, self.config.rl, self.collectives
            )
            return loss, {**measured, ROW_GAPS: self._row_gaps(labels.losses, batch)}
        measured = {}
        if labels.nll is not None:
            measured["nll"] = weighted(labels.nll, batch)
        return weighted(labels.losses, batch), measured

    def _row_gaps(self, losses: Array, batch: Batch) -> Array:
        """Returns the gaps of a microbatch's rows in their places among those of all, float32 [rows x context], zeros
        elsewhere: summed over microbatches and ranks it holds each.
        """
        gaps = row_gaps(losses, batch)
        ways = self.config.mesh.ways("data") * self.config.parallel.microbatches
        parts = self.collectives.context
        part = lax.axis_index(CONTEXT) if parts > 1 else 0
        rows = ways * losses.shape[-2]
        zeros = vary(jnp.zeros((rows, parts)), varying(gaps))
        return zeros.at[batch["rows"].ravel(), part].add(gaps).ravel()

    def length(self, batch: Batch) -> int:
        """Returns the positions of a row, or of the part of it that is here."""
        return positions_of(self.config.model) or batch[TOKENS].shape[-1]

    def positions(self, batch: Batch) -> Array:
        if "positions" in batch:
            return batch["positions"]
        return self.collectives.positions(self.length(batch))

    def routing(
        self, batch: Batch, active: Array | None
    ) -> Callable[[Array], Routing] | None:
        """Returns the function (a layer's index) -> which tokens its experts compute; None without experts.

        They do not compute padding: tokens in no document, or behind the last one that weighs; nor the tokens of an
        idle stage, or of a layer that is padding (-1).
        """
        if not self.config.model.moe.experts:
            return None
        routed = self.counted(batch)
        if active is not None:
            routed = routed & active
        taken = batch.get(EXPERTS)

        def routing(index: Array) -> Routing:
            chosen = None
            if taken is not None:
                chosen = lax.dynamic_index_in_dim(
                    taken, jnp.maximum(index, 0), 2, keepdims=False
                )
            return Routing(routed & (index >= 0), batch.get(SEED), chosen)

        return routing

    def counted(self, batch: Batch) -> Array:
        """Returns whether each token is more than padding, bool [b, T]."""
        if "segments" in batch:
            return batch["segments"] > 0
        if LAST in batch:
            positions = self.collectives.positions(self.length(batch))
            return positions <= batch[LAST][:, None]
        return jnp.ones(batch[TOKENS].shape, bool)

    def last_weighing(self, weights: Array) -> Array:
        """Returns each row's last place whose weight is not 0, over all its parts on context ranks: int32 [b]; -1 if
        there is none.
        """
        positions = self.collectives.positions(weights.shape[1])
        places = jnp.where(weights != 0, positions, -1)
        return self.collectives.row_max(places.max(-1))

    def _dropout(self, key: Array | None, batch: Batch) -> Dropout:
        return Dropout(self.config.model.dropout, key, batch["rows"])


def split_layers(
    stacks: dict[str, Tree], segments: list[Segment], wide: dict[str, np.ndarray]
) -> list[list[Tree]]:
    """Splits stacked layers into those of each segment: for each place of its period a tree [turns, ..].

    An array that is shorter than others is of the `wide` layers of its stack alone; the rest get zeros.
    """
    pieces = {}
    for stack, stacked in stacks.items():
        counts = [s.stacks.count(stack) * s.turns for s in segments]
        sizes = [count for count in counts if count]
        pieces[stack] = iter(_split(stacked, sizes, wide[stack]))
    parts = []
    for segment in segments:
        names = segment.stacks
        by_stack = {}
        for stack in dict.fromkeys(names):
            by_stack[stack] = _dealt(next(pieces[stack]), names.count(stack))
        parts.append([by_stack[name].pop(0) for name in names])
    return parts


def _split(stacked: Tree, sizes: list[int], wide: np.ndarray) -> list[Tree]:
    if len(sizes) == 1:
        return [stacked]
    leaves, tree = jax.tree.flatten(stacked)
    count = sum(sizes)

    def split(leaf: Array) -> list[Array]:
        if len(leaf) == count:
            # its gradient is one concatenation
            return list(lax.split(leaf, sizes))
        has_layer = np.isin(np.arange(count), wide)
        of_pieces = np.split(has_layer, np.cumsum(sizes)[:-1])
        ends = np.cumsum([has.sum() for has in of_pieces])
        parts = jnp.split(leaf, ends[:-1])
        return [_spread(part, has) for part, has in zip(parts, of_pieces, strict=True)]

    pieces = [split(leaf) for leaf in leaves]
    return [jax.tree.unflatten(tree, piece) for piece in zip(*pieces, strict=True)]


def _spread(layers: Array, has: np.ndarray) -> Array:
    """Returns an array with those layers where it `has` them, and zeros elsewhere."""
    if has.all():
        return layers
    shape = (len(has), *layers.shape[1:])
    zeros = vary(jnp.zeros(shape, layers.dtype), varying(layers))
    if not has.any():
        return zeros
    return zeros.at[np.flatnonzero(has)].set(layers)


def _dealt(stacked: Tree, count: int) -> list[Tree]:
    """Deals out stacked layers in turn to `count` places: [turns * count, ..] to as many trees [turns, ..]."""
    if count == 1:
        return [stacked]
    by_turn = lambda a: a.reshape(-1, count, *a.shape[1:])
    turns = jax.tree.map(by_turn, stacked)
    places = range(count)
    return [jax.tree.map(lambda a, n=n: a[:, n], turns) for n in places]


def joined(parts: list[Tree]) -> Tree:
    """Concatenates stacked layers."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def joined_stacks(parts: list[dict[str, Tree]]) -> dict[str, Tree]:
    """Concatenates the stacked layers of each stack; a part may have some stacks only."""
    stacks = dict.fromkeys(stack for part in parts for stack in part)
    return {
        stack: joined([part[stack] for part in parts if stack in part])
        for stack in stacks
    }


def group_stacks(segment: Segment, of_places: list[Tree]) -> dict[str, Tree]:
    """Returns the stacked layers of each stack, from those of each place of a period, [turns, ..]."""
    places: dict[str, list[Tree]] = {}
    for kind, tree in zip(segment.period, of_places, strict=True):
        places.setdefault(kind.stack, []).append(tree)

    def interleave(*arrays: Array) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        return jnp.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])

    return {stack: jax.tree.map(interleave, *trees) for stack, trees in places.items()}


# --- buffers


def added(totals: Tree, more: Tree) -> Tree:
    """Returns the sums of two trees, in the dtypes of `totals`."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, more)


def widen_gradients(gradients: Tree) -> Tree:
    return jax.tree.map(lambda g: g.astype(jnp.float32), gradients)


def sum_at_once(sum_of: Callable[[Array], Array], scalars: Tree) -> Tree:
    """Returns the sums of arrays that vary over the same axes, by one call of `sum_of`: one collective."""
    leaves, tree = jax.tree.flatten(scalars)
    assert len({frozenset(varying(leaf)) for leaf in leaves}) == 1
    if len(leaves) == 1:
        return jax.tree.unflatten(tree, [sum_of(leaves[0])])
    together = sum_of(jnp.concatenate([leaf.ravel() for leaf in leaves]))
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = jnp.split(together, ends[:-1])
    sums = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(tree, sums)


def _mixed(batch: Batch) -> Mixed | None:
    if MIX in batch:
        return Mixed(batch[OTHER_LABELS], batch[MIX])
    return None


def weighted(values: Array, batch: Batch) -> Array:
    """Sums the values of labels, times their weights if a batch has any."""
    if WEIGHTS in batch:
        values = values * batch[WEIGHTS]
    return jnp.sum(values)


def _where(here: Array, values: Tree) -> Tree:
    """Returns the values on the stage where `here`, zeros on others; values common to all stages stay as they are."""

    def mask(x: Array) -> Array:
        if PIPELINE not in varying(x):
            return x
        return jnp.where(here, x, 0.0)

    return jax.tree.map(mask, values)
