"""A model's compiled programs for generating: prefill of a prompt into a slot, and decode, one token for every slot.

    prompt [T] ──padded to a power of two──► prefill ─┐            each bucket is compiled once: ahead, or at first use
                                                      ▼
                       Slots: cache, last token, position, sampling ──► decode ──► Slots, Picked ──► decode ──► ...

A state is donated, and the next decode reads the last chosen token where it lies. So a host can dispatch a step before
it has seen the token of the one before. Layers stand one after the other in the program, each with
weights of its own, in the compute dtype and whole on every data rank:

    blocks.attention.q [layers, D, H, K] float32  ──►  layer 0 [D, H, K], layer 1 [D, H, K], ...  bfloat16

A layer cut out of a stacked array is a copy of it, every step, which took as long as all else
(experiments/generate/decode.py).
"""

from collections.abc import Callable, Sequence
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
from meshtrain.generate import held
from meshtrain.generate.cache import (
    DecodeAttention,
    LayerCache,
    OwnGroups,
    PromptAttention,
    written,
)
from meshtrain.generate.request import MOST_LIKELY, Sampling
from meshtrain.generate.sampling import SamplingArrays, sample
from meshtrain.mesh import DATA, TENSOR, platform
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.hooks import Hooks, ModelParts
from meshtrain.model.rope import sequences
from meshtrain.parallel.layout import Layout, is_placed
from meshtrain.parallel.parallelize import make_layout
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.reader import Model, check_learned

Tree = Any
LEAST_BUCKET = 16  # tokens
Name = tuple[
    str, int
]  # ("prefill", tokens of its bucket) or ("decode", whether with log-probabilities)


class Parts(NamedTuple):
    """Trees of arrays, or of their PartitionSpecs; also graphs of modules."""

    embedding: Any
    blocks: Any  # a tuple of trees, a layer each
    head: Any


def specs(layout: Layout, kind: str | None = None) -> Parts:
    """Returns how `taken_over` splits each weight."""
    return _group_parts(layout, {weight.name: _specs(weight, kind) for weight in layout.flat})


def taken_over(model: Model, layout: Layout, keep: bool, kind: str | None = None) -> Parts:
    """Returns the weights of a model on the mesh of `layout`, one after the other; those of the model are freed unless
    `keep`.

    `kind`: those of products are held in it, see `generate.held`.
    """
    by_name: dict[str, list[Any]] = {}
    theirs = model.program.layout
    for placed, weight, x in zip(
        theirs.flat, layout.flat, jax.tree.leaves(model.params), strict=True
    ):

        def cut(x: jax.Array, placed: Placed = placed, weight: Placed = weight) -> list[Any]:
            whole = layout.live_leaf(weight, theirs.canonical_leaf(placed, x))
            whole = whole if weight.float32 else whole.astype(layout.config.precision.compute)
            layers = list(whole) if weight.stacked else [whole]
            by = held.groups(weight) if kind else None
            return layers if by is None else [held.held(str(kind), layer, by) for layer in layers]

        shardings = jax.tree.map(
            lambda spec: NamedSharding(layout.mesh, spec), _specs(weight, kind)
        )
        by_name[weight.name] = jax.block_until_ready(jax.jit(cut, out_shardings=shardings)(x))
        if not keep:
            x.delete()
    return _group_parts(layout, by_name)


def _group_parts(layout: Layout, by_name: dict[str, list[Any]]) -> Parts:
    def part(name: str, layer: int = 0) -> Tree:
        return jax.tree.map(
            lambda weight: by_name[weight.name][layer], layout.weights[name], is_leaf=is_placed
        )

    blocks = tuple(part("blocks", layer) for layer in range(layout.config.model.layers))
    return Parts(part("embedding"), blocks, part("head"))


def _specs(weight: Placed, kind: str | None) -> list[Any]:
    return [held.spec(weight, kind)] * (weight.shape[0] if weight.stacked else 1)


