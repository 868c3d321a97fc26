"""A model's compiled programs for generating: prefill of a prompt into a slot, and decode, one token for every slot.

    prompt [T] ──padded to a power of two──► prefill ─┐            each bucket is compiled once, when it is first used
                                                      ▼
                       Slots: cache, last token, position, sampling ──► decode ──► Slots, Picked ──► decode ──► ...

A state is donated and the next decode reads the token that the last one chose where it lies, so that a host can dispatch a step before
it has seen what the one before chose. Layers stand one after the other in the program, each with weights of its own
(see `weights`).
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.compat import vary, varying
from meshtrain.config import Config, ConfigError, replaced
from meshtrain.families import FAMILIES
from meshtrain.generate.cache import Appending, Kept, OwnGroups, Reading, written
from meshtrain.generate.request import MOST_LIKELY, Sampling
from meshtrain.generate.sampling import SamplingArrays, sample
from meshtrain.generate.weights import Held, specs, taken_over
from meshtrain.mesh import DATA, TENSOR, platform
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.hooks import Hooks, Parts
from meshtrain.model.sequence import sequences
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.reader import Model

# tokens of the smallest bucket
LEAST_BUCKET = 16


class Slots(NamedTuple):
    """What lies on the devices between two steps; slots over data, key/value heads over tensor."""

    cache: Any  # a tuple of `cache.Kept`, a layer each
    tokens: Any  # int32 [S]: chosen last, and not yet read
    positions: Any  # int32 [S]: theirs
    how: Any  # SamplingArrays


class Picked(NamedTuple):
    """Chosen tokens; of a prefill those of its slot alone, without the axis S."""

    tokens: jax.Array  # int32 [S]
    logprobs: jax.Array | None = None  # float32 [S], of the model's own distribution (at temperature 1)
    likeliest_ids: jax.Array | None = None  # int32 [S, MOST_LIKELY], or the whole vocabulary where that is smaller
    likeliest_logprobs: jax.Array | None = None  # float32 likewise


class UseCollectives(MeshCollectives):
    """`parallel.tensor` without a gradient to come: what all ranks have alike need not be summed to be the same."""

    def share_stream(self, weight: jax.Array) -> jax.Array:
        return weight


class Decoding:
    """Compiled prefill and decode of one model on one mesh (data x tensor), for so many `slots` of at most `length` positions each.

    `keep` False frees the model's own arrays as its weights are taken over: it then gives no logits any more, and no more memory is
    needed than for one weight of all layers besides. ConfigError for a mesh with stages, for slots that data does not divide, for a
    length that the model has no positions for, and for an attention hook, which knows of no cache.
    """

    def __init__(self, model: Model, slots: int, length: int, keep: bool = True) -> None:
        self.slots, self.length = slots, length
        self.mesh = model.program.mesh
        self.config: Config = replaced(
            model.config, parallel={"zero_stage": 0, "sequence_parallel": False, "vocab": "spread"}
        )
        _check(self.config, model.program.hooks, slots, length)
        self.layout = Layout(self.config, self.mesh)
        self.collectives = UseCollectives(self.config, platform(self.mesh))
        forward = model.program.local.forward
        self.graphs = Held(forward.embedding_graph, forward.block_graph, forward.head_graph)
        self.parts = Parts(self.config, self.collectives, Hooks(block=model.program.hooks.block))
        sizes, tensor = self.config.model, self.config.mesh.tensor
        self.groups = OwnGroups(sizes.heads, sizes.kv_heads, tensor)
        self.dtype = jnp.dtype(self.config.precision.compute)
        self.weights = taken_over(model, self.layout, keep)

    # --- what lies on the devices

    @cached_property
    def state_specs(self) -> Slots:
        """Of arrays, their PartitionSpecs."""
        rows, layer = PartitionSpec(DATA), PartitionSpec(DATA, TENSOR)
        return jax.tree.map(lambda x: layer if x.ndim > 1 else rows, jax.eval_shape(self._nothing))

    def empty(self) -> Slots:
        """Slots that hold nothing."""
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state_specs)
        return jax.jit(self._nothing, out_shardings=shardings)()

    def _nothing(self) -> Slots:
        model, rows = self.config.model, (self.slots,)
        shape = (*rows, self.groups.each * self.config.mesh.tensor, self.length, model.head_dim)
        cache = tuple(Kept(*(jnp.zeros(shape, self.dtype) for _ in Kept._fields)) for _ in range(model.layers))
        greedy = jax.tree.map(lambda x: jnp.full(rows, x, x.dtype), SamplingArrays.of(Sampling()))
        return Slots(cache, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32), greedy)

    @property
    def vocabulary(self) -> int:
        return self.config.model.vocab_size

    @property
    def synchronous(self) -> bool:
        """Whether a program must end before the next is dispatched: fake devices deadlock with two under way."""
        return platform(self.mesh) == "cpu" and self.mesh.size > 1

    # --- the two calls

    def prefill(self, state: Slots, slot: int, tokens: np.ndarray, sampling: Sampling) -> tuple[Slots, Picked]:
        """Reads a prompt, int [T], into a slot, and chooses the token behind it; the state is used up. Waits for nothing."""
        if not 1 <= len(tokens) <= self.length:
            raise ConfigError(
                f"a prompt of {len(tokens)} tokens does not fit; it must have 1 to {self.length}, the positions of a slot."
            )
        padded = np.zeros((1, self.bucket(len(tokens))), np.int32)
        padded[0, : len(tokens)] = tokens
        how = SamplingArrays.of(sampling)
        return self._prefill(self.weights, state, np.int32(slot), padded, np.int32(len(tokens)), how)

    def decode(self, state: Slots, likeliest: bool = False) -> tuple[Slots, Picked]:
        """One more token for every slot; the state is used up. Waits for nothing. `likeliest`: with log-probabilities."""
        return self._decode[likeliest](self.weights, state)

    @property
    def compiled(self) -> int:
        """Programs compiled so far: one for each bucket that a prompt fell into, and one or two that decode."""
        return sum(step._cache_size() for step in (self._prefill, *self._decode.values()))

    def lower(self, likeliest: bool = False) -> jax.stages.Lowered:
        """The decode program, lowered for arrays as they will be."""
        state = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)),
            jax.eval_shape(self._nothing),
            self.state_specs,
        )
        return self._decode[likeliest].lower(self.weights, state)

    def bucket(self, tokens: int) -> int:
        """The length that a prompt is padded to."""
        return min(self.length, max(LEAST_BUCKET, 1 << (tokens - 1).bit_length()))

    # --- the programs

    @cached_property
    def _prefill(self) -> Any:
        everywhere = PartitionSpec()
        return self._compiled(self._read_prompt, (everywhere,) * 4, everywhere)

    @cached_property
    def _decode(self) -> dict[bool, Any]:
        rows = PartitionSpec(DATA)
        return {told: self._compiled(partial(self._one_more, told=told), (), rows) for told in (False, True)}

    def _compiled(self, function: Callable[..., Any], more: tuple[Any, ...], picked: PartitionSpec) -> Any:
        in_specs, out_specs = (specs(self.layout), self.state_specs, *more), (self.state_specs, picked)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, donate_argnums=1)

    def _read_prompt(
        self, weights: Held, state: Slots, slot: jax.Array, tokens: jax.Array, length: jax.Array, how: SamplingArrays
    ) -> tuple[Slots, Picked]:
        slots = len(state.tokens)
        slot = slot - lax.axis_index(DATA) * slots
        kept = []

        def attention(layer: int) -> Reading:
            kept.append(Reading(self.parts.attention, self.groups))
            return kept[-1]

        x = self._layers(weights, tokens, jnp.arange(tokens.shape[1]), attention)
        x = lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
        picked = self._pick(weights, x, jax.tree.map(lambda x: x[None], how), length[None], told=True)
        cache = tuple(
            Kept(*(written(old, new, slot, length) for old, new in zip(before, layer.kept, strict=True)))
            for before, layer in zip(state.cache, kept, strict=True)
        )
        # a slot of another data rank is none here
        mine = jnp.arange(slots) == slot
        put = lambda old, new: jnp.where(mine, vary(new, varying(old)), old)  # noqa: E731
        state = Slots(
            cache, put(state.tokens, picked.tokens), put(state.positions, length), jax.tree.map(put, state.how, how)
        )
        return state, jax.tree.map(lambda x: x[0], picked)

    def _one_more(self, weights: Held, state: Slots, told: bool) -> tuple[Slots, Picked]:
        kept = []

        def attention(layer: int) -> Appending:
            kept.append(Appending(self.config.model, self.groups, state.cache[layer], state.positions))
            return kept[-1]

        x = self._layers(weights, state.tokens[:, None], state.positions[:, None], attention)
        picked = self._pick(weights, x, state.how, state.positions + 1, told)
        # a slot that goes on beyond its last position is one that nobody reads
        positions = jnp.minimum(state.positions + 1, self.length - 1)
        return Slots(tuple(layer.kept for layer in kept), picked.tokens, positions, state.how), picked

    def _layers(
        self, weights: Held, tokens: jax.Array, positions: jax.Array, attention: Callable[[int], Any]
    ) -> jax.Array:
        """The residual stream behind the last layer, [B, T, D]; `attention` gives a layer what it attends by."""
        embedding = nnx.merge(self.graphs.embedding, weights.embedding)
        x = embedding(tokens, positions, self.collectives).astype(self.dtype)
        sequence = sequences(self.config.model, positions)
        for layer, of_layer in enumerate(weights.blocks):
            block = nnx.merge(self.graphs.blocks, of_layer)
            x = self.parts.block(block, x, sequence(layer), NO_DROPOUT, attention(layer))
        return x

    def _pick(self, weights: Held, x: jax.Array, how: SamplingArrays, positions: jax.Array, told: bool) -> Picked:
        """From the stream of one position, [S, 1, D], the tokens for the next `positions`."""
        head = nnx.merge(self.graphs.head, weights.head)
        tied = weights.embedding["tokens"] if self.config.model.tied_head else None
        shares = head(x, tied, self.collectives)[:, 0]
        whole = lax.all_gather(shares, self.collectives.vocabulary, axis=1, tiled=True, to="invarying")
        logits = whole[:, : self.config.model.vocab_size]
        tokens = sample(logits, how, positions)
        if not told:
            return Picked(tokens)
        logprobs = jax.nn.log_softmax(logits)
        likeliest, ids = lax.top_k(logprobs, min(MOST_LIKELY, logits.shape[1]))
        return Picked(tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], ids, likeliest)


def _check(config: Config, hooks: Hooks, slots: int, length: int) -> None:
    model, mesh = config.model, config.mesh
    if not FAMILIES[model.family].causal:
        raise ConfigError(f"model.family {model.family} reads in both directions; it cannot go on with a text.")
    if mesh.pipeline > 1 or mesh.islands > 1:
        raise ConfigError(f"the mesh is {mesh}; a model generates on data x tensor, without stages and islands.")
    if slots < 1 or slots % mesh.data:
        raise ConfigError(f"{slots} slots cannot be shared by data {mesh.data}; give a multiple.")
    if length < 1:
        raise ConfigError(f"slots of {length} positions hold nothing; give 1 or more.")
    if FAMILIES[model.family].positions == "learned" and length > model.max_positions:
        raise ConfigError(f"{length} positions are asked for, but the model has learned {model.max_positions}.")
    if hooks.attention is not None:
        raise ConfigError("the model has an attention of its own, which knows of no cache; it cannot generate.")
