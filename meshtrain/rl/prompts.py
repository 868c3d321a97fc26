"""The prompts of `rl.prompts`: records of JSON Lines, tokenized as `generate` and `serve` do, in an order that follows
from the seed.

    {"prompt": "17+58=", "answer": "75"}                                a text goes on as texts begin
    {"prompt": [{"role": "user", "content": "..."}], "answer": "75"}    messages, as the chat template writes them
"""

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshtrain.config import Config, ConfigError, replaced, short
from meshtrain.config.rl import reward_terms
from meshtrain.data import SplitBatches, open_data
from meshtrain.data.documents import Document, documents
from meshtrain.data.input_files import InputFile, find
from meshtrain.data.permutation import key_of, permute
from meshtrain.data.template import find_template
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer
from meshtrain.generate.text import Conversations, text_tokens
from meshtrain.rl.rewards import BUILT_IN, last_number
from meshtrain.rl.rollouts import Answer
from meshtrain.units import counted

# Of a wrong file one sentence is enough.
LEGAL = 'a record has "prompt", a text or a list of messages'
# Stands for an answer in a conversation whose continuation is wanted: it is in no text.
STAND_IN = "\U000f0ffd"


@dataclass(frozen=True)
class Prompt:
    """A record, and its prompt's tokens, int32 [T]."""

    number: int  # in its file
    given: str | list[dict[str, Any]]
    record: dict[str, Any]
    tokens: np.ndarray


