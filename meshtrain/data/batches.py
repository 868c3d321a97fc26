"""One global order of batches: which rows make up batch k, whatever the mesh, the process count or the history of the
run.

    EpochRows (windows, packed rows, images) ──RowBatches──► GlobalBatches ──SplitBatches──► rows of batch k,
    Grouped, mixtures ─────────────────────────────────────►                                 padded for the mesh

Each process takes the rows of a global batch that its devices hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from meshtrain.config import Config, replaced
from meshtrain.config.follow import round_up
from meshtrain.config.key import keys
from meshtrain.data.loader import Batch, Batches
from meshtrain.data.token_rows import Stretches, read_part
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError
from meshtrain.inputs import LABELS, pad_rows

# Located at a time, at most: a call of numpy costs as much as a hundred rows, and it takes a hundred calls.
AHEAD_BATCHES = 32
AHEAD_LABELS = 1 << 20
STEPS = keys(Config)["train.steps"].default


class EpochRows(Protocol):
    """The rows of an epoch, all of one length, in an order that is computed; row p of epoch e is item e * count + p."""

    count: int  # rows of an epoch
    length: int  # tokens of a row
    labels: int  # real (not padded) labels of an epoch

    def locate(self, items: np.ndarray) -> Any:
        """Returns where the rows of these items [N] lie; its `[a:b]` is where rows a .. b do."""
        ...

    def read(self, places: Any) -> Batch:
        """Returns the rows that lie there."""
        ...


class GlobalBatches(Batches, Protocol):
    """Batches in one global order, of a bounded set of shapes (rows, T)."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def places_per_batch(self) -> float: ...

    @property
    def batches_per_epoch(self) -> int: ...

    @property
    def batches_once(self) -> int:
        """Batches before any row comes again; at least one."""
        ...

    @property
    def tokens_per_batch(self) -> float: ...

    def batch_shape(self, k: int) -> tuple[int, int]: ...

    def tokens(self, k: int) -> int: ...


@dataclass(frozen=True)
class Portion:
    """The rows `at` of a batch, all of one source, and where they lie."""

    rows: EpochRows
    places: Any
    at: np.ndarray

    @property
    def tokens(self) -> int:
        """The number of tokens they hold, without padding."""
        if isinstance(self.places, Stretches):
            return self.places.labels
        return len(self.at) * self.rows.length


