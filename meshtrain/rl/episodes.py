"""Answers to prompts, in one turn or in several with an environment's messages between them.

    prompt ──model──► answer ──environment──► more messages ──model──► answer ──environment──► None: it ends
    given             drawn                   given                    drawn

An environment is a class of `run.imports`. It is made anew for each call, in a child process (`rewards`), so that what
it knows follows from the conversation.

    class Env:
        def __init__(self, record): ...          the prompt's record
        def step(self, messages):                the conversation up to the model's last answer
            return [{"role": "user", "content": "..."}]     what comes next, or None at the end

An episode also ends where an answer ends by length, where the next message leaves no room for an answer, and where a
call fails, which is counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain.errors import ConfigError, short
from meshtrain.rl.prompts import Prompt, Prompts
from meshtrain.rl.rewards import Case, Rewards
from meshtrain.rl.rollouts import Answer, Rollouts
from meshtrain.run.processes import gathered


@dataclass
class Episode:
    """A prompt and what was drawn behind it; arrays [n]."""

    prompt: Prompt
    seed: np.uint32
    given: str | list[dict[str, Any]]  # all that stands before the last answer
    tokens: np.ndarray  # int32
    drawn: np.ndarray  # bool: by the model
    logprobs: np.ndarray  # float32, of the tokens that were drawn
    # int32 [n - 1, layers, top_k], if they are replayed
    experts: np.ndarray | None = None
    answer: str = ""  # the text of the last answer
    ended: bool = False  # it has an end token

    @property
    def case(self) -> Case:
        """The arguments of a reward."""
        return Case(self.given, self.answer, self.prompt.record)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to the last answer."""
        assert isinstance(self.given, list)
        return [*self.given, {"role": "assistant", "content": self.answer}]

    def add_answer(self, answer: Answer, text: str) -> None:
        self._append(answer.tokens, answer.logprobs, True)
        # The last reading saw all tokens that are there.
        self.experts = answer.experts
        self.answer = text
        self.ended = answer.ended

    def add_messages(self, messages: list[dict[str, Any]], tokens: np.ndarray) -> None:
        self.given = [*self.messages, *messages]
        self._append(tokens, np.zeros(len(tokens), np.float32), False)

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray, drawn: bool) -> None:
        self.tokens = np.concatenate([self.tokens, tokens.astype(np.int32)])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.drawn = np.concatenate([self.drawn, np.full(len(tokens), drawn)])


def begin_episode(prompt: Prompt, seed: np.uint32) -> Episode:
    """Returns an episode in which nothing is drawn yet."""
    given = len(prompt.tokens)
    return Episode(
        prompt,
        seed,
        prompt.given,
        prompt.tokens,
        np.zeros(given, bool),
        np.zeros(given, np.float32),
    )


def play(
    rollouts: Rollouts,
    prompts: Prompts,
    rewards: Rewards,
    chosen: Sequence[Prompt],
    seeds: np.ndarray,
) -> tuple[list[list[Episode]], Counter[str]]:
    """Returns the episodes of each prompt, by their seeds [P, G], and how often an environment failed in which way."""
    groups = [
        [begin_episode(prompt, seed) for seed in of_prompt]
        for prompt, of_prompt in zip(chosen, seeds, strict=True)
    ]
    failed: Counter[str] = Counter()
    answers = rollouts.draw([prompt.tokens for prompt in chosen], seeds)
    going = [episode for group in groups for episode in group]
    drawn = [answer for of_prompt in answers for answer in of_prompt]
    while going:
        for episode, answer in zip(going, drawn, strict=True):
            episode.add_answer(answer, prompts.text(answer))
        if not rewards.environment:
            break
        going = _go_on(
            [episode for episode in going if episode.ended], prompts, rewards, failed
        )
        if going:
            own = np.array([[episode.seed] for episode in going], np.uint32)
            drawn = [of[0] for of in rollouts.draw([e.tokens for e in going], own)]
    return groups, failed


def _go_on(
    episodes: Sequence[Episode],
    prompts: Prompts,
    rewards: Rewards,
    failed: Counter[str],
) -> list[Episode]:
    """Returns the episodes that the environment goes on with, its messages added."""
    processes = jax.process_count()
    own = episodes[jax.process_index() :: processes]
    replies, kinds = rewards.turns([(e.messages, e.prompt.record) for e in own])
    of_all = gathered([replies, dict(kinds)])
    for _, kinds_there in of_all:
        failed.update(kinds_there)
    going = []
    for number, episode in enumerate(episodes):
        messages = of_all[number % processes][0][number // processes]
        if messages is None:
            continue
        try:
            tokens = prompts.between(episode.messages, messages)
        except ConfigError as error:
            failed["not_messages"] += 1
            told = f"{rewards.environment} replied with messages that are none: {short(error)}"
            rewards.first.setdefault("turn not_messages", told.removesuffix("."))
            continue
        if len(episode.tokens) + len(tokens) < prompts.length:
            episode.add_messages(messages, tokens)
            going.append(episode)
    return going
