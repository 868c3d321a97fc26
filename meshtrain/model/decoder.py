"""The decoder: embedding, a stack of blocks, output head.

One class serves every family, by its options (see `families`).

ViT's encoder is this decoder too: norms first, one stream, one head; whether a position sees later ones is an option of
attention.

Its weights have one canonical layout, whatever the mesh: a tree of named leaves, in which the blocks' leaves are
stacked along a first axis `layers`, those of each kind of layers by themselves (`config.stacks`). `Embedding`, `Block`
and `Head` are called one by one, since a pipeline puts them on different devices.
"""

import itertools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshtrain.compat import vary, varying
from meshtrain.config import LoraConfig, ModelConfig
from meshtrain.config.model import positions_of
from meshtrain.config.stacks import (
    FULL,
    KINDS,
    kind_of,
    layers_of_stacks,
    model_of_stack,
    stack_of_layers,
)
from meshtrain.families import FAMILIES
from meshtrain.model.attention import capped
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import EMBEDDING_SITE, NO_DROPOUT, Dropout
from meshtrain.model.layers import MLP, Attention, Norm
from meshtrain.model.products import (
    enter,
    linear,
    linear_float32,
    make_parameters,
    unrounded,
)
from meshtrain.model.rope import Sequence, sequences
from meshtrain.registry import late

# imported when a model has such attention
LATENT = late("meshtrain.model.latent:LatentAttention")


class Embedding(nnx.Module):
    """Token embedding, rows split over the vocabulary; learned positions where the family has them."""

    tokens: nnx.Param
    positions: nnx.Param | None = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.scaled = config.scaled_embedding
        make_parameters(self, "embedding", config, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions: jax.Array,
        collectives: Collectives,
        dropout: Dropout = NO_DROPOUT,
    ) -> jax.Array:
        """The residual stream [B, T, D] (this rank's part of it)."""
        table = self.tokens[...]
        local, mine = _own(tokens_BT, table, collectives)
        # In float32, and so its transpose: in bfloat16 the sum of a frequent token's gradients would stand still after
        # some hundred.
        rows = table.astype(jnp.float32)[local]
        x = jnp.where(mine[..., None], rows, 0).astype(table.dtype)
        return self.stream(x, positions, collectives, dropout)

    def stream(
        self,
        x_BTD: jax.Array,
        positions: jax.Array,
        collectives: Collectives,
        dropout: Dropout,
    ) -> jax.Array:
        """Returns the stream from what this rank has looked up: the rows of its tokens, zero for those of other
        ranks.
        """
        x = x_BTD
        if self.scaled:
            # rounded as transformers has it: 55.4256 is 55.5 in bfloat16
            x = x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)
        return _enter_stream(x, self.positions, positions, collectives, dropout)


def _enter_stream(
    x: jax.Array,
    learned: nnx.Param | None,
    positions: jax.Array,
    collectives: Collectives,
    dropout: Dropout,
) -> jax.Array:
    """Returns the stream from embedded tokens or patches, with the learned vectors of their positions if there are
    any.
    """
    if learned is not None:
        x = x + collectives.share_embedding(learned[...])[positions]
    x = collectives.leave_embedding(x)
    return dropout.at(EMBEDDING_SITE).stream(x, collectives.first_position(x.shape[1]))


def add_rows(
    total_VD: jax.Array,
    tokens_BT: jax.Array,
    g_BTD: jax.Array,
    collectives: Collectives,
) -> jax.Array:
    """Adds the gradient of the table: `total_VD` with each token's cotangent in its row."""
    local, mine = _own(tokens_BT, total_VD, collectives)
    own_BTD = jnp.where(mine[..., None], g_BTD, 0)
    return total_VD.at[local].add(own_BTD.astype(total_VD.dtype))


def _own(
    tokens_BT: jax.Array, table_VD: jax.Array, collectives: Collectives
) -> tuple[jax.Array, jax.Array]:
    """Returns each token's row in this rank's table, 0 where it has none, and whether it has one."""
    rows = table_VD.shape[0]
    local = tokens_BT - collectives.first_token_id(rows)
    mine = (local >= 0) & (local < rows)
    return jnp.where(mine, local, 0), mine


