"""A program's model as decoding runs it: on the program's own mesh, with other splits.

    training   rows over data, tokens over context, layers over pipeline, experts over expert, heads over tensor
    decoding   slots over data x expert x context x pipeline,                                  heads over tensor

Every rank of slots has all layers and all experts (`generate.resharding`), so that a step sends over tensor alone.
A second mesh would not do: a program takes no arrays of devices in another order.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshtrain.config import Config, ConfigError, replaced
from meshtrain.config.schema import ParallelConfig
from meshtrain.config.stacks import LINEAR, kinds_of_layers, stack_of_layers
from meshtrain.families import FAMILIES
from meshtrain.generate import held
from meshtrain.generate.cache import (
    DecodeAttention,
    LayerCache,
    OwnGroups,
    PromptAttention,
)
from meshtrain.generate.latent import LatentDecode, LatentPrompt
from meshtrain.generate.linear_cache import DecodeMix, LinearCache, PromptMix
from meshtrain.generate.resharding import Parts
from meshtrain.mesh import TENSOR, platform
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.hooks import Hooks, ModelParts
from meshtrain.model.rope import Routing, sequences
from meshtrain.parallel.parallelize import make_layout
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.reader import check_learned
from meshtrain.step import Program

LEAST_BUCKET = 16  # tokens
Caches = tuple[LayerCache | LinearCache, ...]
Mixer = PromptAttention | DecodeAttention | PromptMix | DecodeMix


class ReadTokens(NamedTuple):
    """The layers' caches behind tokens that were read, and more of these tokens."""

    caches: Caches
    logits: jax.Array  # behind the last of each row, float32 [B, V]
    # that took each token, int32 [B, T, layers, top_k]; None without experts
    experts: jax.Array | None
    stream: jax.Array  # behind the last layer, [B, T, D]


class UseCollectives(MeshCollectives):
    """`parallel.tensor` without a gradient to come: what all ranks have alike need not be summed to be the same."""

    def share_stream(self, weight: jax.Array) -> jax.Array:
        return weight


