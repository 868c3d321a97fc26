"""Text that is prepared when it is first opened, and kept in the user's cache; source `stdlib`, which is opened so."""

import hashlib
import logging
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from meshtrain.config.images import IMAGES
from meshtrain.config.schema import DataConfig
from meshtrain.data.formats import wanted_for
from meshtrain.data.input_files import InputFiles, find
from meshtrain.data.manifest import MANIFEST
from meshtrain.data.prepare import (
    SKIPPED,
    describe_skipped,
    fingerprint,
    prepare,
    refusal_at,
)
from meshtrain.data.shards import Source, open_shards
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.unit import PrepareOptions
from meshtrain.errors import ConfigError
from meshtrain.files import cache_directory, is_address, refuse_passing
from meshtrain.sources import SOURCES

INLINE_BYTES = (
    64 << 20
)  # text up to this is prepared in this process: starting workers would take longer
SILENCE = 10  # seconds of preparing between two log records on how far it is
STDLIB_VALIDATION = (
    # Of a few hundred files one in a hundred would be too little to measure a loss on
    0.05
)
log = logging.getLogger(__name__)


def open_files(
    inputs: InputFiles,
    name: str,
    options: PrepareOptions,
    tokenizer: Tokenizer,
    data: DataConfig,
) -> Source:
    """Opens the cached shards of these files, made now if they are not there, and again if they are damaged."""
    key = hashlib.sha256(
        "\0".join(fingerprint(inputs.files, options, tokenizer).values()).encode()
    ).hexdigest()[:16]
    base = (
        name
        if name in SOURCES
        else name.rstrip("/").rpartition("/")[2]
        if is_address(name)
        else os.path.basename(os.path.realpath(os.path.expanduser(name)))[:40]
    )
    directory = cache_directory() / f"{base}-{tokenizer.name}-{key}"
    damage = None
    try:
        if (directory / MANIFEST).exists():
            try:
                return open_shards(directory, name, data, tokenizer)
            except ConfigError as error:
                damage = error
        _prepare(inputs, directory, name, options)
        if damage is not None:
            log.warning("in the cache, %s It is made again.", damage)
    except OSError as error:
        refuse_passing(error.filename or directory, error)
        raise ConfigError(
            f"the text of {name} cannot be prepared in {directory} ({refusal_at(error)}); set XDG_CACHE_HOME to a "
            "directory with room."
        ) from None
    return open_shards(directory, name, data, tokenizer)


def open_path(
    path: Path | str, name: str, data: DataConfig, tokenizer: Tokenizer
) -> Source:
    """Opens a file or directory of text or conversations, by the keys of section data."""
    assert data.format != IMAGES, "they are opened elsewhere"
    options = PrepareOptions(
        data.tokenizer,
        PrepareOptions.validation if data.validation is None else data.validation,
        data.text_field,
        data.bad_documents,
        data.format,
        data.template,
        data.begin,
        data.end,
    )
    return open_files(
        find([str(path)], wanted_for(data.format)), name, options, tokenizer, data
    )


def _prepare(
    inputs: InputFiles, directory: Path, name: str, options: PrepareOptions
) -> None:
    log.info(
        "preparing %s (%d files, %.1f MB) in %s",
        name,
        len(inputs.files),
        inputs.size / 1e6,
        directory,
    )
    if inputs.left_out:
        log.warning("%s: left out: %s", name, inputs.describe_left_out())
    workers = 1 if inputs.size <= INLINE_BYTES else os.cpu_count() or 1
    manifest = prepare(
        inputs.files, directory, options, workers, logged_progress("prepared", name)
    )
    if manifest.skipped:
        # That a file is empty surprises nobody: the standard library has some.
        level = logging.DEBUG if set(manifest.skipped) == {"empty"} else logging.WARNING
        log.log(
            level,
            "%s: %s; named in %s",
            name,
            describe_skipped(manifest.skipped),
            directory / SKIPPED,
        )


def logged_progress(what: str, name: str) -> Callable[[int, int], None]:
    """Returns a function of (bytes done, bytes in all) that logs now and then how far something long is."""
    logged = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= SILENCE:
            logged = time.monotonic()
            log.info("%s %.0f of %.0f MB of %s", what, done / 1e6, total / 1e6, name)

    return progress


def open_stdlib(data: DataConfig, tokenizer: Tokenizer) -> Source:
    """Source `stdlib`: the Python files of the standard library, which every machine has.

    data.text_field and data.bad_documents do not matter: these are plain files.
    """
    share = STDLIB_VALIDATION if data.validation is None else data.validation
    options = PrepareOptions(data.tokenizer, share, begin=data.begin, end=data.end)
    return open_files(stdlib_files(), "stdlib", options, tokenizer, data)


def stdlib_files() -> InputFiles:
    """The files of the standard library, without its tests and without what was installed beside it."""
    without = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    return find(
        [sysconfig.get_paths()["stdlib"]], lambda name: name.endswith(".py"), without
    )