class BatchesOfRows:
    """Batches of `size` rows of several sources of one row length, located many at a time."""

    def __init__(self, sources: Sequence[EpochRows], size: int) -> None:
        self.sources = list(sources)
        self.size = size
        self.shapes = ((size, sources[0].length),)
        self.places_per_batch = size * sources[0].length
        # of the rows that are read here, and of all of them
        self._located = lru_cache(maxsize=4)(self._locate)

    def choose(self, ks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, which of its items) of these rows [R] of batches ks [B, 1]: int64 [B, R]; source -1: the row
        is padding.
        """
        raise NotImplementedError

    def batch_shape(self, k: int) -> tuple[int, int]:
        return self.shapes[0]

    def batch(
        self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None
    ) -> Batch:
        portions, count = self._portions(k, rows)
        parts = [
            read_part(portion.rows, portion.places, columns) for portion in portions
        ]
        if len(portions[0].at) == count:
            return parts[0]
        batch = {}
        for name, x in parts[0].items():
            shape = (count, *x.shape[1:])
            batch[name] = np.zeros(shape, x.dtype)
        for portion, part in zip(portions, parts, strict=True):
            for name, x in part.items():
                batch[name][portion.at] = x
        return batch

    def tokens(self, k: int) -> int:
        portions, _ = self._portions(k, slice(None))
        return sum(portion.tokens for portion in portions)

    def _portions(self, k: int, rows: slice) -> tuple[list[Portion], int]:
        """Returns where these rows of batch k lie, and how many they are with padding."""
        begin, end, step = rows.indices(self.size)
        count = len(range(begin, end, step))
        labels = max(count * self.sources[0].length, 1)
        many = min(AHEAD_LABELS // labels, AHEAD_BATCHES) or 1
        block, place = divmod(k, many)
        batches = self._located(block, many, begin, end, step)
        return batches[place], count

    def _locate(
        self,
        block: int,
        many: int,
        begin: int,
        end: int,
        step: int,
    ) -> list[list[Portion]]:
        """The portions of each of `many` batches: no empty one, but for a batch without any row."""
        ks = block * many + np.arange(many)
        rows = np.arange(begin, end, step)
        sources, items = self.choose(ks[:, None], rows)
        batches: list[list[Portion]] = [[] for _ in range(many)]
        for number, source in enumerate(self.sources):
            own = sources == number
            places = source.locate(items[own])
            ends = np.cumsum(own.sum(1)).tolist()
            for portions, mask, first, last in zip(
                batches, own, [0, *ends], ends, strict=False
            ):
                portions.append(
                    Portion(source, places[first:last], np.flatnonzero(mask))
                )
        filled = []
        for portions in batches:
            nonempty = [portion for portion in portions if len(portion.at)]
            filled.append(nonempty or portions[:1])
        return filled


class RowBatches(BatchesOfRows):
    """Batches of `size` rows, epoch after epoch; the last of an epoch is dropped or padded with empty rows."""

    def __init__(self, rows: EpochRows, size: int, pad: bool) -> None:
        super().__init__([rows], size)
        self.rows = rows
        self.pad = pad
        batches = rows.count // size
        if pad:
            batches = -(-rows.count // size)
        self.batches_per_epoch = batches
        self.batches_once = batches

    @property
    def tokens_per_batch(self) -> float:
        used = 1.0
        if not self.pad:
            used = self.batches_per_epoch * self.size / self.rows.count
        return self.rows.labels * used / self.batches_per_epoch

    def choose(self, ks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = np.divmod(ks, self.batches_per_epoch)
        positions = indices * self.size + rows
        sources = np.where(positions < self.rows.count, 0, -1)
        items = epochs * self.rows.count + positions
        return sources, items


@dataclass(frozen=True, repr=False)
class SplitBatches:
    """The batches of one split of text or images in one global order: all that a run asks of its data.

    With train.uneven_batch: pad the rows of a batch are followed by as many empty ones, of weight 0, as the mesh needs.
    """

    batches: GlobalBatches
    source: str
    # Of what each source holds for this split, joined by +, wherever it lies; empty if nothing is read
    digest: str
    # Rows are padded to a multiple of this
    multiple: int = field(default=1, kw_only=True)
    # on what is learned and what is left out
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    def __repr__(self) -> str:
        return self.describe()

    def batch(
        self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None
    ) -> Batch:
        """These rows of global batch k, or these places of each, ascending.

        A pure function of (seed, k): the whole state of the data is k.
        """
        real, _ = self.batches.batch_shape(k)
        total, _ = self.batch_shape(k)
        if real == total:
            return self.batches.batch(k, rows, columns)
        begin, end, step = rows.indices(total)
        real_rows = slice(min(begin, real), min(end, real), step)
        batch = self.batches.batch(k, real_rows, columns)
        # All processes must yield the same arrays, those that hold no padding too.
        count = len(range(begin, end, step))
        return pad_rows(batch, count - len(batch[LABELS]))

    def batch_shape(self, k: int) -> tuple[int, int]:
        """(rows, T) of global batch k, with its padding rows; T positions of a row."""
        rows, length = self.batches.batch_shape(k)
        return round_up(rows, self.multiple), length

    def tokens(self, k: int) -> int:
        """Tokens of global batch k, padding left out: of images their positions."""
        return self.batches.tokens(k)

    def padding_tokens(self, k: int) -> int:
        """Positions of global batch k that hold no token, those of padding rows included."""
        return math.prod(self.batch_shape(k)) - self.tokens(k)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, T) that a batch can have."""
        return tuple(
            (round_up(rows, self.multiple), length)
            for rows, length in self.batches.shapes
        )

    @property
    def tokens_per_batch(self) -> float:
        """Labels that count in a batch, on average over an epoch."""
        return self.batches.tokens_per_batch

    @property
    def batches_per_epoch(self) -> int:
        """Batches until the data comes round again."""
        return self.batches.batches_per_epoch

    def one_pass(self, most: int) -> range:
        """The batches of an evaluation: the first `most`, or those before a row comes again, since none is to count
        twice.
        """
        return range(min(most, self.batches.batches_once))

    def fewer(self, most: int) -> list[str]:
        """Notes on an evaluation that is to be of `most` batches."""
        there = len(self.one_pass(most))
        if there < min(most, self.batches_per_epoch):
            batches = "batch" if there == 1 else "batches"
            return [
                f"evaluations read {there} {batches}, fewer than eval.batches {most}: then a source of the mixture "
                "comes round"
            ]
        are = "batch is all that is" if there == 1 else "batches are all that are"
        if there < most:
            return [f"{there} {are} held out, fewer than eval.batches {most}"]
        return []

    def describe(self) -> str:
        """Returns what an epoch of it is, in one line."""
        raise NotImplementedError