class PatchEmbedding(nnx.Module):
    """Patches to the residual stream, a linear layer of their numbers (Dosovitskiy et al. 2021, equation 1).

        image [H, W, C] ─cut─► patches [N, P] ─x W─ + bias ─┐
                                                             ├─ + positions ─►  [T, D]
                                       class token [1, D] ───┘                  T = N + 1, or N for the mean of all

    W [P, D] is cut along P as a vocabulary is along its ids: each rank multiplies the numbers of a patch whose rows it
    has, and the sums of the ranks meet where those of looked-up tokens do. A convolution whose stride is its width is
    this product.
    """

    patches: nnx.Param
    bias: nnx.Param
    class_token: nnx.Param | None = None
    positions: nnx.Param | None = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        make_parameters(self, "embedding", config, rngs)

    def __call__(
        self,
        patches_BNP: jax.Array,
        positions: jax.Array,
        collectives: Collectives,
        dropout: Dropout = NO_DROPOUT,
    ) -> jax.Array:
        """The residual stream [B, T, D] (this rank's part of it) of patches of any floating dtype; computed in the
        weights'.
        """
        weight = self.patches[...]
        own = _own_numbers(patches_BNP, len(weight), collectives).astype(weight.dtype)
        own = vary(own, varying(weight))
        rows = own.reshape(-1, own.shape[-1])
        x = linear(rows, weight).reshape(*own.shape[:2], -1)
        x = x + collectives.share_embedding(self.bias[...])
        if self.class_token is not None:
            token = collectives.share_embedding(self.class_token[...])
            tokens = jnp.broadcast_to(token, (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([tokens, x], axis=1)
        return _enter_stream(x, self.positions, positions, collectives, dropout)


def _own_numbers(
    patches_BNP: jax.Array, rows: int, collectives: Collectives
) -> jax.Array:
    """Returns the numbers of each patch that this rank's `rows` of the weight are for; zeros where rows are padding."""
    padding = rows * collectives.vocabulary_ranks - patches_BNP.shape[-1]
    padded = patches_BNP
    if padding:
        padded = jnp.pad(patches_BNP, ((0, 0), (0, 0), (0, padding)))
    return jax.lax.dynamic_slice_in_dim(
        padded, collectives.first_token_id(rows), rows, axis=-1
    )


class Head(nnx.Module):
    """Final norm and output projection, columns split over the vocabulary; tied to the embedding when `weight` is None.

    For an image it reads one position, the class token or the mean of the patches (`pool`), and gives one row of
    logits.
    """

    weight: nnx.Param | None = None
    bias: nnx.Param | None = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm = Norm("head.norm", config, rngs)
        self.cap = config.logit_cap
        self.pool = config.pool if FAMILIES[config.family].images else None
        make_parameters(self, "head", config, rngs)

    def read(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the head reads of the stream, and all that need be sent to it: all of it, or the class token,
        [B, 1, D].
        """
        # where the sequence is split over ranks, their first positions: see `_pooled`
        if self.pool == "class":
            return x_BTD[:, :1]
        return x_BTD

    def __call__(
        self, x_BTD: jax.Array, tied_VD: jax.Array | None, collectives: Collectives
    ) -> jax.Array:
        """This device's share of the logits, float32 [B, T, V share], of images [B, 1, V share], from what it has
        `read`.
        """
        weight = tied_VD.T if self.weight is None else self.weight[...]  # type: ignore[union-attr]
        h = self._pooled(collectives.enter_head(self._pooled(self.norm(x_BTD))))
        h = vary(h, varying(weight))
        rows = h.reshape(-1, h.shape[-1])
        logits = linear_float32(rows, weight).reshape(*h.shape[:2], -1)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        if self.cap:
            return capped(self.cap, logits)
        return logits

    def _pooled(self, x_BTD: jax.Array) -> jax.Array:
        """One position of each image, [B, 1, D]: of this rank's part of the sequence, then of what the ranks, equally
        long, have of it.
        """
        if self.pool == "mean":
            mean = jnp.mean(x_BTD, axis=1, keepdims=True, dtype=jnp.float32)
            return mean.astype(x_BTD.dtype)
        return self.read(x_BTD)


def mixer_of(config: ModelConfig) -> Any:
    """Returns the class of what a model's layers, which are all alike, mix tokens by."""
    kind = kind_of(config)
    if kind != FULL:
        return KINDS[kind].module
    return LATENT if config.mla.kv_rank else Attention


class Block(nnx.Module):
    """Pre-norm transformer block; with post-norms too each branch is normed once more before it is added.

    With experts, `mlp` is what every token is computed by beside those it chooses, if there is any. `config` is that of
    its stack (`config.stacks.model_of_stack`), whose layers are all alike.
    """

    mlp: MLP | None = None
    experts: Any = None  # a model.experts.Experts
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, lora: LoraConfig | None = None
    ) -> None:
        self.attention_norm = Norm("blocks.attention_norm", config, rngs)
        self.attention = mixer_of(config)("blocks.attention", config, rngs, lora)
        self.mlp_norm = Norm("blocks.mlp_norm", config, rngs)
        if config.d_ff:
            self.mlp = MLP("blocks.mlp", config, rngs, lora)
        if config.moe.experts:
            from meshtrain.model.experts import Experts

            self.experts = Experts("blocks.experts", config, rngs)
        if config.post_norms:
            self.attention_post_norm = Norm("blocks.attention_post_norm", config, rngs)
            self.mlp_post_norm = Norm("blocks.mlp_post_norm", config, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        sequence: Sequence,
        collectives: Collectives,
        dropout: Dropout,
    ) -> jax.Array:
        first = collectives.first_position(x_BTD.shape[1])
        normed = self.attention_norm(x_BTD)
        h = enter(normed, collectives, self.attention)
        a = self.attention(h, sequence, collectives, dropout.at(0))
        if self.attention_post_norm is not None:
            a = self.attention_post_norm(a, collectives.share_stream)
        x_BTD = x_BTD + dropout.at(1).stream(a, first)
        normed = self.mlp_norm(x_BTD)
        for_experts = collectives.expert_collectives()
        parts = self.experts is not None and for_experts is not collectives
        if parts and self.mlp is None:
            h = normed
        else:
            h = enter(normed, collectives, self.mlp)
        if self.mlp is not None:
            m = self.mlp(h, collectives)
        else:
            m = jnp.zeros_like(x_BTD)
        if self.experts is not None:
            tokens = normed if parts else unrounded(h)
            m = m + self.experts(tokens, sequence, for_experts)
        if self.mlp_post_norm is not None:
            m = self.mlp_post_norm(m, collectives.share_stream)
        return x_BTD + dropout.at(2).stream(m, first)


class Decoder(nnx.Module):
    """The whole model on one device; also the recipe for its parts elsewhere."""

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, lora: LoraConfig | None = None
    ) -> None:
        self.config = config
        root = rngs.params()
        # A layer's numbers follow from its index alone.
        keys = jax.random.split(jax.random.fold_in(root, 0), config.layers)
        embedding = PatchEmbedding if FAMILIES[config.family].images else Embedding
        self.embedding = embedding(config, nnx.Rngs(params=jax.random.fold_in(root, 1)))
        stacks = layers_of_stacks(config)
        for stack, layers in stacks.items():
            alike = model_of_stack(config, stack)
            make = partial(_block, alike, lora)
            if len(stacks) == 1:
                own = keys
            else:
                own = keys[np.array(layers)]
            setattr(self, stack, nnx.vmap(make, in_axes=0, out_axes=0)(own))
        self.head = Head(config, nnx.Rngs(params=jax.random.fold_in(root, 2)))
        if config.mtp:
            from meshtrain.model.prediction import Predictions

            self.mtp = Predictions(
                config, Block, nnx.Rngs(params=jax.random.fold_in(root, 3))
            )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [B, T, V] of tokens [B, T], or [B, 1, V] of patches [B, N, P], on one device, for notebooks and
        tests.
        """
        collectives = Collectives()
        positions = jnp.arange(positions_of(self.config) or inputs.shape[1])
        x = self.embedding(inputs, positions, collectives)
        sequence_of = sequences(self.config, positions, None)
        first = 0
        taken = dict.fromkeys(layers_of_stacks(self.config), 0)
        # neighbours of one stack in one loop
        for stack, run in itertools.groupby(stack_of_layers(self.config)):
            count = len(list(run))
            graph, weights = nnx.split(getattr(self, stack))
            here = slice(taken[stack], taken[stack] + count)
            weights = jax.tree.map(operator.itemgetter(here), weights)

            def layer(
                x: jax.Array, given: tuple[nnx.State, jax.Array], graph: Any = graph
            ) -> tuple[jax.Array, None]:
                weights, index = given
                block = nnx.merge(graph, weights)
                return block(x, sequence_of(index), collectives, NO_DROPOUT), None

            indices = jnp.arange(first, first + count)
            x, _ = jax.lax.scan(layer, x, (weights, indices))
            first += count
            taken[stack] += count
        if isinstance(self.embedding, Embedding):
            tied = self.embedding.tokens[...]
        else:
            tied = None
        return self.head(self.head.read(x), tied, collectives)


def _block(config: ModelConfig, lora: LoraConfig | None, key: jax.Array) -> Block:
    return Block(config, nnx.Rngs(params=key, lora=jax.random.fold_in(key, 1)), lora)
