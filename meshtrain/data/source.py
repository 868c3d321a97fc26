"""A source of documents that is open: its prepared shards, by split."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.config.schema import DataConfig
from meshtrain.data.manifest import MANIFEST, RECIPE, SPLITS, ShardManifest, read_manifest
from meshtrain.data.shards import Corpus, open_corpus
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, short

if TYPE_CHECKING:
    from meshtrain.data.pieces import DocumentPieces


@dataclass(frozen=True)
class Source:
    """An opened source: its splits (None: no document in it) and what its manifest says."""

    name: str
    manifest: ShardManifest
    train: Corpus | None
    validation: Corpus | None

    def digest(self, split: str) -> str:
        """Names the documents of train, validation or all."""
        return self.manifest.digest_of(*(SPLITS if split == "all" else (split,)))

    def corpus(self, split: str) -> Corpus | None:
        """The documents of train, validation or all."""
        if split == "all" and self.train is not None and self.validation is not None:
            return self.train + self.validation
        return {"train": self.train, "validation": self.validation, "all": self.train or self.validation}[split]

    def describe(self, corpus: Corpus, pieces: "DocumentPieces", longest: int) -> list[str]:
        """Notes on what of conversations is learned, and what of them does not fit rows of `longest` tokens; none on text."""
        manifest = self.manifest
        if manifest.contents == "text":
            return []
        from meshtrain.data.examples import SPECIAL, TOKENS
        from meshtrain.data.pieces import shortened

        stored = sum(manifest.count(split, "tokens") for split in SPLITS)
        notes = [f"{manifest.counts[TOKENS] / stored:.0%} of the tokens are learned"]
        cut, left_out = shortened(corpus, pieces, longest)
        if cut:
            notes.append(f"{cut:,} of {corpus.documents:,} examples end at token {longest}, where a row does")
        if left_out:
            why = (
                "they are longer than a row"
                if manifest.contents == "pairs"
                else f"no answer begins in their first {longest} tokens"
            )
            notes.append(f"{left_out:,} of {corpus.documents:,} examples are left out, since {why}")
        if special := manifest.counts[SPECIAL]:
            notes.append(f"{special:,} messages hold special tokens, which are read as such")
        return notes


def open_shards(directory: Path, name: str, data: DataConfig, tokenizer: Tokenizer) -> Source:
    """Opens shards that were prepared for a tokenizer and a validation share, and are still whole; ConfigError if not."""
    if not (directory / MANIFEST).is_file() and (directory / RECIPE).is_file():
        raise ConfigError(
            f"the preparation of {name} was not finished; run the same `python -m meshtrain.data prepare` again."
        )
    manifest = read_manifest(directory)
    if manifest.tokenizer_digest != tokenizer.digest:
        raise ConfigError(
            f"the shards in {name} were made with the tokenizer {manifest.tokenizer} ({manifest.vocab_size} tokens), but data.tokenizer is "
            f"{data.tokenizer}; set data.tokenizer to {'byte' if manifest.tokenizer == 'byte' else directory / 'tokenizer.json'}."
        )
    if manifest.contents != data.format:
        raise ConfigError(
            f"the shards in {name} hold {manifest.contents}, but data.format is {data.format}; set data.format to {manifest.contents}."
        )
    if data.template is not None:
        from meshtrain.data.template import find_template

        if find_template(data.template, data.tokenizer).digest != manifest.template_digest:
            raise ConfigError(
                f"the shards in {name} were made with another chat template than data.template {short(data.template)}; leave the key out, or "
                "prepare them again."
            )
    if data.validation is not None and data.validation != manifest.validation_fraction:
        raise ConfigError(
            f"data.validation is {data.validation}, but the shards in {name} were prepared with {manifest.validation_fraction}; "
            "leave the key out, or prepare them again."
        )
    train, validation = (
        open_corpus(directory, manifest, split, data.verify) if manifest.shards[split] else None for split in SPLITS
    )
    return Source(name, manifest, train, validation)
