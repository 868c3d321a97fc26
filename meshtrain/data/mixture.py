"""Batches of documents, of one source or of several in fixed shares.

Which source each row (or batch) of a mixture comes from is computed from its number.

Numbers come in blocks of BLOCK; in each block every source has its share exactly, in an order drawn for the block. The
source's own rows follow one another, epoch after epoch, so a source is seen whole before any of it is seen again.
"""

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from meshtrain.config import Config
from meshtrain.config.follow import row_multiple
from meshtrain.config.places import BOTH
from meshtrain.config.schema import DataConfig
from meshtrain.data.batches import (
    BatchesOfRows,
    EpochRows,
    GlobalBatches,
    RowBatches,
    TextBatches,
    few,
)
from meshtrain.data.cache import cache_directory, open_path
from meshtrain.data.grouping import Grouped, budget_rows, choose_lengths, make_groups
from meshtrain.data.hub_datasets import files_of
from meshtrain.data.loader import Batch
from meshtrain.data.manifest import are_prepared, is_preparation
from meshtrain.data.packing import Packed
from meshtrain.data.permutation import key_of, permute
from meshtrain.data.pieces import DocumentPieces, open_pieces
from meshtrain.data.remote import open_stored
from meshtrain.data.shards import Corpus, Source, open_shards
from meshtrain.data.token_rows import Windows
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, nearest, refusal, short
from meshtrain.files import is_address, refuse_passing
from meshtrain.sources import MIXTURE, SOURCES, has_documents, has_text, is_dataset
from meshtrain.stores import listing

BLOCK = 1 << 12

# How a sentence on a split (all: of data.validation_source) with too little text ends: evaluation can have more, or be
# left out.
WAYS_OUT = {
    "train": "; give more text.",
    "validation": "; hold out more with data.validation (of prepared shards: with --validation when they are "
    "prepared), "
    "give other text as data.validation_source, or set eval.every to 0.",
    "all": "; give more text as data.validation_source, or set eval.every to 0.",
}


def open_documents(
    config: Config, tokenizer: Tokenizer
) -> tuple[TextBatches, TextBatches | None]:
    """Opens training and validation batches of the documents of one source, or of the mixture; None if nothing is held
    out.
    """
    data = config.data
    names, weights = (
        (data.mixture, data.weights) if data.mixture else ((data.source,), (1.0,))
    )
    key = "data.mixture" if data.mixture else "data.source"
    sources = [_open_source(key, name, data, tokenizer) for name in names]
    train = _open_batches(config, tokenizer, sources, weights, "train")
    split = "validation"
    if data.validation_source is not None:
        split = "all"
        sources = [
            _open_source(
                "data.validation_source", data.validation_source, data, tokenizer
            )
        ]
        weights = (1.0,)
    try:
        return train, _open_batches(config, tokenizer, sources, weights, split)
    except ConfigError as error:
        if config.eval.every:
            raise ConfigError(
                f"eval.every is {config.eval.every}, but {error}"
            ) from None
        return train, None


def _open_source(key: str, name: str, data: DataConfig, tokenizer: Tokenizer) -> Source:
    if name in SOURCES and data.format != "text":
        raise ConfigError(
            f"{key} is {name}, which holds no conversations; with data.format {data.format} name files of them."
        )
    if name in SOURCES and (opens := SOURCES[name].documents) is not None:
        return opens(data, tokenizer)
    path = Path(os.path.expanduser(name))
    try:
        if is_dataset(name):
            return open_path(
                files_of(name, data.format, data.text_field), name, data, tokenizer
            )
        if is_address(name):
            if are_prepared(listing(name)):
                return open_stored(name, data, tokenizer)
            return open_path(name, name, data, tokenizer)
        if is_preparation(path):
            return open_shards(path, name, data, tokenizer)
        if os.path.lexists(path):
            return open_path(path, name, data, tokenizer)
    except OSError as error:
        file = error.filename or name
        refuse_passing(file, error)
        if not os.path.lexists(file):
            file = name
        raise ConfigError(
            f"{key}: {short(file)} cannot be read: {refusal(error)}."
        ) from None
    words = (
        [*filter(has_text, SOURCES), MIXTURE]
        if key == "data.source"
        else list(filter(has_documents, SOURCES))
    )
    raise ConfigError(
        f"{key} is '{short(name)}', but there is no such file or directory, {BOTH}; it must be a file or directory of "
        f"text, prepared shards, or {', '.join(words)}{nearest(name, words) or '.'}"
    )


