"""Drafts: the layer that predicts the token after the next one guesses what the next step will choose.

    step      the model reads the last token t and the draft d behind it, and chooses a behind t, b behind d
              a is d        both are taken: t a b; the next draft is of what follows b
              a is not d    a alone is taken: t a; keys and values of d are written over; the next draft follows a
    drafter   reads what was taken beside the model's stream, with keys and values of its own

So a step gives one token or two (accept and verify: Leviathan et al. 2023; with such a layer: DeepSeek-V3, section
5.4.3). A token's noise follows from its seed and position alone, and a draft is drawn with the noise by which it is
checked: at every temperature the tokens are those without drafts, and the nearer the two distributions are, the more
often the draws agree (Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding").
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.config import ConfigError
from meshtrain.config.stacks import LINEAR
from meshtrain.generate.cache import LayerCache
from meshtrain.generate.forward import DecodingForward, Mixer
from meshtrain.generate.programs import Decoding, Picked, Slots, pick
from meshtrain.generate.resharding import Parts
from meshtrain.generate.sampling import SamplingArrays, sample
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.prediction import depths
from meshtrain.model.rope import sequences
from meshtrain.step import Program


class DraftingForward(DecodingForward):
    """The model's layers, and the first of those that predict further tokens.

    Raises ConfigError for a model without one, and for linear attention, whose memory cannot forget a wrong draft.
    """

    def __init__(self, program: Program, slots: int, length: int) -> None:
        super().__init__(program, slots, length)
        if not program.config.model.mtp:
            raise ConfigError(
                "a draft is asked for, but the model has no layer that predicts further tokens: model.mtp is 0."
            )
        if LINEAR in self.kinds:
            raise ConfigError(
                "a draft is asked for, but what linear attention of model.pattern has read stays in its memory; leave "
                "it out."
            )
        name, *_ = depths(program.config.model)
        self._graph, _ = nnx.split(getattr(program.local.forward.decoder.mtp, name))

    def draft(
        self,
        weights: Parts,
        stream: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        mixer: Any,
    ) -> jax.Array:
        """Returns the drafter's stream [B, T, D], of the model's at `positions` and the tokens [B, T] behind these."""
        embedding = nnx.merge(self.graphs.embedding, weights.embedding)
        norm = nnx.merge(self.graphs.head, weights.head).norm
        drafter = nnx.merge(self._graph, weights.drafter)
        embedded = embedding(tokens, positions, self.collectives).astype(self.dtype)
        x = drafter.join(norm(stream), embedded, self.collectives).astype(self.dtype)
        drafter.block.attention.attend = mixer
        model = self.config.model
        sequence = sequences(model, positions)(model.layers)
        return self.parts.block(
            drafter.block, x, sequence, self.collectives, NO_DROPOUT
        )

    def guess(
        self,
        weights: Parts,
        y: jax.Array,
        last: jax.Array,
        how: SamplingArrays,
        positions: Any,
    ) -> jax.Array:
        """Returns the drafts for `positions` [B], of the drafter's stream at place `last` [B] of each row."""
        own = jnp.take_along_axis(y, last[:, None, None], axis=1)
        weights = weights._replace(
            head={**weights.head, "norm": weights.drafter["norm"]}
        )
        return sample(self._logits(weights, own)[:, 0], how, positions)

    def prompt_mixer(self) -> Mixer:
        return self._prompt()

    def decode_mixer(self, cache: LayerCache, positions: jax.Array) -> Mixer:
        return self._decode(self.config.model, self.groups, cache, positions)


class Drafting(Decoding):
    """Compiled prefill and decode, whose steps read a draft of each slot and choose one token or two.

    The caches have a position more, for a draft behind the last one; that of the drafter is the last cache.
    """

    forward_type = DraftingForward
    forward: DraftingForward
    drafts = 1

    def _nothing(self) -> Slots:
        state = super()._nothing()
        return state._replace(
            cache=(*state.cache, state.cache[-1]), drafts=state.tokens
        )

    def _read_alone(
        self,
        weights: Parts,
        tokens: jax.Array,
        lengths: jax.Array,
        how: SamplingArrays,
    ) -> tuple[Slots, Picked]:
        forward = self.forward
        read = forward.read(weights, tokens, lengths)
        picked = pick(read.logits, how, lengths, logprobs=True)
        last = lengths - 1
        places = jnp.arange(tokens.shape[1])
        behind = jnp.where(
            places == last[:, None], picked.tokens[:, None], jnp.roll(tokens, -1, 1)
        )
        mixer = forward.prompt_mixer()
        y = forward.draft(weights, read.stream, behind, places, mixer)
        drafts = forward.guess(weights, y, last, how, lengths + 1)
        return Slots(
            (*read.caches, mixer.cache), picked.tokens, lengths, how, drafts
        ), picked

    def _one_more(
        self, weights: Parts, state: Slots, logprobs: bool
    ) -> tuple[Slots, Picked]:
        forward = self.forward
        *caches, own = state.cache
        how = state.how
        positions = state.positions[:, None] + jnp.arange(2)
        tokens = jnp.stack([state.tokens, state.drafts], axis=1)
        read = forward.read_on(weights, tuple(caches), tokens, positions)
        rows = jax.tree.map(lambda x: jnp.repeat(x, 2), how)
        flat = pick(
            read.logits.reshape(positions.size, -1),
            rows,
            positions.ravel() + 1,
            logprobs,
        )
        picked = jax.tree.map(lambda x: x.reshape(*positions.shape, *x.shape[1:]), flat)
        accepted = picked.tokens[:, 0] == state.drafts
        last = accepted.astype(jnp.int32)
        mixer = forward.decode_mixer(own, positions)
        y = forward.draft(weights, read.stream, picked.tokens, positions, mixer)
        drafts = forward.guess(weights, y, last, how, state.positions + last + 2)
        chosen = jnp.where(accepted, picked.tokens[:, 1], picked.tokens[:, 0])
        # a slot that goes on beyond its last position is one that nobody reads
        behind = jnp.minimum(state.positions + last + 1, self.length - 1)
        state = Slots((*read.caches, mixer.cache), chosen, behind, how, drafts)
        return state, picked._replace(accepted=accepted)
