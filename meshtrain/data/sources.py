"""Where the tokens come from: the standard library, text, or prepared shards; text is prepared once and kept in the cache."""

import difflib
import hashlib
import logging
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config import ConfigError
from meshtrain.config.schema import DataConfig
from meshtrain.data.documents import File, find
from meshtrain.data.prepare import PLAN, SKIPPED, Options, describe_skipped, fingerprint, prepare
from meshtrain.data.shards import MANIFEST, Corpus, Manifest, open_corpus, read_manifest
from meshtrain.data.tokenizer import Tokenizer

VALIDATION = 0.01  # held out of text that is prepared on the fly
STDLIB_VALIDATION = 0.05  # of its few hundred files one in a hundred would be too little to measure a loss on
INLINE_BYTES = 64 << 20  # text up to this is prepared in this process: starting workers would take longer
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """An opened source: its splits (None: no document in it) and what its manifest says."""

    name: str
    manifest: Manifest
    train: Corpus | None
    validation: Corpus | None

    def corpus(self, split: str) -> Corpus | None:
        """The documents of train, validation or all."""
        if split == "all" and self.train is not None and self.validation is not None:
            return self.train + self.validation
        return {"train": self.train, "validation": self.validation, "all": self.train or self.validation}[split]


def open_source(name: str, data: DataConfig, tokenizer: Tokenizer) -> Source:
    """Opens one source, preparing it first if it is text; ConfigError (one sentence) on bad input."""
    path = Path(name).expanduser()
    share = VALIDATION if data.validation is None else data.validation
    options = Options(data.tokenizer, share, data.text_field, data.bad_documents)
    if name == "stdlib":
        share = STDLIB_VALIDATION if data.validation is None else data.validation
        directory = _prepared(stdlib_files(), name, Options(data.tokenizer, share), tokenizer)
    elif (path / MANIFEST).is_file():
        directory = path
    elif (path / PLAN).is_file():
        raise ConfigError(
            f"the preparation of {name} was not finished; run the same `python -m meshtrain.data prepare` again."
        )
    elif path.exists():
        directory = _prepared(find([str(path)]).files, path.resolve().name, options, tokenizer)
    else:
        near = difflib.get_close_matches(name, ("stdlib", "synthetic", "mixture"), n=1)
        raise ConfigError(
            f"data.source is {name!r}, but there is no such file or directory; it must be stdlib, a file or directory of text, "
            f"prepared shards, synthetic or mixture" + (f"; did you mean {near[0]}?" if near else ".")
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
        open_corpus(directory, manifest, split, data.verify) if manifest.shards[split] else None
        for split in ("train", "validation")
    )
    return Source(name, manifest, train, validation)


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/meshtrain, or ~/.cache/meshtrain."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshtrain"


def stdlib_files() -> list[File]:
    """The Python files of the standard library, without its tests and without what was installed beside it."""
    without = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    return find([sysconfig.get_paths()["stdlib"]], lambda name: name.endswith(".py"), without).files


def _prepared(files: list[File], name: str, options: Options, tokenizer: Tokenizer) -> Path:
    """The cached shards of these files, made now if they are not there."""
    made_from = "\0".join(fingerprint(files, options, tokenizer).values())
    directory = cache_directory() / f"{name}-{tokenizer.name}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    if (directory / MANIFEST).is_file():
        return directory
    size = sum(file.size for file in files)
    log.info("preparing %d files (%.1f MB) of %s in %s", len(files), size / 1e6, name, directory)
    try:
        manifest = prepare(files, directory, options, workers=1 if size <= INLINE_BYTES else os.cpu_count() or 1)
    except OSError as error:
        raise ConfigError(
            f"the text of {name} cannot be prepared in {directory} ({error.strerror}); set XDG_CACHE_HOME to a directory with room."
        ) from None
    if manifest.skipped:
        level = logging.INFO if set(manifest.skipped) == {"empty"} else logging.WARNING
        log.log(level, "%s: %s; named in %s", name, describe_skipped(manifest.skipped), directory / SKIPPED)
    return directory
