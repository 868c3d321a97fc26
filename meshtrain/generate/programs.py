"""A model's compiled programs for generating: prefill of a prompt into a slot, and decode, one token for every slot.

    prompt [T] ──padded to a power of two──► prefill ─┐            each bucket is compiled once: ahead, or when it is first used
                                                      ▼
                       Slots: cache, last token, position, sampling ──► decode ──► Slots, Picked ──► decode ──► ...

A state is donated and the next decode reads the token that the last one chose where it lies, so that a host can dispatch a step before
it has seen what the one before chose. Layers stand one after the other in the program, each with weights of its own, in the compute dtype
and whole on every data rank:

    blocks.attention.q [layers, D, H, K] float32  ──►  layer 0 [D, H, K], layer 1 [D, H, K], ...  bfloat16

A layer cut out of a stacked array is a copy of it, every step, which took as long as all else (experiments/generate/decode.py).
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
from meshtrain.generate.cache import DecodeAttention, Kept, OwnGroups, PromptAttention, written
from meshtrain.generate.request import MOST_LIKELY, Sampling
from meshtrain.generate.sampling import SamplingArrays, sample
from meshtrain.mesh import DATA, TENSOR, platform
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.hooks import Hooks, ModelParts
from meshtrain.model.rope import sequences
from meshtrain.parallel.layout import Layout, is_placed, shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.reader import Model

Tree = Any


class Held(NamedTuple):
    """Trees of arrays, or of their PartitionSpecs; also graphs of modules."""

    embedding: Any
    blocks: Any  # a tuple of trees, a layer each
    head: Any


def specs(layout: Layout) -> Held:
    """How `taken_over` splits each."""
    return _by_part(layout, {weight.name: [_spec(weight)] * _layers(weight) for weight in layout.flat})


def taken_over(model: Model, layout: Layout, keep: bool) -> Held:
    """The weights of a model on the mesh of `layout`, one after the other; those of the model are freed unless `keep`."""
    found: dict[str, list[jax.Array]] = {}
    theirs = model.program.layout
    for placed, weight, x in zip(theirs.flat, layout.flat, jax.tree.leaves(model.params), strict=True):

        def cut(x: jax.Array, placed: Placed = placed, weight: Placed = weight) -> list[jax.Array]:
            whole = layout.live_leaf(weight, theirs.canonical_leaf(placed, x)).astype(layout.config.precision.compute)
            return list(whole) if weight.stacked else [whole]

        shardings = [NamedSharding(layout.mesh, _spec(weight))] * _layers(weight)  # type: ignore[arg-type]
        found[weight.name] = jax.block_until_ready(jax.jit(cut, out_shardings=shardings)(x))
        if not keep:
            x.delete()
    return _by_part(layout, found)


def _by_part(layout: Layout, found: dict[str, list[Any]]) -> Held:
    def part(name: str, layer: int = 0) -> Tree:
        return jax.tree.map(lambda weight: found[weight.name][layer], layout.weights[name], is_leaf=is_placed)

    blocks = tuple(map(partial(part, "blocks"), range(layout.config.model.layers)))
    return Held(part("embedding"), blocks, part("head"))


def _spec(weight: Placed) -> PartitionSpec:
    return PartitionSpec(*shard_spec(weight)[weight.stacked :])


def _layers(weight: Placed) -> int:
    return weight.shape[0] if weight.stacked else 1


# tokens of the smallest bucket
LEAST_BUCKET = 16
# ("prefill", tokens of its bucket) or ("decode", whether with log-probabilities)
Name = tuple[str, int]


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
        self.parts = ModelParts(self.config, self.collectives, Hooks(block=model.program.hooks.block))
        sizes, tensor = self.config.model, self.config.mesh.tensor
        self.groups = OwnGroups(sizes.heads, sizes.kv_heads, tensor)
        self.dtype = jnp.dtype(self.config.precision.compute)
        self.weights = taken_over(model, self.layout, keep)
        self._executables: dict[Name, Any] = {}

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
        bucket = self.bucket(len(tokens))
        padded = np.zeros((1, bucket), np.int32)
        padded[0, : len(tokens)] = tokens
        how = SamplingArrays.of(sampling)
        prefill = self._executable(("prefill", bucket))
        return prefill(self.weights, state, np.int32(slot), padded, np.int32(len(tokens)), how)

    def decode(self, state: Slots, likeliest: bool = False) -> tuple[Slots, Picked]:
        """One more token for every slot; the state is used up. Waits for nothing. `likeliest`: with log-probabilities."""
        return self._executable(("decode", likeliest))(self.weights, state)

    # --- compiling

    @property
    def names(self) -> list[Name]:
        """Names all programs that requests may need; the shorter a prompt, the earlier its own."""
        longest = max(self.length - 1, 1)
        tokens = [1 << k for k in range(longest.bit_length())] + [longest]
        buckets = dict.fromkeys(map(self.bucket, tokens))
        return [("decode", False), ("decode", True), *(("prefill", bucket) for bucket in buckets)]

    def compile(self, name: Name) -> None:
        """Compiles a program that is not; from any thread, while others run."""
        if name not in self._executables:
            self._executables[name] = self.lower(name).compile()

    def is_compiled(self, name: Name) -> bool:
        return name in self._executables

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._executables)

    def _executable(self, name: Name) -> Any:
        self.compile(name)
        return self._executables[name]

    def lower(self, name: Name = ("decode", False)) -> jax.stages.Lowered:
        """A program, lowered for arrays as they will be."""
        state = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)),
            jax.eval_shape(self._nothing),
            self.state_specs,
        )
        kind, of = name
        if kind == "decode":
            return self._decode[bool(of)].lower(self.weights, state)
        tokens, one = np.zeros((1, of), np.int32), np.int32(1)
        return self._prefill.lower(self.weights, state, one, tokens, one, SamplingArrays.of(Sampling()))

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

        def attention(layer: int) -> PromptAttention:
            kept.append(PromptAttention(self.parts.attention, self.groups))
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

        def attention(layer: int) -> DecodeAttention:
            kept.append(DecodeAttention(self.config.model, self.groups, state.cache[layer], state.positions))
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
