"""From the configuration to the batches of training and validation."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshtrain.config import Config
from meshtrain.config.follow import row_multiple
from meshtrain.config.images import IMAGES
from meshtrain.config.places import BOTH
from meshtrain.config.schema import DataConfig
from meshtrain.data.batches import RowBatches, SplitBatches, few
from meshtrain.data.manifest import SPLITS, is_preparation
from meshtrain.data.shards import Corpus, Source, open_shards
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer
from meshtrain.errors import ConfigError, nearest, refusal, short
from meshtrain.files import refuse_passing
from meshtrain.inputs import a_config
from meshtrain.sources import MIXTURE, SOURCES, has_documents, has_text

# How a sentence on a split (all: of data.validation_source) with too little text ends: evaluation can have more, or be
# left out.
WAYS_OUT = {
    "train": ".",
    "validation": "; hold out more with data.validation (of prepared shards: with --validation when they are "
    "prepared), "
    "give other text as data.validation_source, or set eval.every to 0.",
    "all": "; give more text as data.validation_source, or set eval.every to 0.",
}


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
        shapes = f" in {len(self.shapes)} shapes" if len(self.shapes) > 1 else ""
        padding = f", {self.padding:.1%} padding" if self.padding >= 0.0005 else ""
        epoch = f"{self.batches_per_epoch:,} batches an epoch of {self.tokens_per_batch:,.0f} tokens{shapes}{padding}"
        return f"{self.source}: " + "; ".join((epoch, *self.notes))


def open_data(config: Config) -> tuple[SplitBatches, SplitBatches | None]:
    """Opens training and validation batches, of text or of images; None if nothing is held out. Touches no device.

    Raises ConfigError (one sentence): a source that is not there or not whole, a tokenizer or classes too many for the
    model, too little text, nothing held out though eval.every asks for it.
    """
    data = a_config(config, "mt.open_data").data
    if data.format == IMAGES:
        from meshtrain.data.images.image_batches import open_images

        return open_images(config)
    tokenizer = load_tokenizer(data.tokenizer, begin=data.begin, end=data.end)
    _check_vocabulary(config, tokenizer)
    if not has_documents(data.source):
        opens = SOURCES[data.source].rows
        assert opens is not None, f"{data.source} is registered without a function that opens it"
        rows = (
            RowBatches(opens(config, split), config.train.global_batch_size, pad=False)
            for split in SPLITS
        )
        train, validation = (
            TextBatches(b, data.source, "", tokenizer, multiple=row_multiple(config)) for b in rows
        )
        return train, validation
    names, weights = (data.mixture, data.weights) if data.mixture else ((data.source,), (1.0,))
    key = "data.mixture" if data.mixture else "data.source"
    sources = [_open_source(key, name, data, tokenizer) for name in names]
    train = _batches(config, tokenizer, sources, weights, "train")
    if data.validation_source is not None:
        sources = [_open_source("data.validation_source", data.validation_source, data, tokenizer)]
        weights = (1.0,)
    try:
        split = "all" if data.validation_source is not None else "validation"
        return train, _batches(config, tokenizer, sources, weights, split)
    except ConfigError as error:
        if config.eval.every:
            raise ConfigError(f"eval.every is {config.eval.every}, but {error}") from None
        return train, None


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    size = config.model.vocab_size
    if tokenizer.vocab_size > size:
        ends = tokenizer.vocab_size == size + 1 == tokenizer.end_of_document + 1
        way_out = ", or name the token that ends a document with data.end" if ends else ""
        raise ConfigError(
            f"model.vocab_size {size} is less than the {tokenizer.vocab_size} tokens of data.tokenizer "
            f"{config.data.tokenizer}; give at least {tokenizer.vocab_size}{way_out}."
        )


def _open_source(key: str, name: str, data: DataConfig, tokenizer: Tokenizer) -> Source:
    if name in SOURCES and data.format != "text":
        raise ConfigError(
            f"{key} is {name}, which holds no conversations; with data.format {data.format} name files of them."
        )
    if name in SOURCES and (opens := SOURCES[name].documents) is not None:
        return opens(data, tokenizer)
    path = Path(os.path.expanduser(name))
    try:
        if is_preparation(path):
            return open_shards(path, name, data, tokenizer)
        if os.path.lexists(path):
            from meshtrain.data.cache import open_path

            return open_path(path, name, data, tokenizer)
    except OSError as error:
        refuse_passing(error.filename or name, error)
        raise ConfigError(f"{key} {short(name)} cannot be read: {refusal(error)}.") from None
    words = (
        [*filter(has_text, SOURCES), MIXTURE]
        if key == "data.source"
        else list(filter(has_documents, SOURCES))
    )
    raise ConfigError(
        f"{key} is '{short(name)}', but there is no such file or directory, {BOTH}; it must be a file or directory of "
        "text, prepared shards "
        f"or {' or '.join(words)}" + (nearest(name, words) or ".")
    )


def _batches(
    config: Config,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    weights: Sequence[float],
    split: str,
) -> TextBatches:
    from meshtrain.data.mixture import build_batches, open_tables

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
        batches, name, digest, tokenizer, multiple=row_multiple(config), notes=tuple(notes)
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
    drops = config.data.batching == "window" and config.data.last == "drop" and split == "train"
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
