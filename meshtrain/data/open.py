"""From the configuration to the batches of training and validation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshtrain.config import Config, ConfigError
from meshtrain.data.batches import RowBatches, RowSource
from meshtrain.data.grouping import Grouped, budget_rows, choose_lengths, make_groups
from meshtrain.data.loader import Batch
from meshtrain.data.mixture import MixedGroups, MixedRows
from meshtrain.data.packing import Packed
from meshtrain.data.pieces import Pieces, open_pieces
from meshtrain.data.shards import Corpus
from meshtrain.data.sources import Source, cache_directory, open_source
from meshtrain.data.synthetic import Synthetic
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer
from meshtrain.data.windows import Windows


class GlobalBatches(Protocol):
    """Batches in one global order, of a bounded set of shapes (rows, T)."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def batches_per_epoch(self) -> int: ...

    @property
    def tokens_per_batch(self) -> float: ...

    def batch(self, k: int, rows: slice = slice(None)) -> Batch: ...

    def batch_shape(self, k: int) -> tuple[int, int]: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TextBatches:
    """The batches of one split in one global order, and the tokenizer that their ids are of.

    A batch has int32 arrays [rows, T] `tokens` and `labels` (the token after each); where the batching needs them also `segments`
    (of a row, from 1; 0 is padding) and `positions` (in the segment), and float32 `weights` of the loss (absent: all ones).
    """

    batches: GlobalBatches
    tokenizer: Tokenizer
    source: str
    digest: str  # of what each source holds for this split, joined by +, wherever it lies; empty for synthetic

    def batch(self, k: int, rows: slice = slice(None)) -> Batch:
        """These rows of global batch k. A pure function of (seed, k), so that the whole state of the data is k."""
        return self.batches.batch(k, rows)

    def batch_shape(self, k: int) -> tuple[int, int]:
        """(rows, T) of global batch k."""
        return self.batches.batch_shape(k)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, T) that a batch can have."""
        return self.batches.shapes

    @property
    def tokens_per_batch(self) -> float:
        """Labels that count in a batch, on average over an epoch."""
        return self.batches.tokens_per_batch

    @property
    def batches_per_epoch(self) -> int:
        """Batches until the text comes round again."""
        return self.batches.batches_per_epoch

    def describe(self) -> dict[str, Any]:
        """What is read, for logs."""
        names = {"source": self.source, "digest": self.digest, "tokenizer": self.tokenizer.name}
        return {**names, **self.batches.describe()}


def open_data(config: Config) -> tuple[TextBatches, TextBatches | None]:
    """Training and held-out batches; None if there is no held-out text. Touches no device.

    Raises ConfigError (one sentence): a source that is not there or not whole, a tokenizer too large for the model, too little text,
    no held-out text though eval.every asks for it.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of data.tokenizer {data.tokenizer}; "
            f"give at least {tokenizer.vocab_size}."
        )
    if data.source == "synthetic":
        return _synthetic(config, tokenizer, "train"), _synthetic(config, tokenizer, "validation")
    mixed = data.source == "mixture"
    key, names, weights = (
        ("data.mixture", data.mixture, data.weights) if mixed else ("data.source", (data.source,), (1.0,))
    )
    sources = [open_source(name, data, tokenizer, key) for name in names]
    train = _batches(config, tokenizer, sources, weights, "train")
    if data.validation_source is not None:
        sources, weights = [open_source(data.validation_source, data, tokenizer, "data.validation_source")], (1.0,)
    try:
        split = "all" if data.validation_source is not None else "validation"
        return train, _batches(config, tokenizer, sources, weights, split)
    except ConfigError as error:
        if config.eval.every:
            raise ConfigError(f"eval.every is {config.eval.every}, but of held-out text {error}") from None
        return train, None


def _synthetic(config: Config, tokenizer: Tokenizer, split: str) -> TextBatches:
    rows = Synthetic(config.model.vocab_size, config.train.sequence_length, config.run.seed, split)
    return TextBatches(RowBatches(rows, config.train.global_batch_size, pad=False), tokenizer, "synthetic", "")


def _batches(
    config: Config, tokenizer: Tokenizer, sources: Sequence[Source], weights: Sequence[float], split: str
) -> TextBatches:
    """The batches of a split of the sources that have any document in it; ConfigError if that is too little."""
    pairs = [(s, corpus, w) for s, w in zip(sources, weights, strict=True) if (corpus := s.corpus(split)) is not None]
    name = " + ".join(source.name for source in sources)
    if not pairs or (split == "train" and len(pairs) < len(sources)):
        raise ConfigError(f"{name} holds no document" + (f" for {split}." if split != "all" else "."))
    corpora, weights = [corpus for _, corpus, _ in pairs], [w for _, _, w in pairs]
    length, batching = config.train.sequence_length, config.data.batching
    for source, corpus, _ in pairs:
        if batching == "window" and corpus.labels < length and config.data.last == "drop":
            raise ConfigError(
                f"{source.name} holds {corpus.labels} tokens for {split}, fewer than train.sequence_length {length}."
            )
    tables = [] if batching == "window" else [_pieces(s, c, split, length) for s, c, _ in pairs]
    if batching in ("grouped", "budget"):
        batches = _grouped(config, corpora, tables, weights)
    else:
        batches = _rows(config, corpora, tables, weights)
    if batches.batches_per_epoch == 0:
        raise ConfigError(
            f"{name} fills no batch of train.global_batch_size {config.train.global_batch_size} for {split}; "
            "give a smaller batch, or data.last: pad."
        )
    return TextBatches(batches, tokenizer, name, "+".join(source.digest(split)[:16] for source, _, _ in pairs))


def _pieces(source: Source, corpus: Corpus, split: str, length: int) -> Pieces:
    return open_pieces(corpus, length, cache_directory() / "lengths" / f"{source.digest(split)[:32]}-{length}")


def _rows(
    config: Config, corpora: Sequence[Corpus], tables: Sequence[Pieces], weights: Sequence[float]
) -> GlobalBatches:
    """Batching window and packed."""
    length, seed, pad = config.train.sequence_length, config.run.seed, config.data.last == "pad"
    rows: list[RowSource]
    if config.data.batching == "window":
        rows = [Windows(corpus, length, pad, seed) for corpus in corpora]
    else:
        rows = [Packed(corpus, pieces, length, seed) for corpus, pieces in zip(corpora, tables, strict=True)]
    size = config.train.global_batch_size
    return RowBatches(rows[0], size, pad) if len(rows) == 1 else MixedRows(rows, weights, size, seed)


def _grouped(
    config: Config, corpora: Sequence[Corpus], tables: Sequence[Pieces], weights: Sequence[float]
) -> GlobalBatches:
    """Batching grouped and budget; the lengths are the same for all sources."""
    data, length, size = config.data, config.train.sequence_length, config.train.global_batch_size
    shares = [weight * pieces.counts / pieces.counts.sum() for weight, pieces in zip(weights, tables, strict=True)]
    lengths = choose_lengths(np.sum(shares, axis=0), data.lengths, data.length_multiple)
    if data.batching == "grouped":
        rows = [size] * len(lengths)
    else:
        rows = [budget_rows(size * length, n, data.rows_multiple or size) for n in lengths]
    sources = [
        Grouped(corpus, pieces, make_groups(pieces, lengths, rows, data.last == "pad"), config.run.seed)
        for corpus, pieces in zip(corpora, tables, strict=True)
    ]
    if len(sources) == 1:
        return sources[0]
    return MixedGroups(sources, weights, config.run.seed)
