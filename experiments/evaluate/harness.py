"""Requests of lm-evaluation-harness answered by the plainest means: the text tokenized by the tokenizers library, the
whole logits of one row at a time, a sum in float64; generated without a cache. `tests/evaluate/test_harness.py` holds
ours against them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from experiments.evaluate.tiny import END, LENGTH
from meshtrain.reader import Model, read_model

HERE = Path(__file__).parent
TASKS = HERE / "tasks"
NAMES = ("meshtrain_choice", "meshtrain_again")
ROLLING = [
    "Short.",
    "A text that is far longer than the model has positions for. " * 6,
    "\n",
]


class ByHand:
    """The same requests answered by the plainest means."""

    def __init__(self, directory: Path) -> None:
        import tokenizers

        self.model: Model = read_model(directory)
        self.tokenizer = tokenizers.Tokenizer.from_file(
            str(directory / "tokenizer.json")
        )
        begun = self.tokenizer.encode("a").ids[:-1]
        self.end = self.tokenizer.token_to_id(END)
        self.prefix = begun[0] if begun else self.end

    def log_p(self, tokens: Sequence[int]) -> np.ndarray:
        """log p of every token of the vocabulary behind each of these, float64 [T, V]; rows padded to one length, which
        is compiled once.
        """
        padded = np.zeros((1, LENGTH), np.int64)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(self.model(padded)[0, : len(tokens)], np.float64)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        whole, before = (
            self.tokenizer.encode(context + continuation).ids,
            self.tokenizer.encode(context).ids,
        )
        answer = whole[len(before) :]
        log_p = self.log_p(whole[:-1])[-len(answer) :]
        return float(log_p[np.arange(len(answer)), answer].sum()), bool(
            (log_p.argmax(-1) == answer).all()
        )

    def rolling(self, text: str) -> float:
        tokens, total = [self.prefix, *self.tokenizer.encode(text).ids], 0.0
        scored = 1
        while scored < len(tokens):
            end = min(scored + LENGTH, len(tokens))
            row = tokens[max(end - 1 - LENGTH, 0) : end]
            log_p = self.log_p(row[:-1])
            at = np.arange(len(row) - 1)[-(end - scored) :]
            total += log_p[at, np.array(row[1:])[at]].sum()
            scored = end
        return float(total)

    def generate(self, prompt: str, until: Sequence[str], most: int) -> str:
        tokens = self.tokenizer.encode(prompt).ids[-(LENGTH - most) :]
        said: list[int] = []
        while len(said) < most:
            said.append(int(self.log_p(tokens + said)[-1].argmax()))
            if said[-1] == self.end or any(
                stop in self.tokenizer.decode(said) for stop in until
            ):
                break
        text = self.tokenizer.decode([token for token in said if token != self.end])
        return min((text.partition(stop)[0] for stop in until), key=len)
