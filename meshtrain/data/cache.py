"""Text that is prepared when it is first opened, and kept in the user's cache."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from meshtrain.config.schema import DataConfig
from meshtrain.data.inputs import Found
from meshtrain.data.manifest import MANIFEST
from meshtrain.data.opened import Source, open_shards
from meshtrain.data.prepare import SKIPPED, describe_skipped, fingerprint, prepare, refusal_at
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.unit import Options
from meshtrain.errors import ConfigError
from meshtrain.sources import SOURCES

INLINE_BYTES = 64 << 20  # text up to this is prepared in this process: starting workers would take longer
CALLED = 40  # characters of a source's name in the cache
SILENCE = 10  # seconds of preparing after which a word is due on how far it is
log = logging.getLogger(__name__)


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


def open_files(found: Found, name: str, options: Options, tokenizer: Tokenizer, data: DataConfig) -> Source:
    """The cached shards of these files, made now if they are not there, and again if they are damaged."""
    made_from = "\0".join(fingerprint(found.files, options, tokenizer).values())
    called = name if name in SOURCES else os.path.basename(os.path.realpath(os.path.expanduser(name)))[:CALLED]
    directory = cache_directory() / f"{called}-{tokenizer.name}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    damage = None
    try:
        if (directory / MANIFEST).exists():
            try:
                return open_shards(directory, name, data, tokenizer)
            except ConfigError as error:
                damage = error
        _prepare(found, directory, name, options)
        if damage is not None:
            log.warning("in the cache, %s It is made again.", damage)
    except OSError as error:
        raise ConfigError(
            f"the text of {name} cannot be prepared in {directory} ({refusal_at(error)}); set XDG_CACHE_HOME to a directory with room."
        ) from None
    return open_shards(directory, name, data, tokenizer)


def _prepare(found: Found, directory: Path, name: str, options: Options) -> None:
    log.info("preparing %d files (%.1f MB) of %s in %s", len(found.files), found.size / 1e6, name, directory)
    if found.left_out:
        log.warning("%s: left out: %s", name, found.describe_left_out())
    workers = 1 if found.size <= INLINE_BYTES else os.cpu_count() or 1
    manifest = prepare(found.files, directory, options, workers, saying("prepared", name))
    if manifest.skipped:
        # That a file is empty surprises nobody: the standard library has some.
        level = logging.DEBUG if set(manifest.skipped) == {"empty"} else logging.WARNING
        log.log(level, "%s: %s; named in %s", name, describe_skipped(manifest.skipped), directory / SKIPPED)


def saying(what: str, name: str) -> Callable[[int, int], None]:
    """Logs now and then how far something long is: how much of the bytes it has prepared."""
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SILENCE:
            said = time.monotonic()
            log.info("%s %.0f of %.0f MB of %s", what, done / 1e6, total / 1e6, name)

    return progress
