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
from meshtrain.data import SplitBatches, open_data
from meshtrain.data.documents import documents
from meshtrain.data.input_files import find
from meshtrain.data.permutation import key_of, permute
from meshtrain.data.template import find_template
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer
from meshtrain.generate.text import Conversations, text_tokens

# Of a wrong file one sentence is enough.
LEGAL = 'a record has "prompt", a text or a list of messages'


@dataclass(frozen=True)
class Prompt:
    """A record, and its prompt's tokens, int32 [T]."""

    given: str | list[dict[str, Any]]
    record: dict[str, Any]
    tokens: np.ndarray


class Prompts:
    """All prompts of a run. `ends`: tokens that end an answer. ConfigError for a record that is none, and for a prompt
    that leaves no room for its answer.
    """

    def __init__(self, config: Config) -> None:
        rl = config.rl
        data = config.data
        self.seed = config.run.seed
        self.each = config.train.global_batch_size // rl.group
        self.tokenizer: Tokenizer = load_tokenizer(data.tokenizer, begin=data.begin, end=data.end)
        marked = load_tokenizer(data.tokenizer, chat=True, begin=data.begin, end=data.end)
        self.ends = frozenset(stop.id for stop in self.tokenizer.boundaries.stops)
        room = config.train.sequence_length + 1 - rl.answers
        template: Conversations | None = None
        digest = hashlib.sha256()
        self.all: list[Prompt] = []
        for document in documents(find([str(rl.prompts)], what="prompts").files, None):
            record = document.record
            if document.problem or not isinstance(record, dict) or not record.get("prompt"):
                wrong = document.problem or "has no prompt"
                raise ConfigError(f"rl.prompts: {short(document.name)} {wrong}; {LEGAL}.")
            given = record["prompt"]
            if isinstance(given, str):
                tokens = text_tokens(self.tokenizer, given)
            elif isinstance(given, list):
                if template is None:
                    source = find_template(data.template, data.tokenizer)
                    template = Conversations(source, marked, time.time())
                    if (turn := template.end_of_turn()) is not None:
                        self.ends |= {turn}
                tokens = template.tokens(given)
            else:
                what = type(given).__name__
                raise ConfigError(
                    f"rl.prompts: {short(document.name)} has a prompt that is a {what}; {LEGAL}."
                )
            if len(tokens) > room:
                raise ConfigError(
                    f"rl.prompts: the prompt of {short(document.name)} has {len(tokens)} tokens; with rl.answers "
                    f"{rl.answers} and train.sequence_length {config.train.sequence_length} it may have {room}."
                )
            digest.update(json.dumps(record, sort_keys=True).encode())
            self.all.append(Prompt(given, record, tokens))
        if len(self.all) < self.each:
            raise ConfigError(
                f"rl.prompts holds {len(self.all)} prompts, but a step draws answers to {self.each} "
                "(train.global_batch_size / rl.group); give more, or draw fewer."
            )
        self.longest = max(len(prompt.tokens) for prompt in self.all)
        self.texts: SplitBatches | None = None
        if rl.supervised:
            self.texts, _ = open_data(replaced(config, train={"objective": "next_token"}))
            digest.update(self.texts.digest.encode())
        self.digest = digest.hexdigest()
        self.batches_per_epoch = -(-len(self.all) // self.each) * rl.epochs
        self._config = config

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
        keys = np.array([key_of(self.seed, "prompts", int(epoch)) for epoch in epochs], np.uint64)
        return permute(index, len(self.all), keys)

    def seeds(self, rollout: int, chosen: np.ndarray, group: int) -> np.ndarray:
        """Returns a seed for each answer, uint32 [prompts, group]: the same answers are drawn again after a resume."""
        keys = [
            [key_of(self.seed, "answers", rollout, int(number), sample) for sample in range(group)]
            for number in chosen
        ]
        return (np.array(keys, np.uint64) >> np.uint64(32)).astype(np.uint32)
