"""A model's compiled programs for generating: prefill of a prompt into a slot, and decode, one token for every slot.

    prompt [T] ──padded to a power of two──► prefill ─┐            each bucket is compiled once: ahead, or at first use
                                                      ▼
                       Slots: cache, last token, position, sampling ──► decode ──► Slots, Picked ──► decode ──► ...

A state is donated, and the next decode reads the last chosen token where it lies. So a host can dispatch a step before
it has seen the token of the one before. Layers stand one after the other in the program, each with
weights of its own, in the compute dtype and whole on every rank of slots (`generate.forward`):

    blocks.attention.q [layers, D, H, K] float32  ──►  layer 0 [D, H, K], layer 1 [D, H, K], ...  bfloat16

A layer cut out of a stacked array is a copy of it, every step, which took as long as all else
(experiments/generate/decode.py).
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.compat import vary, varying
from meshtrain.config import ConfigError
from meshtrain.config.stacks import LINEAR
from meshtrain.generate import held
from meshtrain.generate.cache import LayerCache, cache_heads
from meshtrain.generate.forward import DecodingForward
from meshtrain.generate.linear_cache import no_memory
from meshtrain.generate.request import MOST_LIKELY, Sampling
from meshtrain.generate.resharding import Parts, Resharding
from meshtrain.generate.sampling import SamplingArrays, sample
from meshtrain.mesh import TENSOR, platform
from meshtrain.parallel.layout import Layout
from meshtrain.reader import Model

# ("prefill", tokens of its bucket) or ("decode", whether with log-probabilities)
Name = tuple[str, int]


def taken_over(
    model: Model, layout: Layout, keep: bool, kind: str | None = None
) -> Parts:
    """Returns the weights of a model as `layout` splits them, one after the other; those of the model are freed unless
    `keep`.

    `kind`: those of products are held in it, see `generate.held`.
    """
    return Resharding(model.program.layout, layout, kind).take_over(model.params, keep)


class Slots(NamedTuple):
    """The arrays on the devices between two steps; slots over all axes but tensor, key/value heads over that."""

    cache: Any  # a tuple of `LayerCache` or `LinearCache`, a layer each
    tokens: Any  # int32 [S]: chosen last, and not yet read
    positions: Any  # int32 [S]: theirs
    how: Any  # SamplingArrays
    # int32 [S]: guesses of the tokens behind; None where nothing is drafted
    drafts: Any = None


class Picked(NamedTuple):
    """Chosen tokens; of a prefill those of its slot alone, without the axis S.

    With drafts a step chooses two for each slot, [S, 2], of which the second counts where its draft is `accepted`.
    """

    tokens: jax.Array  # int32 [S]
    # float32 [S], of the model's own distribution (at temperature 1)
    logprobs: jax.Array | None = None
    # int32 [S, MOST_LIKELY], or the whole vocabulary where that is smaller
    likeliest_ids: jax.Array | None = None
    likeliest_logprobs: jax.Array | None = None  # float32 likewise
    accepted: jax.Array | None = None  # bool [S]


class Decoding:
    """Compiled prefill and decode of one model on its mesh, for so many `slots` of at most `length` positions each.

    `keep` False frees the model's own arrays as its weights are taken over: it then gives no logits any more, and no
    more memory is needed than for one weight of all layers besides. `kind`: what holds weights of products, see
    `generate.held`. Raises ConfigError for what `DecodingForward` refuses.
    """

    forward_type: type[DecodingForward] = DecodingForward
    # Tokens that a step reads behind the last chosen one, though they may be wrong
    drafts = 0

    def __init__(
        self,
        model: Model,
        slots: int,
        length: int,
        keep: bool = True,
        kind: str | None = None,
    ) -> None:
        self.slots = slots
        self.length = length
        self.kind = kind
        self.forward = self.forward_type(model.program, slots, length)
        self.mesh = self.forward.mesh
        self.config = self.forward.config
        self.layout = self.forward.layout
        self._resharding = Resharding(
            model.program.layout, self.layout, kind, bool(self.drafts)
        )
        self.weights = self._resharding.take_over(model.params, keep)
        self._executables: dict[Name, Any] = {}
        self._others = 0  # programs that were compiled for the same model before

    @cached_property
    def state_specs(self) -> Slots:
        rows, layer = (
            PartitionSpec(self.forward.rows),
            PartitionSpec(self.forward.rows, TENSOR),
        )
        return jax.tree.map(
            lambda x: layer if x.ndim > 1 else rows, jax.eval_shape(self._nothing)
        )

    def empty(self) -> Slots:
        """Returns slots that hold nothing."""
        shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.state_specs
        )
        return jax.jit(self._nothing, out_shardings=shardings)()

    def _nothing(self) -> Slots:
        model = self.config.model
        tensor = self.config.mesh.tensor
        heads, keys, values = cache_heads(model, tensor)

        def zeros(width: int) -> jax.Array:
            shape = (self.slots, heads * tensor, self.length + self.drafts, width)
            return jnp.zeros(shape, self.forward.dtype)

        cache = tuple(
            no_memory(model.linear, self.slots, self.forward.dtype)
            if kind == LINEAR
            else LayerCache(zeros(keys), zeros(values) if values else None)
            for kind in self.forward.kinds
        )
        greedy = jax.tree.map(
            lambda x: jnp.full(self.slots, x, x.dtype), SamplingArrays.of(Sampling())
        )
        return Slots(
            cache,
            jnp.zeros(self.slots, jnp.int32),
            jnp.zeros(self.slots, jnp.int32),
            greedy,
        )

    @property
    def note(self) -> str:
        """A sentence on the weights' bytes, if they are held in 8 bits."""
        if self.kind:
            return held.note(self.kind, self.weights, self.forward.dtype)
        return ""

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
        self,
        state: Slots,
        slot: int,
        tokens: np.ndarray,
        sampling: Sampling,
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
        return [
            ("decode", False),
            ("decode", True),
            *(("prefill", bucket) for bucket in buckets),
        ]

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
        hooks = self.forward.parts.hooks
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
                self.drafts,
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
        return self.forward.bucket(tokens)

    # --- the programs

    @cached_property
    def _prefill(self) -> Any:
        return self._mapped(self._read_prompt, (PartitionSpec(),) * 4, PartitionSpec())

    @cached_property
    def _decode(self) -> dict[bool, Any]:
        one_more = {
            logprobs: partial(self._one_more, logprobs=logprobs)
            for logprobs in (False, True)
        }
        return {
            logprobs: self._mapped(function, (), PartitionSpec(self.forward.rows))
            for logprobs, function in one_more.items()
        }

    def _mapped(
        self, function: Callable[..., Any], more: tuple[Any, ...], picked: PartitionSpec
    ) -> Any:
        in_specs = (self._resharding.specs, self.state_specs, *more)
        out_specs = (self.state_specs, picked)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs
        )
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
        slot = slot - lax.axis_index(self.forward.rows) * slots
        how = jax.tree.map(lambda x: x[None], how)
        new, picked = self._read_alone(weights, tokens, length[None], how)
        cache = tuple(
            old.put(of_prompt, slot, length)
            for old, of_prompt in zip(state.cache, new.cache, strict=True)
        )
        # a slot of another rank is none here
        mine = jnp.arange(slots) == slot
        put = lambda old, new: jnp.where(mine, vary(new, varying(old)), old)
        rest = jax.tree.map(put, state._replace(cache=None), new._replace(cache=None))
        return rest._replace(cache=cache), jax.tree.map(lambda x: x[0], picked)

    def _read_alone(
        self,
        weights: Parts,
        tokens: jax.Array,
        lengths: jax.Array,
        how: SamplingArrays,
    ) -> tuple[Slots, Picked]:
        """Reads a prompt [1, T], and chooses the token behind it; the caches are as `put` takes them."""
        read = self.forward.read(weights, tokens, lengths)
        picked = pick(read.logits, how, lengths, logprobs=True)
        return Slots(read.caches, picked.tokens, lengths, how), picked

    def _one_more(
        self, weights: Parts, state: Slots, logprobs: bool
    ) -> tuple[Slots, Picked]:
        positions = state.positions
        read = self.forward.step(weights, state.cache, state.tokens, positions)
        picked = pick(read.logits, state.how, positions + 1, logprobs)
        # a slot that goes on beyond its last position is one that nobody reads
        positions = jnp.minimum(positions + 1, self.length - 1)
        return Slots(read.caches, picked.tokens, positions, state.how), picked


def pick(
    logits: jax.Array, how: SamplingArrays, positions: jax.Array, logprobs: bool
) -> Picked:
    """Chooses from logits [S, V] the tokens for the next `positions`."""
    tokens = sample(logits, how, positions)
    if not logprobs:
        return Picked(tokens)
    by_id = jax.nn.log_softmax(logits)
    largest, ids = lax.top_k(by_id, min(MOST_LIKELY, logits.shape[1]))
    return Picked(
        tokens, jnp.take_along_axis(by_id, tokens[:, None], axis=1)[:, 0], ids, largest
    )