def _open_batches(
    config: Config,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    weights: Sequence[float],
    split: str,
) -> TextBatches:
    pairs = _corpora(config, sources, weights, split)
    corpora = [corpus for _, corpus, _ in pairs]
    weights = [w for _, _, w in pairs]
    length = config.train.sequence_length
    tables = []
    if config.data.batching != "window":
        tables = open_tables([source for source, *_ in pairs], corpora, split, length)
    # No validation text is left out: it is little, and what is logged of it is of all.
    pad = config.data.last == "pad" or split != "train"
    batches = build_batches(config, corpora, tables, weights, pad)
    padded = not batches.batches_per_epoch
    if padded:
        batches = build_batches(config, corpora, tables, weights, True)
    notes = list(tokenizer.boundaries.notes) if split == "train" else []
    for number, (source, corpus, _) in enumerate(pairs):
        told = list(source.notes)
        if tables:
            shortened = partial(tables[number].shortened, corpus, length)
            told += source.describe(corpus.documents, shortened, length)
        notes += [f"{source.name}: {note}" for note in told] if len(pairs) > 1 else told
    notes += few(config.train.global_batch_size) if padded else ()
    digest = "+".join(source.digest(split)[:16] for source, _, _ in pairs)
    name = " + ".join(source.name for source in sources)
    return TextBatches(
        batches,
        name,
        digest,
        tokenizer,
        multiple=row_multiple(config),
        notes=tuple(notes),
    )


def _corpora(
    config: Config, sources: Sequence[Source], weights: Sequence[float], split: str
) -> list[tuple[Source, Corpus, float]]:
    """Returns the sources that have text in a split, with it and their weights; ConfigError for too little of it."""
    pairs = [
        (s, corpus, w)
        for s, w in zip(sources, weights, strict=True)
        if (corpus := s.corpus(split)) is not None
    ]
    purpose = f" for {split}" if split != "all" else ""
    if not pairs or (split == "train" and len(pairs) < len(sources)):
        name = " + ".join(source.name for source in sources)
        raise ConfigError(f"{name} has no documents{purpose}{WAYS_OUT[split]}")
    length = config.train.sequence_length
    drops = (
        config.data.batching == "window"
        and config.data.last == "drop"
        and split == "train"
    )
    for source, corpus, _ in pairs:
        if corpus.labels == corpus.documents * (1 + len(source.manifest.begin)):
            raise ConfigError(
                f"{source.name} holds {corpus.documents} documents{purpose}, but of none of them data.tokenizer "
                f"{short(config.data.tokenizer)} knows anything; give the tokenizer that was made for such text."
            )
        if drops and corpus.labels < length:
            raise ConfigError(
                f"{source.name} holds {corpus.labels} tokens{purpose}, fewer than train.sequence_length "
                f"{length}{WAYS_OUT[split]}"
            )
    return pairs