class DecodingForward:
    """The layers and the head for `slots` of at most `length` positions each; its methods are called inside shard_map.

    Raises ConfigError for a mesh with islands, slots that the ranks cannot share, a length beyond the model's
    positions, and an attention hook, which cannot use a cache.
    """

    def __init__(self, program: Program, slots: int, length: int) -> None:
        _check(program, length)
        self.mesh = program.mesh
        self.length = length
        # the axes that slots lie over, major first
        self.rows = tuple(axis for axis in self.mesh.axis_names if axis != TENSOR)
        self.ranks = math.prod(self.mesh.shape[axis] for axis in self.rows)
        self._check_slots(slots)
        self.config: Config = decoded_config(program.config)
        self.layout = make_layout(self.config, self.mesh)
        self.collectives = UseCollectives(self.config, platform(self.mesh))
        forward = program.local.forward
        self.graphs = Parts(
            forward.embedding_graph, forward.block_graphs, forward.head_graph
        )
        self.parts = ModelParts(
            self.config, self.collectives, Hooks(block=program.hooks.block)
        )
        sizes = self.config.model
        self.kinds = kinds_of_layers(sizes)
        self.groups = OwnGroups(sizes.heads, sizes.kv_heads, self.config.mesh.tensor)
        self.dtype = jnp.dtype(self.config.precision.compute)
        prompt: type[PromptAttention] = PromptAttention
        self._decode: type[DecodeAttention] = DecodeAttention
        if sizes.mla.kv_rank:
            prompt = LatentPrompt
            self._decode = LatentDecode
        self._prompt = partial(prompt, self.parts.attention, self.groups)

    def bucket(self, tokens: int) -> int:
        """Returns the length that a prompt is padded to."""
        return min(self.length, max(LEAST_BUCKET, 1 << (tokens - 1).bit_length()))

    def read(self, weights: Parts, tokens: jax.Array, lengths: jax.Array) -> ReadTokens:
        """Reads prompts [B, T] of `lengths` [B]: the keys and values of each layer, [B, T, G, K], and the logits behind
        each prompt.
        """
        layers = self._prompt_mixers(lengths)
        x, experts = self._stream(weights, tokens, jnp.arange(tokens.shape[1]), layers)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        caches = tuple(layer.cache for layer in layers)
        return ReadTokens(caches, self._logits(weights, last)[:, 0], experts, x)

    def logprobs(
        self, weights: Parts, text: jax.Array, temperature: jax.Array | float
    ) -> jax.Array:
        """Returns the log-probability of each token of a text [T + 1] but the first, float32 [T]."""
        layers = self._prompt_mixers()
        tokens = text[None, :-1]
        x, _ = self._stream(weights, tokens, jnp.arange(tokens.shape[1]), layers)
        by_id = jax.nn.log_softmax(self._logits(weights, x)[0] / temperature)
        return jnp.take_along_axis(by_id, text[1:, None], axis=1)[:, 0]

    def step(
        self,
        weights: Parts,
        caches: Caches,
        tokens: jax.Array,
        positions: jax.Array,
    ) -> ReadTokens:
        """Reads one token of every slot at its position, both [S]."""
        read = self.read_on(weights, caches, tokens[:, None], positions[:, None])
        return read._replace(logits=read.logits[:, 0])

    def read_on(
        self,
        weights: Parts,
        caches: Caches,
        tokens: jax.Array,
        positions: jax.Array,
    ) -> ReadTokens:
        """Reads tokens of every slot at their positions, both [S, T]; the logits are those behind each, [S, T, V]."""
        model = self.config.model
        layers = [
            DecodeMix(cache)
            if isinstance(cache, LinearCache)
            else self._decode(model, self.groups, cache, positions)
            for cache in caches
        ]
        x, experts = self._stream(weights, tokens, positions, layers)
        caches = tuple(layer.cache for layer in layers)
        return ReadTokens(caches, self._logits(weights, x), experts, x)

    def _prompt_mixers(self, lengths: jax.Array | None = None) -> Sequence[Mixer]:
        """Returns what mixes the tokens of prompts in each layer, and keeps their cache."""
        return [
            PromptMix(self.config.model.linear.chunk, lengths)
            if kind == LINEAR
            else self._prompt()
            for kind in self.kinds
        ]

    def _stream(
        self,
        weights: Parts,
        tokens: jax.Array,
        positions: jax.Array,
        mixers: Sequence[Mixer],
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the residual stream behind the last layer, [B, T, D], each layer with its own mixer, and the
        experts of `ReadTokens`.
        """
        moe = self.config.model.moe
        experts: list[jax.Array] = []
        routing = Routing(note=experts.append)
        embedding = nnx.merge(self.graphs.embedding, weights.embedding)
        x = embedding(tokens, positions, self.collectives).astype(self.dtype)
        sequence = sequences(self.config.model, positions)
        stacks = stack_of_layers(self.config.model)
        for layer, (stack, leaves) in enumerate(
            zip(stacks, weights.blocks, strict=True)
        ):
            block = nnx.merge(
                self.graphs.blocks[stack], held.multiplied(leaves, self.dtype)
            )
            if isinstance(mixers[layer], PromptMix | DecodeMix):
                block.attention.mix = mixers[layer]
            else:
                block.attention.attend = mixers[layer]
            of_layer = replace(sequence(layer), routing=routing)
            y = self.parts.block(block, x, of_layer, self.collectives, NO_DROPOUT)
            self.parts.check_block(x, y)
            x = y
            if moe.experts and len(experts) == layer:
                # a dense layer among layers of experts
                experts.append(jnp.zeros((*x.shape[:2], moe.top_k), jnp.int32))
        if not experts:
            return x, None
        # All tensor ranks have chosen the same, which types do not know.
        return x, lax.pmax(jnp.stack(experts, axis=2), TENSOR)

    def _logits(self, weights: Parts, x: jax.Array) -> jax.Array:
        """Returns the logits behind a stream [S, T, D], float32 [S, T, V], on every tensor rank."""
        head = nnx.merge(self.graphs.head, weights.head)
        tied = weights.embedding["tokens"] if self.config.model.tied_head else None
        shards = head(x, tied, self.collectives)
        padded = lax.all_gather(shards, TENSOR, axis=2, tiled=True, to="invarying")
        return padded[..., : self.config.model.vocab_size]

    def _check_slots(self, slots: int) -> None:
        if slots >= 1 and slots % self.ranks == 0:
            return
        several = {
            axis: self.mesh.shape[axis]
            for axis in self.rows
            if self.mesh.shape[axis] > 1
        }
        shared = (
            " x ".join(f"{axis} {size}" for axis, size in several.items())
            or "one device"
        )
        raise ConfigError(
            f"{slots} slots cannot be shared by {shared}; give a multiple."
        )


def decoded_config(config: Config) -> Config:
    """Returns the config of the same model that splits over tensor alone, on as many devices; nothing is dropped."""
    alone = {"pipeline": 1, "islands": 1, "context": 1, "expert": 1}
    others = config.mesh.devices // config.mesh.tensor
    return replaced(
        config,
        mesh={"data": others, "tensor": config.mesh.tensor, **alone},
        parallel=vars(ParallelConfig()) | {"zero_stage": 0, "vocab": "edge"},
    )


def _check(program: Program, length: int) -> None:
    model = program.config.model
    if not FAMILIES[model.family].causal:
        raise ConfigError(
            f"model.family {model.family} reads in both directions; it cannot go on with a text."
        )
    if program.config.mesh.islands > 1:
        raise ConfigError(
            f"mesh.islands is {program.config.mesh.islands}, but a model generates without islands; leave it out."
        )
    if length < 1:
        raise ConfigError(f"slots of {length} positions hold nothing; give 1 or more.")
    check_learned(model, length)
    if program.hooks.attention is not None:
        name = model.attention or getattr(
            program.hooks.attention, "__qualname__", "a function"
        )
        raise ConfigError(
            f"the model has an attention of its own ({name}), which knows of no cache of keys and values, so that it "
            "cannot generate; "
            "mt.read_model gives its logits, and meshtrain evaluate its perplexity."
        )