class Slots(NamedTuple):
    """The arrays on the devices between two steps; slots over data, key/value heads over tensor."""

    cache: Any  # a tuple of `LayerCache`, a layer each
    tokens: Any  # int32 [S]: chosen last, and not yet read
    positions: Any  # int32 [S]: theirs
    how: Any  # SamplingArrays


class Picked(NamedTuple):
    """Chosen tokens; of a prefill those of its slot alone, without the axis S."""

    tokens: jax.Array  # int32 [S]
    logprobs: jax.Array | None = (
        None  # float32 [S], of the model's own distribution (at temperature 1)
    )
    likeliest_ids: jax.Array | None = (
        None  # int32 [S, MOST_LIKELY], or the whole vocabulary where that is smaller
    )
    likeliest_logprobs: jax.Array | None = None  # float32 likewise


class UseCollectives(MeshCollectives):
    """`parallel.tensor` without a gradient to come: what all ranks have alike need not be summed to be the same."""

    def share_stream(self, weight: jax.Array) -> jax.Array:
        return weight


class Decoding:
    """Compiled prefill and decode of one model on one mesh (data x tensor), for so many `slots` of at most `length`
    positions each.

    `keep` False frees the model's own arrays as its weights are taken over: it then gives no logits any more, and no
    more memory is needed than for one weight of all layers besides. `kind`: what holds weights of products, see
    `generate.held`. Raises ConfigError for a mesh with stages, slots that data does not divide, a length beyond the
    model's positions, and an attention hook, which cannot use a cache.
    """

    def __init__(
        self, model: Model, slots: int, length: int, keep: bool = True, kind: str | None = None
    ) -> None:
        self.slots = slots
        self.length = length
        self.kind = kind
        self.mesh = model.program.mesh
        self.config: Config = replaced(
            model.config, parallel={"zero_stage": 0, "sequence_parallel": False, "vocab": "spread"}
        )
        _check(self.config, model.program.hooks, slots, length)
        self.layout = make_layout(self.config, self.mesh)
        self.collectives = UseCollectives(self.config, platform(self.mesh))
        forward = model.program.local.forward
        self.graphs = Parts(forward.embedding_graph, forward.block_graph, forward.head_graph)
        self.parts = ModelParts(
            self.config, self.collectives, Hooks(block=model.program.hooks.block)
        )
        sizes = self.config.model
        self.groups = OwnGroups(sizes.heads, sizes.kv_heads, self.config.mesh.tensor)
        self.dtype = jnp.dtype(self.config.precision.compute)
        self.weights = taken_over(model, self.layout, keep, kind)
        self._executables: dict[Name, Any] = {}
        self._others = 0  # programs that were compiled for the same model before

    @cached_property
    def state_specs(self) -> Slots:
        rows, layer = PartitionSpec(DATA), PartitionSpec(DATA, TENSOR)
        return jax.tree.map(lambda x: layer if x.ndim > 1 else rows, jax.eval_shape(self._nothing))

    def empty(self) -> Slots:
        """Returns slots that hold nothing."""
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state_specs)
        return jax.jit(self._nothing, out_shardings=shardings)()

    def _nothing(self) -> Slots:
        model = self.config.model
        shape = (
            self.slots,
            self.groups.each * self.config.mesh.tensor,
            self.length,
            model.head_dim,
        )
        zeros = lambda: jnp.zeros(shape, self.dtype)
        cache = tuple(LayerCache(zeros(), zeros()) for _ in range(model.layers))
        greedy = jax.tree.map(
            lambda x: jnp.full(self.slots, x, x.dtype), SamplingArrays.of(Sampling())
        )
        return Slots(
            cache, jnp.zeros(self.slots, jnp.int32), jnp.zeros(self.slots, jnp.int32), greedy
        )

    @property
    def note(self) -> str:
        """A sentence on the weights' bytes, if they are held in 8 bits."""
        return held.note(self.kind, self.weights, self.dtype) if self.kind else ""

    def free(self) -> None:
        """Frees the weights; the programs can be run no more."""
        for x in jax.tree.leaves(self.weights):
            x.delete()

    @property
    def vocabulary(self) -> int:
        return self.config.model.vocab_size

    @property
    def synchronous(self) -> bool:
        """Returns whether a program must end before the next is dispatched: two at once deadlock fake devices."""
        return platform(self.mesh) == "cpu" and self.mesh.size > 1

    def prefill(
        self, state: Slots, slot: int, tokens: np.ndarray, sampling: Sampling
    ) -> tuple[Slots, Picked]:
        """Reads a prompt, int [T], into a slot, and chooses the token behind it; the state is used up.

        Waits for nothing.
        """
        if not 1 <= len(tokens) <= self.length:
            raise ConfigError(
                f"a prompt of {len(tokens)} tokens does not fit; it must have 1 to {self.length}, the positions of a "
                "slot."
            )
        bucket = self.bucket(len(tokens))
        padded = np.zeros((1, bucket), np.int32)
        padded[0, : len(tokens)] = tokens
        how = SamplingArrays.of(sampling)
        self.compile(name := ("prefill", bucket))
        return self._executables[name](
            self.weights, state, np.int32(slot), padded, np.int32(len(tokens)), how
        )

    def decode(self, state: Slots, likeliest: bool = False) -> tuple[Slots, Picked]:
        """Chooses one more token for every slot; the state is used up.

        Waits for nothing. `likeliest`: with log-probabilities.
        """
        self.compile(name := ("decode", likeliest))
        return self._executables[name](self.weights, state)

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
        return len(self._executables) - self._others

    def reuse(self, kept: dict[Any, dict[Name, Any]]) -> None:
        """Shares programs with those that were compiled for the same model at the same sizes; before any is compiled
        here.
        """
        of = self.config
        hooks = self.parts.hooks
        same = repr(
            (
                of.model,
                of.precision,
                of.mesh,
                of.parallel,
                of.lora,
                self.slots,
                self.length,
                self.kind,
            )
        )
        self._executables = kept.setdefault((same, hooks, self.mesh), self._executables)
        self._others = len(self._executables)

    def lower(self, name: Name = ("decode", False)) -> jax.stages.Lowered:
        """Returns a program, lowered for arrays as they will be."""
        state = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            jax.eval_shape(self._nothing),
            self.state_specs,
        )
        kind, of = name
        if kind == "decode":
            return self._decode[bool(of)].lower(self.weights, state)
        tokens = np.zeros((1, of), np.int32)
        one = np.int32(1)
        return self._prefill.lower(
            self.weights, state, one, tokens, one, SamplingArrays.of(Sampling())
        )

    def bucket(self, tokens: int) -> int:
        """Returns the length that a prompt is padded to."""
        return min(self.length, max(LEAST_BUCKET, 1 << (tokens - 1).bit_length()))

    # --- the programs

    @cached_property
    def _prefill(self) -> Any:
        return self._mapped(self._read_prompt, (PartitionSpec(),) * 4, PartitionSpec())

    @cached_property
    def _decode(self) -> dict[bool, Any]:
        one_more = {
            logprobs: partial(self._one_more, logprobs=logprobs) for logprobs in (False, True)
        }
        return {
            logprobs: self._mapped(function, (), PartitionSpec(DATA))
            for logprobs, function in one_more.items()
        }

    def _mapped(
        self, function: Callable[..., Any], more: tuple[Any, ...], picked: PartitionSpec
    ) -> Any:
        in_specs = (specs(self.layout, self.kind), self.state_specs, *more)
        out_specs = (self.state_specs, picked)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, donate_argnums=1)

    def _read_prompt(
        self,
        weights: Parts,
        state: Slots,
        slot: jax.Array,
        tokens: jax.Array,
        length: jax.Array,
        how: SamplingArrays,
    ) -> tuple[Slots, Picked]:
        slots = len(state.tokens)
        slot = slot - lax.axis_index(DATA) * slots
        layers = [PromptAttention(self.parts.attention, self.groups) for _ in state.cache]
        x = self._stream(weights, tokens, jnp.arange(tokens.shape[1]), layers)
        x = lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
        picked = self._pick(
            weights, x, jax.tree.map(lambda x: x[None], how), length[None], logprobs=True
        )
        of_prompt = tuple(layer.cache for layer in layers)
        cache = jax.tree.map(
            lambda old, new: written(old, new, slot, length), state.cache, of_prompt
        )
        # a slot of another data rank is none here
        mine = jnp.arange(slots) == slot
        put = lambda old, new: jnp.where(mine, vary(new, varying(old)), old)
        state = Slots(
            cache,
            put(state.tokens, picked.tokens),
            put(state.positions, length),
            jax.tree.map(put, state.how, how),
        )
        return state, jax.tree.map(lambda x: x[0], picked)

    def _one_more(self, weights: Parts, state: Slots, logprobs: bool) -> tuple[Slots, Picked]:
        model = self.config.model
        positions = state.positions
        layers = [DecodeAttention(model, self.groups, cache, positions) for cache in state.cache]
        x = self._stream(weights, state.tokens[:, None], positions[:, None], layers)
        picked = self._pick(weights, x, state.how, positions + 1, logprobs)
        # a slot that goes on beyond its last position is one that nobody reads
        positions = jnp.minimum(positions + 1, self.length - 1)
        return Slots(
            tuple(layer.cache for layer in layers), picked.tokens, positions, state.how
        ), picked

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
        for layer, leaves in enumerate(weights.blocks):
            block = nnx.merge(self.graphs.blocks, held.multiplied(leaves, self.dtype))
            block.attention.attend = attention[layer]
            y = self.parts.block(block, x, sequence(layer), self.collectives, NO_DROPOUT)
            self.parts.check_block(x, y)
            x = y
        return x

    def _pick(
        self,
        weights: Parts,
        x: jax.Array,
        how: SamplingArrays,
        positions: jax.Array,
        logprobs: bool,
    ) -> Picked:
        """Chooses from the stream of one position, [S, 1, D], the tokens for the next `positions`."""
        head = nnx.merge(self.graphs.head, weights.head)
        tied = weights.embedding["tokens"] if self.config.model.tied_head else None
        shards = head(x, tied, self.collectives)[:, 0]
        padded = lax.all_gather(
            shards, self.collectives.vocabulary, axis=1, tiled=True, to="invarying"
        )
        logits = padded[:, : self.config.model.vocab_size]
        tokens = sample(logits, how, positions)
        if not logprobs:
            return Picked(tokens)
        by_id = jax.nn.log_softmax(logits)
        largest, ids = lax.top_k(by_id, min(MOST_LIKELY, logits.shape[1]))
        return Picked(
            tokens, jnp.take_along_axis(by_id, tokens[:, None], axis=1)[:, 0], ids, largest
        )


def _check(config: Config, hooks: Hooks, slots: int, length: int) -> None:
    model = config.model
    mesh = config.mesh
    if not FAMILIES[model.family].causal:
        raise ConfigError(
            f"model.family {model.family} reads in both directions; it cannot go on with a text."
        )
    if mesh.pipeline > 1 or mesh.islands > 1:
        raise ConfigError(
            f"the mesh is {mesh}; a model generates on data x tensor, without stages and islands."
        )
    if mesh.expert > 1:
        raise ConfigError(
            f"mesh.expert is {mesh.expert}, but a model generates with all experts on a device; leave it out."
        )
    if slots < 1 or slots % mesh.data:
        raise ConfigError(f"{slots} slots cannot be shared by data {mesh.data}; give a multiple.")
    if length < 1:
        raise ConfigError(f"slots of {length} positions hold nothing; give 1 or more.")
    check_learned(model, length)
    if hooks.attention is not None:
        name = model.attention or getattr(hooks.attention, "__qualname__", "a function")
        raise ConfigError(
            f"the model has an attention of its own ({name}), which knows of no cache of keys and values, so that it "
            "cannot generate; "
            "mt.read_model gives its logits, and meshtrain evaluate its perplexity."
        )
