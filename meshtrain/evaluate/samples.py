"""Texts that a model goes on with while it trains, at each evaluation: `eval.samples`.

    validation rows ──begin of each──► prompts ──rl.rollouts, on the run's own mesh──► {"prompt": ..., "text": ...}

Prompts and noise are the same at every evaluation, so that texts differ by what the model has learned alone. A token's
noise follows from the seed, the sample and its position: a mesh changes none.
"""

import math
import time

import numpy as np

from meshtrain.config import Config
from meshtrain.config.check import MOST_SAMPLED, PROMPT
from meshtrain.data.batches import TextBatches
from meshtrain.data.permutation import key_of
from meshtrain.data.template import find_template
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.generate.text import Conversations
from meshtrain.rl.rollouts import Rollouts
from meshtrain.step import Program, Tree

TEMPERATURE = 0.8  # of nanoGPT's samples: at 0 small models repeat themselves


class TextSamples:
    """Draws `eval.samples` texts. ConfigError for a model that cannot go on with a text."""

    def __init__(self, program: Program, validation: TextBatches) -> None:
        config = program.config
        self._tokenizer = validation.tokenizer
        self._prompts = prompts(config, validation)
        ranks = program.mesh.size // config.mesh.tensor
        longest = max(map(len, self._prompts))
        length = min(longest + MOST_SAMPLED, config.train.sequence_length)
        self._rollouts = Rollouts(
            program,
            math.ceil(len(self._prompts) / ranks) * ranks,
            length,
            length - longest,
            TEMPERATURE,
            _ends(config, validation),
        )
        keys = [
            [key_of(config.run.seed, "samples", n)] for n in range(len(self._prompts))
        ]
        self._seeds = (np.array(keys, np.uint64) >> np.uint64(32)).astype(np.uint32)

    def draw(self, params: Tree) -> list[dict[str, str]]:
        """Returns each prompt with its text, the same on all processes."""
        self._rollouts.synchronise(params)
        answers = self._rollouts.draw(self._prompts, self._seeds)
        self._rollouts.free()
        decode = self._tokenizer.decode
        return [
            {
                "prompt": decode(prompt),
                "text": decode(answer.tokens[: -1 if answer.ended else None]),
            }
            for prompt, (answer,) in zip(self._prompts, answers, strict=True)
        ]


def prompts(config: Config, validation: TextBatches) -> list[np.ndarray]:
    """Returns the begins of the first `eval.samples` rows of validation: of a text some tokens, of a conversation all
    that comes before its first answer. Fewer where there are fewer rows.
    """
    length = config.train.sequence_length
    begins: list[np.ndarray] = []
    for k in validation.one_pass(config.eval.samples):
        # without the rows that a mesh needs
        batch = validation.batches.batch(k)
        for row, tokens in enumerate(batch["tokens"]):
            counted = np.full(len(tokens), True)
            if "weights" in batch:
                counted = batch["weights"][row] > 0
            of_first = (
                np.sum(batch["segments"][row] == 1)
                if "segments" in batch
                else len(tokens)
            )
            most = min(PROMPT, length // 2)
            if config.data.format == "chat":
                most = min(int(np.argmax(counted)) + 1, length - 1)
            if counted.any():
                begins.append(tokens[: min(most, of_first)])
    return begins[: config.eval.samples]


def _ends(config: Config, validation: TextBatches) -> frozenset[int]:
    """Returns the tokens that end a text, or a turn of a conversation."""
    tokenizer = validation.tokenizer
    ends = {
        tokenizer.end_of_document,
        *(stop.id for stop in tokenizer.boundaries.stops),
    }
    if config.data.format == "chat":
        data = config.data
        marked = load_tokenizer(
            data.tokenizer, chat=True, begin=data.begin, end=data.end
        )
        template = find_template(data.template, data.tokenizer)
        turn = Conversations(template, marked, time.time()).end_of_turn()
        ends |= set() if turn is None else {turn}
    return frozenset(ends)
