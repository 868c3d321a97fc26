"""Several sources in fixed shares: which source each row (or batch) comes from, computed from its number.

Numbers come in blocks of BLOCK; in each block every source has its share exactly, in an order drawn for the block. The
source's own rows follow one another, epoch after epoch, so a source is seen whole before any of it is seen again.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshtrain.config import Config
from meshtrain.data.batches import BatchesOfRows, EpochRows, GlobalBatches, RowBatches
from meshtrain.data.cache import cache_directory
from meshtrain.data.grouping import Grouped, budget_rows, choose_lengths, make_groups
from meshtrain.data.loader import Batch
from meshtrain.data.packing import Packed
from meshtrain.data.permutation import key_of, permute
from meshtrain.data.pieces import DocumentPieces, open_pieces
from meshtrain.data.shards import Corpus, Source
from meshtrain.data.token_rows import Windows
from meshtrain.errors import ConfigError

BLOCK = 1 << 12


class Draw:
    """Number n -> (source, which of that source's items in turn); shares are rounded to 1 / BLOCK, none to nothing."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        exact = np.asarray(weights) / sum(weights) * BLOCK
        self.quotas = np.maximum(np.floor(exact), 1).astype(np.int64)
        short = np.argsort(self.quotas - exact, kind="stable")  # the furthest below its share first
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
        for source, (count, quota) in enumerate(zip(counts, self.quotas.tolist(), strict=True)):
            block, rank = divmod(count, quota)
            numbers.append(
                block * BLOCK + int(np.flatnonzero(self._block(block)[0] == source)[rank])
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
        self, sources: Sequence[EpochRows], weights: Sequence[float], size: int, seed: int
    ) -> None:
        super().__init__(sources, size)
        self.draw = Draw(weights, seed)

    @property
    def batches_per_epoch(self) -> int:
        """Batches that hold as many rows as all sources together; each source's own epochs go by its share."""
        return -(-sum(source.count for source in self.sources) // self.size)

    @property
    def batches_once(self) -> int:
        return max(self.draw.comes_again([source.count for source in self.sources]) // self.size, 1)

    @property
    def tokens_per_batch(self) -> float:
        full = [source.labels / source.count for source in self.sources]
        return self.size * float(np.average(full, weights=self.draw.quotas))

    def choose(self, ks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.draw.locate(ks * self.size + rows)


class MixedGroups:
    """Batches of several grouped sources, each batch of one source; weights count batches."""

    def __init__(self, sources: Sequence[Grouped], weights: Sequence[float], seed: int) -> None:
        self.sources = list(sources)
        self.draw = Draw(weights, seed)
        self.shapes = tuple(dict.fromkeys(shape for source in sources for shape in source.shapes))

    @property
    def batches_per_epoch(self) -> int:
        """As many batches as all sources hold together; none if one of them fills none."""
        counts = [source.batches_per_epoch for source in self.sources]
        return sum(counts) if all(counts) else 0

    @property
    def batches_once(self) -> int:
        return self.draw.comes_again([source.batches_per_epoch for source in self.sources])

    @property
    def tokens_per_batch(self) -> float:
        return float(
            np.average([s.tokens_per_batch for s in self.sources], weights=self.draw.quotas)
        )

    @property
    def places_per_batch(self) -> float:
        return float(
            np.average([s.places_per_batch for s in self.sources], weights=self.draw.quotas)
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

    def batch(self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None) -> Batch:
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
        Grouped(corpus, pieces, make_groups(pieces, lengths, rows, pad), config.run.seed)
        for corpus, pieces in zip(corpora, tables, strict=True)
    ]
    if len(sources) == 1:
        return sources[0]
    return MixedGroups(sources, weights, config.run.seed)
