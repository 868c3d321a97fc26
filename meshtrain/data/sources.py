"""Where the tokens come from: the standard library, text, or prepared shards; text is prepared once and kept in the cache."""

import difflib
import hashlib
import logging
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config import ConfigError, refusal, short
from meshtrain.config.schema import DataConfig
from meshtrain.data.inputs import Found, find
from meshtrain.data.prepare import SKIPPED, describe_skipped, fingerprint, prepare, refusal_at
from meshtrain.data.shards import MANIFEST, PLAN, SPLITS, Corpus, Manifest, is_preparation, open_corpus, read_manifest
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.unit import Options

VALIDATION = 0.01  # held out of text that is prepared on the fly
STDLIB_VALIDATION = 0.05  # of its few hundred files one in a hundred would be too little to measure a loss on
INLINE_BYTES = 64 << 20  # text up to this is prepared in this process: starting workers would take longer
CALLED = 40  # characters of a source's name in the cache
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """An opened source: its splits (None: no document in it) and what its manifest says."""

    name: str
    manifest: Manifest
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


def open_source(name: str, data: DataConfig, tokenizer: Tokenizer, key: str = "data.source") -> Source:
    """Opens the source that a key names, preparing it first if it is text; ConfigError (one sentence) on bad input."""
    path = Path(os.path.expanduser(name))
    share = VALIDATION if data.validation is None else data.validation
    options = Options(data.tokenizer, share, data.text_field, data.bad_documents)
    if name == "stdlib":
        share = STDLIB_VALIDATION if data.validation is None else data.validation
        return _prepared(stdlib_files(), name, Options(data.tokenizer, share), tokenizer, data)
    try:
        if name and is_preparation(path):
            return _open_shards(path, name, data, tokenizer)
        if name and os.path.lexists(path):
            return _prepared(find([str(path)]), name, options, tokenizer, data)
    except OSError as error:
        raise ConfigError(f"{key} {short(name)} cannot be read: {refusal(error)}.") from None
    words = ("stdlib", "synthetic", "mixture") if key == "data.source" else ("stdlib",)
    near = difflib.get_close_matches(name, words, n=1)
    raise ConfigError(
        f"{key} is '{short(name)}', but there is no such file or directory; it must be a file or directory of text, prepared shards "
        f"or {' or '.join(words)}" + (f"; did you mean {near[0]}?" if near else ".")
    )


def _open_shards(directory: Path, name: str, data: DataConfig, tokenizer: Tokenizer) -> Source:
    """Shards that were prepared for a tokenizer and a held-out share, and are still whole; ConfigError if not."""
    if not (directory / MANIFEST).is_file() and (directory / PLAN).is_file():
        raise ConfigError(
            f"the preparation of {name} was not finished; run the same `python -m meshtrain.data prepare` again."
        )
    manifest = read_manifest(directory)
    if manifest.tokenizer_digest != tokenizer.digest:
        raise ConfigError(
            f"the shards in {name} were made with the tokenizer {manifest.tokenizer} ({manifest.vocab_size} tokens), but data.tokenizer is "
            f"{data.tokenizer}; set data.tokenizer to {'byte' if manifest.tokenizer == 'byte' else directory / 'tokenizer.json'}."
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


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/meshtrain, or ~/.cache/meshtrain."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "meshtrain"
    try:
        return Path.home() / ".cache" / "meshtrain"
    except RuntimeError:
        raise ConfigError(
            "prepared text needs a cache, but this user has no home directory; set XDG_CACHE_HOME to a directory with room."
        ) from None


def stdlib_files() -> Found:
    """The Python files of the standard library, without its tests and without what was installed beside it."""
    without = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    return find([sysconfig.get_paths()["stdlib"]], lambda name: name.endswith(".py"), without)


def _prepared(found: Found, name: str, options: Options, tokenizer: Tokenizer, data: DataConfig) -> Source:
    """The cached shards of these files, made now if they are not there, and again if they are damaged."""
    made_from = "\0".join(fingerprint(found.files, options, tokenizer).values())
    called = name if name == "stdlib" else os.path.basename(os.path.realpath(os.path.expanduser(name)))[:CALLED]
    directory = cache_directory() / f"{called}-{tokenizer.name}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    try:
        if (directory / MANIFEST).exists():
            try:
                return _open_shards(directory, name, data, tokenizer)
            except ConfigError as error:
                log.warning("In the cache, %s It is made again.", error)
        _prepare(found, directory, name, options)
    except OSError as error:
        raise ConfigError(
            f"the text of {name} cannot be prepared in {directory} ({refusal_at(error)}); set XDG_CACHE_HOME to a directory with room."
        ) from None
    return _open_shards(directory, name, data, tokenizer)


def _prepare(found: Found, directory: Path, name: str, options: Options) -> None:
    log.info("preparing %d files (%.1f MB) of %s in %s", len(found.files), found.size / 1e6, name, directory)
    if found.left_out:
        log.warning("%s: left out: %s", name, found.describe_left_out())
    workers = 1 if found.size <= INLINE_BYTES else os.cpu_count() or 1
    manifest = prepare(found.files, directory, options, workers)
    if manifest.skipped:
        level = logging.INFO if set(manifest.skipped) == {"empty"} else logging.WARNING
        log.log(level, "%s: %s; named in %s", name, describe_skipped(manifest.skipped), directory / SKIPPED)
