"""Rows of prompts with their answers, packed: the arrays that a step of `train.objective: grpo` learns from.

A row holds whole texts, which `segments` keeps apart:

    tokens      p p p a a | q q b b b b | . .      p, q: prompts; a, b: answers
    labels      p p a a E | q b b b b E | . .      E: the token that ended an answer is learned too
    segments    1 1 1 1 1   2 2 2 2 2 2   0 0
    weights     0 0 1 1 1   0 1 1 1 1 1   0 0      `rl.average` says how much a label counts
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.config import Config
from meshtrain.config.follow import round_up
from meshtrain.inputs import EXPERTS, FLOATS

# A batch has one of so many numbers of rows, each of which is compiled for.
SHAPES = 4


class Learned(NamedTuple):
    """A text to be learned from; arrays [n]."""

    tokens: np.ndarray  # int32
    drawn: np.ndarray  # bool: by the model, not given to it
    logprobs: np.ndarray  # float32, of the tokens that were drawn
    advantages: np.ndarray  # float32, likewise
    # int32 [n - 1, layers, top_k], that take the tokens but the last; None: those that the router chooses
    experts: np.ndarray | None = None

    @property
    def labels(self) -> int:
        return len(self.tokens) - 1


def place_in_rows(lengths: Sequence[int], length: int) -> list[int]:
    """Returns a row for each text, the longest first into the first row that has room for it."""
    room: list[int] = []
    places = [0] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        row = next(
            (r for r, left in enumerate(room) if left >= lengths[number]), len(room)
        )
        if row == len(room):
            room.append(length)
        room[row] -= lengths[number]
        places[number] = row
    return places


def rows_of(config: Config, needed: int, longest: int) -> int:
    """Returns the rows of a batch that needs so many, one of `SHAPES` numbers, which the mesh divides.

    `longest`: labels of the longest text that there may be; the largest number of rows holds a step's answers of that
    length.
    """
    multiple = config.mesh.data * config.parallel.microbatches
    each = max(1, config.train.sequence_length // longest)
    most = -(-config.train.global_batch_size // each)
    step = round_up(-(-most // SHAPES), multiple)
    return round_up(max(needed, 1), step)


def pack(
    learned: Sequence[Learned], config: Config, longest: int, alone: bool = False
) -> dict[str, np.ndarray]:
    """Returns a batch; the weights of its labels sum up to what `rl.average` has them count.

    `longest`: as `rows_of` has it. `alone`: each text has a row of its own.
    """
    length = config.train.sequence_length
    lengths = [each.labels for each in learned]
    places = list(range(len(learned))) if alone else place_in_rows(lengths, length)
    rows = rows_of(config, max(places, default=0) + 1, longest)
    begins = [0] * rows
    segments = [0] * rows
    starts: list[int] = []
    numbers: list[int] = []
    for row, labels in zip(places, lengths, strict=True):
        starts.append(row * length + begins[row])
        begins[row] += labels
        segments[row] += 1
        numbers.append(segments[row])

    def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int32), *arrays])

    def repeated(values: Sequence[float]) -> np.ndarray:
        return np.repeat(values, lengths)

    positions = joined(np.arange(labels) for labels in lengths)
    drawn = joined(each.drawn[1:] for each in learned)
    at = (repeated(starts) + positions).astype(np.int64)
    arrays = {
        "tokens": joined(each.tokens[:-1] for each in learned),
        "labels": joined(each.tokens[1:] for each in learned),
        "positions": positions,
        "segments": repeated(numbers),
        "weights": drawn * repeated(_counts(learned, config)),
        "advantages": drawn * joined(each.advantages[1:] for each in learned),
        "drawn": drawn * joined(each.logprobs[1:] for each in learned),
    }
    if config.rl.replay_routing:
        model = config.model
        routes = (model.layers, model.moe.top_k)
        nothing = np.empty((0, *routes), np.int32)
        arrays[EXPERTS] = np.concatenate([nothing, *(each.experts for each in learned)])
    batch = {}
    for name, values in arrays.items():
        kind = np.float32 if name in FLOATS else np.int32
        flat = np.zeros((rows * length, *values.shape[1:]), kind)
        flat[at] = values
        batch[name] = flat.reshape(rows, length, *values.shape[1:])
    return batch


def _counts(learned: Sequence[Learned], config: Config) -> list[float]:
    """Returns what each label of an answer counts; a step divides the sum by the number of labels."""
    labels = [int(each.drawn.sum()) for each in learned]
    mean = sum(labels) / max(len(labels), 1)
    by_average = {
        "token": [1.0] * len(labels),
        "sequence": [mean / count for count in labels],
        "constant": [mean / config.rl.answers] * len(labels),
    }
    return by_average[config.rl.average]
