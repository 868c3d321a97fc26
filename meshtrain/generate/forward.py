"""A program's model as decoding runs it: on the program's own mesh, with other splits.

    training   rows over data, tokens over context, layers over pipeline, experts over expert, heads over tensor
    decoding   slots over data x expert x context x pipeline,                                  heads over tensor

Every rank of slots has all layers and all experts (`generate.resharding`), so that a step sends over tensor alone.
A second mesh would not do: a program takes no arrays of devices in another order.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshtrain.config import Config, ConfigError, replaced
from meshtrain.config.schema import ParallelConfig
from meshtrain.config.stacks import stack_of_layers
from meshtrain.families import FAMILIES
from meshtrain.generate import held
from meshtrain.generate.cache import DecodeAttention, LayerCache, OwnGroups, PromptAttention
from meshtrain.generate.resharding import Parts
from meshtrain.mesh import TENSOR, platform
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.hooks import Hooks, ModelParts
from meshtrain.model.rope import sequences
from meshtrain.parallel.parallelize import make_layout
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.reader import check_learned
from meshtrain.step import Program

LEAST_BUCKET = 16  # tokens
Caches = tuple[LayerCache, ...]


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
        self.graphs = Parts(forward.embedding_graph, forward.block_graphs, forward.head_graph)
        self.parts = ModelParts(self.config, self.collectives, Hooks(block=program.hooks.block))
        sizes = self.config.model
        self.groups = OwnGroups(sizes.heads, sizes.kv_heads, self.config.mesh.tensor)
        self.dtype = jnp.dtype(self.config.precision.compute)
        prompt: type[PromptAttention] = PromptAttention
        self._decode: type[DecodeAttention] = DecodeAttention
        if sizes.mla.kv_rank:
            from meshtrain.generate.latent import LatentDecode, LatentPrompt

            prompt = LatentPrompt
            self._decode = LatentDecode
        self._prompt = partial(prompt, self.parts.attention, self.groups)

    def bucket(self, tokens: int) -> int:
        """Returns the length that a prompt is padded to."""
        return min(self.length, max(LEAST_BUCKET, 1 << (tokens - 1).bit_length()))

    def read(
        self, weights: Parts, tokens: jax.Array, lengths: jax.Array
    ) -> tuple[Caches, jax.Array]:
        """Reads prompts [B, T] of `lengths` [B]: the keys and values of each layer, [B, T, G, K], and the logits behind
        each prompt, float32 [B, V].
        """
        count = self.config.model.layers
        layers = [self._prompt() for _ in range(count)]
        x = self._stream(weights, tokens, jnp.arange(tokens.shape[1]), layers)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return tuple(layer.cache for layer in layers), self._logits(weights, last)[:, 0]

    def logprobs(
        self, weights: Parts, text: jax.Array, temperature: jax.Array | float
    ) -> jax.Array:
        """Returns the log-probability of each token of a text [T + 1] but the first, float32 [T]."""
        count = self.config.model.layers
        layers = [self._prompt() for _ in range(count)]
        tokens = text[None, :-1]
        x = self._stream(weights, tokens, jnp.arange(tokens.shape[1]), layers)
        by_id = jax.nn.log_softmax(self._logits(weights, x)[0] / temperature)
        return jnp.take_along_axis(by_id, text[1:, None], axis=1)[:, 0]

    def step(
        self, weights: Parts, caches: Caches, tokens: jax.Array, positions: jax.Array
    ) -> tuple[Caches, jax.Array]:
        """Reads one token of every slot at its position, both [S]: the caches with it, and the logits behind it,
        float32 [S, V].
        """
        model = self.config.model
        layers = [self._decode(model, self.groups, cache, positions) for cache in caches]
        x = self._stream(weights, tokens[:, None], positions[:, None], layers)
        return tuple(layer.cache for layer in layers), self._logits(weights, x)[:, 0]

    def _stream(
        self,
        weights: Parts,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Sequence[PromptAttention | DecodeAttention],
    ) -> jax.Array:
        """Returns the residual stream behind the last layer, [B, T, D], each layer with its own attention."""
        embedding = nnx.merge(self.graphs.embedding, weights.embedding)
        x = embedding(tokens, positions, self.collectives).astype(self.dtype)
        sequence = sequences(self.config.model, positions)
        stacks = stack_of_layers(self.config.model)
        for layer, (stack, leaves) in enumerate(zip(stacks, weights.blocks, strict=True)):
            block = nnx.merge(self.graphs.blocks[stack], held.multiplied(leaves, self.dtype))
            block.attention.attend = attention[layer]
            y = self.parts.block(block, x, sequence(layer), self.collectives, NO_DROPOUT)
            self.parts.check_block(x, y)
            x = y
        return x

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
        several = {axis: self.mesh.shape[axis] for axis in self.rows if self.mesh.shape[axis] > 1}
        shared = " x ".join(f"{axis} {size}" for axis, size in several.items()) or "one device"
        raise ConfigError(f"{slots} slots cannot be shared by {shared}; give a multiple.")


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
        name = model.attention or getattr(program.hooks.attention, "__qualname__", "a function")
        raise ConfigError(
            f"the model has an attention of its own ({name}), which knows of no cache of keys and values, so that it "
            "cannot generate; "
            "mt.read_model gives its logits, and meshtrain evaluate its perplexity."
        )