class Prompts:
    """All prompts of a run. `ends`: tokens that end an answer; `length`: tokens of a prompt with all that follows, at
    most. ConfigError for a record that is none, and for a prompt that leaves no room for its answer.
    """

    def __init__(self, config: Config) -> None:
        rl = config.rl
        data = config.data
        self._config = config
        self.seed = config.run.seed
        self.each = config.train.global_batch_size // rl.group
        self.tokenizer: Tokenizer = load_tokenizer(
            data.tokenizer, begin=data.begin, end=data.end
        )
        self._marked = load_tokenizer(
            data.tokenizer, chat=True, begin=data.begin, end=data.end
        )
        self.ends = frozenset(stop.id for stop in self.tokenizer.boundaries.stops)
        self._template: Conversations | None = None
        digest = hashlib.sha256()
        self.all: list[Prompt] = []
        for document in documents(_files(str(rl.prompts)), None):
            self.all.append(self._prompt(document))
            digest.update(json.dumps(document.record, sort_keys=True).encode())
        if len(self.all) < self.each:
            raise ConfigError(
                f"rl.prompts holds {counted(len(self.all), 'prompt')}, but a step draws answers to {self.each} "
                "(train.global_batch_size / rl.group); give more, or draw fewer."
            )
        self.longest = max(len(prompt.tokens) for prompt in self.all)
        several = rl.environment is not None
        self.length = (
            config.train.sequence_length if several else self.longest + rl.answers
        )
        self.texts = self._supervised()
        if self.texts is not None:
            digest.update(self.texts.digest.encode())
        self.digest = digest.hexdigest()
        self.batches_per_epoch = -(-len(self.all) // self.each) * rl.epochs

    def _supervised(self) -> SplitBatches | None:
        """Returns the text of the first steps."""
        if not self._config.rl.supervised:
            return None
        return open_data(replaced(self._config, train={"objective": "next_token"}))[0]

    def _prompt(self, document: Document) -> Prompt:
        """Returns the prompt of a record; ConfigError for a record that is none."""
        rl = self._config.rl
        name = document.name
        record = document.record
        problem = document.problem
        if problem or not isinstance(record, dict) or not record.get("prompt"):
            wrong = f": {problem}" if problem else " has no prompt"
            raise ConfigError(f"rl.prompts: {short(name)}{wrong}; {LEGAL}.")
        given = record["prompt"]
        if not isinstance(given, str | list):
            raise ConfigError(
                f"rl.prompts: {short(name)} has the prompt {short(given)}; {LEGAL}."
            )
        built_in = [
            reward for reward, _ in reward_terms(rl.reward) if reward in BUILT_IN
        ]
        if built_in and (answer := record.get("answer")) is None:
            raise ConfigError(
                f'rl.prompts: {short(name)} has no "answer", with which the reward {built_in[0]} compares; add it.'
            )
        if isinstance(given, str) and rl.environment:
            raise ConfigError(
                f"rl.prompts: {short(name)} has a prompt that is a text, but rl.environment takes part in "
                "conversations; give messages."
            )
        if "number" in built_in and last_number(str(answer)).is_nan():
            raise ConfigError(
                f'rl.prompts: {short(name)} has no number in its "answer" {short(answer)}, with which the reward '
                "number compares; add one."
            )
        tokens = (
            text_tokens(self.tokenizer, given)
            if isinstance(given, str)
            else self._conversations.tokens(given)
        )
        self._check_tokens(name, tokens)
        return Prompt(len(self.all), given, record, tokens)

    def _check_tokens(self, name: str, tokens: np.ndarray) -> None:
        rl = self._config.rl
        size = self._config.model.vocab_size
        if (largest := max(tokens)) >= size:
            raise ConfigError(
                f"rl.prompts: {short(name)} has the token {largest} of data.tokenizer, but model.vocab_size is {size}; "
                "give a model and a tokenizer that belong together."
            )
        room = self._config.train.sequence_length + 1 - rl.answers
        if len(tokens) > room:
            raise ConfigError(
                f"rl.prompts: the prompt of {short(name)} has {len(tokens)} tokens; with rl.answers "
                f"{rl.answers} and train.sequence_length {self._config.train.sequence_length} it may have {room}."
            )

    @property
    def _conversations(self) -> Conversations:
        """The template of prompts that are messages, whose end of a turn ends an answer."""
        if self._template is None:
            data = self._config.data
            source = find_template(data.template, data.tokenizer)
            self._template = Conversations(source, self._marked, time.time())
            if (turn := self._template.end_of_turn()) is not None:
                self.ends |= {turn}
        return self._template

    def text(self, answer: Answer) -> str:
        """Returns the text of an answer, without its end."""
        return self.tokenizer.decode(
            answer.tokens[:-1] if answer.ended else answer.tokens
        )

    def between(
        self, messages: list[dict[str, Any]], more: list[dict[str, Any]]
    ) -> np.ndarray:
        """Returns the tokens that follow the end of the last message, an answer, up to the beginning of the next one.

        `more`: the messages between the two. ConfigError for messages that the template does not take.
        """
        stand_in = {"role": "assistant", "content": STAND_IN}
        written = self._conversations.text([*messages[:-1], stand_in, *more])
        behind = written.rpartition(STAND_IN)[2]
        # The first token is the end of the turn, which the model has drawn.
        return self._marked.encode([behind])[0][1:].astype(np.int32)

    def describe(self) -> str:
        """Returns what a run draws answers to, in one line."""
        rl = self._config.rl
        return (
            f"{len(self.all):,} prompts of {rl.prompts}, of up to {self.longest} tokens; a step draws {rl.group} "
            f"answers of up to {rl.answers} tokens to {self.each} of them"
        )

    def chosen(self, rollout: int) -> np.ndarray:
        """Returns which prompts are answered, int64 [prompts of a step]: each once before any comes again."""
        items = np.arange(rollout * self.each, (rollout + 1) * self.each)
        epochs, index = np.divmod(items, len(self.all))
        keys = np.array(
            [key_of(self.seed, "prompts", int(epoch)) for epoch in epochs], np.uint64
        )
        return permute(index, len(self.all), keys)

    def seeds(self, rollout: int, chosen: np.ndarray, group: int) -> np.ndarray:
        """Returns a seed for each answer, uint32 [prompts, group]: the same answers are drawn again after a resume."""
        keys = [
            [
                key_of(self.seed, "answers", rollout, int(number), sample)
                for sample in range(group)
            ]
            for number in chosen
        ]
        return (np.array(keys, np.uint64) >> np.uint64(32)).astype(np.uint32)


def _files(path: str) -> list[InputFile]:
    try:
        return find([path], what="prompts").files
    except ConfigError as error:
        raise ConfigError(f"rl.prompts: {error}") from None