def few(size: int) -> tuple[str, ...]:
    """The note on training data that fills no batch: leaving out what is not full would leave nothing."""
    return (
        f"it fills no batch of train.global_batch_size {size}, so that one is padded",
    )


def resolve_epochs(config: Config, batches: int) -> Config:
    """Returns the config with the `train.steps` that follow from `train.epochs` of so many batches each; as it is
    without epochs.

    ConfigError for train.steps that are neither the default nor those. The same data gives the same steps, so that a
    resumed run has those of its beginning.
    """
    train = config.train
    if not train.epochs:
        return config
    steps = max(1, math.ceil(train.epochs * batches - 1e-9))
    if train.steps not in (STEPS, steps):
        raise ConfigError(
            f"train.steps is {train.steps}, but train.epochs {train.epochs:g} of {batches:,} batches each are "
            f"{steps:,} steps; "
            "give one of the two."
        )
    return replaced(config, train={"steps": steps})


def digests(
    config: Config, data: SplitBatches, validation: SplitBatches | None
) -> dict[str, str]:
    """The digests by which a checkpoint knows its data; none of random tokens, nor of validation text that is a share
    of the source.
    """
    entries = {"digest": data.digest}
    if config.data.validation_source is not None and validation is not None:
        entries["validation_digest"] = validation.digest
    return {name: digest for name, digest in entries.items() if digest}


@dataclass(frozen=True, repr=False)
class TextBatches(SplitBatches):
    """The batches of one split of text, and the tokenizer that their ids are of.

    A batch has int32 arrays [rows, T] `tokens` and `labels` (the token after each); where the batching needs them also
    `segments` (of a row, from 1; 0 is padding) and `positions` (in the segment), and float32 `weights` of the loss
    (absent: all ones).
    """

    tokenizer: Tokenizer

    @property
    def padding(self) -> float:
        """The share of the places in a batch that hold no label, on average over an epoch; padding rows are not
        counted.
        """
        return 1 - self.tokens_per_batch / self.batches.places_per_batch

    def describe(self) -> str:
        shapes = ""
        if len(self.shapes) > 1:
            shapes = f" in {len(self.shapes)} shapes"
        padding = ""
        if self.padding >= 0.0005:
            padding = f", {self.padding:.1%} padding"
        epoch = f"{self.batches_per_epoch:,} batches an epoch of {self.tokens_per_batch:,.0f} tokens{shapes}{padding}"
        return f"{self.source}: " + "; ".join((epoch, *self.notes))
