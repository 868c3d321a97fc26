"""Answers drawn by the model that trains, on the trainer's own mesh, as one program a wave of slots.

    params ──synchronise──► weights for decoding ─┐        prompts [P] x seeds [P, G]
                                                  ▼
    wave    read each prompt once a rank ──► its keys and values into G slots ──► while a slot goes on:
            choose a token of every slot, with its log-probability; read it       └─► tokens, log-probabilities

A token's noise follows from its seed and its position alone: the same seeds draw the same answers in any slot, in any
wave and on any mesh. The loop runs on the devices, which a host meets once a wave.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.compat import vary, varying
from meshtrain.errors import ConfigError
from meshtrain.generate.forward import Caches, DecodingForward
from meshtrain.generate.resharding import Parts, Resharding
from meshtrain.generate.sampling import SamplingArrays, draw
from meshtrain.mesh import TENSOR
from meshtrain.step import Program

Tree = Any


class Answer(NamedTuple):
    """The tokens that were drawn behind a prompt."""

    tokens: np.ndarray  # int32 [n], the end token included where one was chosen
    logprobs: np.ndarray  # float32 [n], under the sampling distribution
    ended: bool  # by an end token, not by length
    # int32 [prompt + n - 1, layers, top_k], that took each token but the last; None unless they are replayed
    experts: np.ndarray | None = None


class Wave(NamedTuple):
    """The prompts that the slots answer at once: prompts [ranks x N, T], of each rank N; the rest of the slots [S]."""

    prompts: Any  # int32, padded
    lengths: Any  # int32 [ranks x N]
    sources: Any  # int32: which of its rank's prompts
    seeds: Any  # uint32
    limits: Any  # int32: tokens of an answer at most; 0: the slot is free


class Drawing(NamedTuple):
    """The slots in the course of a wave; arrays [S], `drawn` and `logprobs` [S, most]."""

    caches: Caches
    tokens: jax.Array  # chosen last
    positions: jax.Array  # theirs
    live: jax.Array  # whether more follow
    counts: jax.Array  # tokens of the answers so far
    drawn: jax.Array
    logprobs: jax.Array
    experts: (
        jax.Array | None
    )  # int32 [S, most, layers, top_k], that took them; None unless they are replayed
    steps: jax.Array  # int32 []
    goes_on: jax.Array  # bool []: any slot of any rank


class DrawnAnswers(NamedTuple):
    """The answers of a wave, the same on all devices."""

    tokens: Any  # int32 [S, most]
    logprobs: Any  # float32 [S, most]
    counts: Any  # int32 [S], tokens of the answers
    experts: Any  # of `Drawing`
    # int32 [ranks x N, T, layers, top_k], that took the prompts' tokens; or None
    prompt_experts: Any


class Rollouts:
    """Draws answers of at most `most` tokens from a program's model, in `slots` of `length` positions.

    `ends`: tokens that end an answer. Raises ConfigError for what `DecodingForward` refuses, and where no prompt would
    fit.
    """

    def __init__(
        self,
        program: Program,
        slots: int,
        length: int,
        most: int,
        temperature: float,
        ends: frozenset[int],
    ) -> None:
        if not 1 <= most < length:
            raise ConfigError(
                f"answers of {most} tokens are asked for in slots of {length} positions; legal are 1 to {length - 1}, "
                "so that a prompt fits before them."
            )
        self.slots = slots
        self.length = length
        self.most = most
        self.temperature = temperature
        self.ends = ends
        self.replays = program.config.rl.replay_routing
        self.forward = DecodingForward(program, slots, length)
        self.resharding = Resharding(program.layout, self.forward.layout)
        self.weights: Parts | None = None

    def synchronise(self, params: Tree) -> None:
        """Takes the weights of a state's `params`, by a program that is compiled at the first call."""
        # freed before there are others
        self.weights = None
        self.weights = self.resharding.program(params)

    def free(self) -> None:
        """Frees the weights until they are synchronised again."""
        self.weights = None

    def draw(
        self, prompts: Sequence[np.ndarray], seeds: np.ndarray
    ) -> list[list[Answer]]:
        """Returns G answers to each of P prompts, by their seeds, uint32 [P, G].

        All processes call it alike, and all get all answers.
        """
        assert self.weights is not None, "synchronise comes first"
        prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
        for prompt in prompts:
            self._check(prompt)
        group = seeds.shape[1]
        answers: list[Answer] = []
        for wave in self._waves(prompts, seeds):
            drawn = jax.tree.map(np.asarray, self._program(self.weights, wave))
            slots = np.flatnonzero(wave.limits)
            answers += [self._answer(wave, drawn, int(slot)) for slot in slots]
        return [
            answers[first : first + group] for first in range(0, len(answers), group)
        ]

    def _answer(self, wave: Wave, drawn: DrawnAnswers, slot: int) -> Answer:
        count = drawn.counts[slot]
        tokens = drawn.tokens[slot, :count]
        experts = None
        if drawn.experts is not None:
            of_rank = len(wave.prompts) // self.forward.ranks
            rank = slot // (self.slots // self.forward.ranks)
            prompt = rank * of_rank + wave.sources[slot]
            of_prompt = drawn.prompt_experts[prompt, : wave.lengths[prompt]]
            experts = np.concatenate([of_prompt, drawn.experts[slot, : count - 1]])
        ended = int(tokens[-1]) in self.ends
        return Answer(tokens, drawn.logprobs[slot, :count], ended, experts)

    def _check(self, prompt: np.ndarray) -> None:
        vocabulary = self.forward.config.model.vocab_size
        if not 1 <= len(prompt) < self.length:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens does not fit; it must have 1 to {self.length - 1}, fewer than a "
                "slot has positions."
            )
        if len(wrong := prompt[(prompt < 0) | (prompt >= vocabulary)]):
            raise ConfigError(
                f"the prompt has the token {wrong[0]}; the model has {vocabulary}, from 0."
            )

    def _waves(self, prompts: list[np.ndarray], seeds: np.ndarray) -> Iterator[Wave]:
        """Yields arrays of one shape, the answers of a prompt side by side."""
        group = seeds.shape[1]
        of_slots = np.repeat(np.arange(len(prompts)), group)
        waves = -(-len(of_slots) // self.slots)
        free = waves * self.slots - len(of_slots)
        # -1: the slot is free
        numbers = np.pad(of_slots, (0, free), constant_values=-1)
        by_rank = numbers.reshape(waves, self.forward.ranks, -1)
        seeds = np.pad(seeds.reshape(-1), (0, free)).reshape(waves, self.slots)
        most = max(
            len(np.unique(of_rank[of_rank >= 0]))
            for wave in by_rank
            for of_rank in wave
        )
        bucket = self.forward.bucket(max(map(len, prompts)))
        for wave, wave_seeds in zip(by_rank, seeds, strict=True):
            read = np.zeros((self.forward.ranks, most, bucket), np.int32)
            yield self._wave(prompts, wave, read, wave_seeds.astype(np.uint32))

    def _wave(
        self,
        prompts: list[np.ndarray],
        wave: np.ndarray,
        read: np.ndarray,
        seeds: np.ndarray,
    ) -> Wave:
        """Returns the arrays of a wave, in which a rank's slots answer the prompts of these numbers, [ranks, slots];
        `read` has room for the prompts of each rank.
        """
        lengths = np.ones(read.shape[:2], np.int32)
        sources = np.zeros(wave.shape, np.int32)
        limits = np.zeros(wave.shape, np.int32)
        for rank, of_rank in enumerate(wave):
            for place, number in enumerate(np.unique(of_rank[of_rank >= 0])):
                prompt = prompts[number]
                read[rank, place, : len(prompt)] = prompt
                lengths[rank, place] = len(prompt)
                sources[rank, of_rank == number] = place
                limits[rank, of_rank == number] = min(
                    self.most, self.length - len(prompt)
                )
        return Wave(
            read.reshape(-1, read.shape[2]),
            lengths.reshape(-1),
            sources.reshape(-1),
            seeds,
            limits.reshape(-1),
        )

    # --- the program

    @cached_property
    def _program(self) -> Any:
        """The compiled program (weights, Wave) -> DrawnAnswers."""
        rows = PartitionSpec(self.forward.rows)
        mapped = jax.shard_map(
            self._draw_wave,
            mesh=self.forward.mesh,
            in_specs=(self.resharding.specs, rows),
            out_specs=rows,
        )
        everywhere = NamedSharding(self.forward.mesh, PartitionSpec())
        weights = self.resharding.shardings(self.resharding.specs)
        return jax.jit(
            mapped, in_shardings=(weights, everywhere), out_shardings=everywhere
        )

    def _draw_wave(self, weights: Parts, wave: Wave) -> DrawnAnswers:
        state, prompt_experts = self._begin(weights, wave)

        def step(state: Drawing) -> Drawing:
            read = self.forward.step(
                weights, state.caches, state.tokens, state.positions
            )
            experts = state.experts
            if experts is not None and read.experts is not None:
                at = (0, state.steps - 1, 0, 0)
                experts = lax.dynamic_update_slice(experts, read.experts, at)
            state = state._replace(caches=read.caches, experts=experts)
            return self._choose(wave, state, read.logits)

        state = lax.while_loop(lambda state: state.goes_on, step, state)
        return DrawnAnswers(
            state.drawn, state.logprobs, state.counts, state.experts, prompt_experts
        )

    def _begin(self, weights: Parts, wave: Wave) -> tuple[Drawing, jax.Array | None]:
        """Reads the prompts, and chooses the first token of every slot; with the experts of the prompts, if they are
        replayed.
        """
        read = self.forward.read(weights, wave.prompts, wave.lengths)
        of_prompts = read.experts if self.replays else None
        rows = self.forward.rows

        caches = tuple(
            cache.laid_out(wave.lengths, self.length) for cache in read.caches
        )

        def copied(cache: jax.Array) -> jax.Array:
            return vary(jnp.take(cache, wave.sources, axis=0), (*rows, TENSOR))

        slots = len(wave.sources)
        nothing = vary(jnp.zeros((slots, self.most), jnp.int32), rows)
        experts = None
        if of_prompts is not None:
            shape = (slots, self.most, *of_prompts.shape[2:])
            experts = vary(jnp.zeros(shape, jnp.int32), varying(of_prompts))
        state = Drawing(
            jax.tree.map(copied, caches),
            nothing[:, 0],
            wave.lengths[wave.sources] - 1,
            wave.limits > 0,
            nothing[:, 0],
            nothing,
            nothing.astype(jnp.float32),
            experts,
            jnp.int32(0),
            jnp.bool(True),
        )
        return self._choose(wave, state, read.logits[wave.sources]), of_prompts

    def _choose(self, wave: Wave, state: Drawing, logits: jax.Array) -> Drawing:
        """Chooses one more token of every slot, for the position behind its last, and notes it where the slot is
        live.
        """
        positions = state.positions + 1
        like = lambda value, dtype: jnp.full(len(positions), value, dtype)
        how = SamplingArrays(
            like(self.temperature, jnp.float32),
            like(0, jnp.int32),
            like(1, jnp.float32),
            wave.seeds,
        )
        chosen = draw(logits, how, positions)

        def noted(before: jax.Array, new: jax.Array) -> jax.Array:
            column = jnp.where(state.live, new, 0)[:, None]
            return lax.dynamic_update_slice(before, column, (0, state.steps))

        counts = state.counts + state.live
        ended = jnp.isin(chosen.tokens, np.array(sorted(self.ends), np.int32))
        live = state.live & ~ended & (counts < wave.limits)
        return state._replace(
            tokens=chosen.tokens,
            # a slot that has ended reads on, at its last position, what nobody sees
            positions=jnp.minimum(positions, self.length - 1),
            live=live,
            counts=counts,
            drawn=noted(state.drawn, chosen.tokens),
            logprobs=noted(state.logprobs, chosen.logprobs),
            steps=state.steps + 1,
            goes_on=lax.psum(jnp.any(live).astype(jnp.int32), self.forward.rows) > 0,
        )
