"""Rows of prompts with their answers, packed: the arrays that a step of `train.objective: grpo` learns from.

tokens      p p p a a | q q b b b b | . .      p, q: prompts; a, b: answers
labels      p p a a E | q b b b b E | . .      E: the token that ended an answer is learned too
segments    1 1 1 1 1   2 2 2 2 2 2   0 0
weights     0 0 1 1 1   0 1 1 1 1 1   0 0      `rl.average` says how much a label counts
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.config import Config
from meshtrain.config.follow import round_up
from meshtrain.inputs import OTHERS
from meshtrain.rl.rollouts import Answer


class Learned(NamedTuple):
    """An answer to be learned from."""

    prompt: np.ndarray  # int32 [n]
    answer: Answer
    advantages: np.ndarray  # float32 [tokens of the answer]

    @property
    def labels(self) -> int:
        return len(self.prompt) + len(self.answer.tokens) - 1


def rows_needed(config: Config, answers: int, longest: int) -> int:
    """Returns rows that hold so many answers, whatever their lengths, to prompts of at most `longest` tokens."""
    each = max(1, config.train.sequence_length // (longest + config.rl.answers - 1))
    multiple = config.mesh.data * config.parallel.microbatches
    return round_up(-(-answers // each), multiple)


def place_in_rows(lengths: Sequence[int], rows: int, length: int) -> list[int]:
    """Returns a row for each, the longest first into the first row that has room: those of one row fit into it."""
    room = np.full(rows, length)
    places = [0] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        row = int(np.argmax(room >= lengths[number]))
        assert room[row] >= lengths[number], "rows_needed has room for all"
        room[row] -= lengths[number]
        places[number] = row
    return places


def pack(learned: Sequence[Learned], config: Config, rows: int) -> dict[str, np.ndarray]:
    """Returns a batch of so many rows; the weights of its labels sum up to what `rl.average` has them count."""
    length = config.train.sequence_length
    kinds = {"tokens": np.int32, "labels": np.int32, **OTHERS}
    del kinds["pairs"]
    batch = {name: np.zeros((rows, length), kind) for name, kind in kinds.items()}
    begins = np.zeros(rows, np.int64)
    segments = np.zeros(rows, np.int32)
    counts = _counts(learned, config)
    places = place_in_rows([each.labels for each in learned], rows, length)
    for each, row, count in zip(learned, places, counts, strict=True):
        text = np.concatenate([each.prompt, each.answer.tokens])
        here = slice(begins[row], begins[row] + each.labels)
        behind = slice(here.stop - len(each.answer.tokens), here.stop)
        segments[row] += 1
        batch["tokens"][row, here] = text[:-1]
        batch["labels"][row, here] = text[1:]
        batch["positions"][row, here] = np.arange(each.labels)
        batch["segments"][row, here] = segments[row]
        batch["weights"][row, behind] = count
        batch["advantages"][row, behind] = each.advantages
        batch["drawn"][row, behind] = each.answer.logprobs
        begins[row] = here.stop
    return batch


def _counts(learned: Sequence[Learned], config: Config) -> list[float]:
    """Returns what each label of an answer counts; a step divides the sum by the number of labels."""
    labels = [len(each.answer.tokens) for each in learned]
    mean = sum(labels) / max(len(labels), 1)
    by_average = {
        "token": [1.0] * len(labels),
        "sequence": [mean / count for count in labels],
        "constant": [mean / config.rl.answers] * len(labels),
    }
    return by_average[config.rl.average]