class Draw:
    """Number n -> (source, which of that source's items in turn); shares are rounded to 1 / BLOCK, none to nothing."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        exact = np.asarray(weights) / sum(weights) * BLOCK
        self.quotas = np.maximum(np.floor(exact), 1).astype(np.int64)
        # The furthest below its share first
        short = np.argsort(self.quotas - exact, kind="stable")
        while self.quotas.sum() < BLOCK:
            self.quotas[short[: BLOCK - self.quotas.sum()]] += 1
        self.quotas[self.quotas.argmax()] -= self.quotas.sum() - BLOCK
        self.seed = seed
        self._block = lru_cache(maxsize=4)(self._make_block)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, index in that source) of each number; int64, of the shape of `numbers` each."""
        blocks, places = np.divmod(numbers, BLOCK)
        source = np.empty_like(numbers)
        index = np.empty_like(numbers)
        for block in np.unique(blocks).tolist():
            mask = blocks == block
            sources, ranks = self._block(block)
            source[mask] = sources[places[mask]]
            index[mask] = block * self.quotas[source[mask]] + ranks[places[mask]]
        return source, index

    def comes_again(self, counts: Sequence[int]) -> int:
        """The first number whose item has been there before, where sources have so many items each."""
        numbers = []
        for source, (count, quota) in enumerate(
            zip(counts, self.quotas.tolist(), strict=True)
        ):
            block, rank = divmod(count, quota)
            numbers.append(
                block * BLOCK
                + int(np.flatnonzero(self._block(block)[0] == source)[rank])
            )
        return min(numbers)

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source at each place of a block, and how many of that source stand before it."""
        shuffled = permute(np.arange(BLOCK), BLOCK, key_of(self.seed, "mixture", block))
        sources = np.repeat(np.arange(len(self.quotas)), self.quotas)[shuffled]
        order = np.argsort(sources, kind="stable")
        ranks = np.empty(BLOCK, np.int64)
        ranks[order] = np.arange(BLOCK) - np.repeat(
            np.cumsum(self.quotas) - self.quotas, self.quotas
        )
        return sources, ranks


class MixedRows(BatchesOfRows):
    """Batches whose rows are drawn from several sources of the same kind; weights count rows."""

    def __init__(
        self,
        sources: Sequence[EpochRows],
        weights: Sequence[float],
        size: int,
        seed: int,
    ) -> None:
        super().__init__(sources, size)
        self.draw = Draw(weights, seed)

    @property
    def batches_per_epoch(self) -> int:
        """Batches that hold as many rows as all sources together; each source's own epochs go by its share."""
        return -(-sum(source.count for source in self.sources) // self.size)

    @property
    def batches_once(self) -> int:
        return max(
            self.draw.comes_again([source.count for source in self.sources])
            // self.size,
            1,
        )

    @property
    def tokens_per_batch(self) -> float:
        full = [source.labels / source.count for source in self.sources]
        return self.size * float(np.average(full, weights=self.draw.quotas))

    def choose(self, ks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.draw.locate(ks * self.size + rows)


class MixedGroups:
    """Batches of several grouped sources, each batch of one source; weights count batches."""

    def __init__(
        self, sources: Sequence[Grouped], weights: Sequence[float], seed: int
    ) -> None:
        self.sources = list(sources)
        self.draw = Draw(weights, seed)
        self.shapes = tuple(
            dict.fromkeys(shape for source in sources for shape in source.shapes)
        )

    @property
    def batches_per_epoch(self) -> int:
        """As many batches as all sources hold together; none if one of them fills none."""
        counts = [source.batches_per_epoch for source in self.sources]
        return sum(counts) if all(counts) else 0

    @property
    def batches_once(self) -> int:
        return self.draw.comes_again(
            [source.batches_per_epoch for source in self.sources]
        )

    @property
    def tokens_per_batch(self) -> float:
        return float(
            np.average(
                [s.tokens_per_batch for s in self.sources], weights=self.draw.quotas
            )
        )

    @property
    def places_per_batch(self) -> float:
        return float(
            np.average(
                [s.places_per_batch for s in self.sources], weights=self.draw.quotas
            )
        )

    def _place(self, k: int) -> tuple[Grouped, int]:
        source, index = self.draw.locate(np.array([k]))
        return self.sources[int(source[0])], int(index[0])

    def batch_shape(self, k: int) -> tuple[int, int]:
        source, index = self._place(k)
        return source.batch_shape(index)

    def tokens(self, k: int) -> int:
        source, index = self._place(k)
        return source.tokens(index)

    def batch(
        self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None
    ) -> Batch:
        source, index = self._place(k)
        return source.batch(index, rows, columns)


def open_tables(
    sources: Sequence[Source], corpora: Sequence[Corpus], split: str, length: int
) -> list[DocumentPieces]:
    """Opens the pieces of each source's documents; ConfigError where no answer of a source fits a row."""
    tables = []
    for source, corpus in zip(sources, corpora, strict=True):
        name = f"{source.digest(split)[:32]}-{length}"
        pieces = open_pieces(corpus, length, cache_directory() / "lengths" / name)
        if not len(pieces.first):
            raise ConfigError(
                f"of the {corpus.documents:,} examples of {source.name} none has a learned answer within "
                f"train.sequence_length {length}; "
                "give a greater one."
            )
        tables.append(pieces)
    return tables


def build_batches(
    config: Config,
    corpora: Sequence[Corpus],
    tables: Sequence[DocumentPieces],
    weights: Sequence[float],
    pad: bool,
) -> GlobalBatches:
    """Returns the batches of one source or of several, as data.batching has them."""
    if config.data.batching in ("grouped", "budget"):
        return _build_groups(config, corpora, tables, weights, pad)
    length = config.train.sequence_length
    seed = config.run.seed
    rows: list[EpochRows]
    if config.data.batching == "window":
        rows = [Windows(corpus, length, pad, seed) for corpus in corpora]
    else:
        rows = [
            Packed(corpus, pieces, length, seed)
            for corpus, pieces in zip(corpora, tables, strict=True)
        ]
    size = config.train.global_batch_size
    if len(rows) == 1:
        return RowBatches(rows[0], size, pad)
    return MixedRows(rows, weights, size, seed)


def _build_groups(
    config: Config,
    corpora: Sequence[Corpus],
    tables: Sequence[DocumentPieces],
    weights: Sequence[float],
    pad: bool,
) -> GlobalBatches:
    """Returns batches of batching grouped and budget; the lengths are the same for all sources."""
    data = config.data
    length = config.train.sequence_length
    size = config.train.global_batch_size
    shares = [
        weight * pieces.counts / pieces.counts.sum()
        for weight, pieces in zip(weights, tables, strict=True)
    ]
    lengths = choose_lengths(np.sum(shares, axis=0), data.lengths, data.length_multiple)
    if data.batching == "grouped":
        rows = [size] * len(lengths)
    else:
        rows = [budget_rows(size * length, n, data.rows_multiple) for n in lengths]
    sources = [
        Grouped(
            corpus, pieces, make_groups(pieces, lengths, rows, pad), config.run.seed
        )
        for corpus, pieces in zip(corpora, tables, strict=True)
    ]
    if len(sources) == 1:
        return sources[0]
    return MixedGroups(sources, weights, config.run.seed)
