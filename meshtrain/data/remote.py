"""Prepared shards in an object store are read by ranges, through a cache by digest.

    CACHE/store/<sha256>         a shard that came whole and is what the manifest says
    CACHE/store/<sha256>.part    one of which blocks are missing, with holes where they belong
    CACHE/store/<sha256>.have    a byte for each of its blocks: 1 once it is there

A block is read once, by whichever process needs it first; what is there is read as a local shard is. With data.verify
all of a split is fetched and compared when it is opened; without, a shard is compared at the next opening after it came
whole.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import stores
from meshtrain.config.schema import DataConfig
from meshtrain.data.manifest import STORED, UNITS, Shard, ShardManifest
from meshtrain.data.shards import (
    Corpus,
    Descriptor,
    Source,
    TokenFile,
    digest_of_file,
    open_shards,
)
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError
from meshtrain.stores import BLOCK


def open_stored(address: str, data: DataConfig, tokenizer: Tokenizer) -> Source:
    """Opens shards in a store, as `open_shards` opens those of a directory."""
    described = stores.local_copy(
        address,
        data.cache_gib,
        lambda name: not name.endswith(STORED) and not name.startswith(f"{UNITS}/"),
    )
    corpora = StoredShards(address.rstrip("/"), data.cache_gib).corpus
    return open_shards(described, address, data, tokenizer, corpora)


@dataclass(frozen=True, eq=False)
class StoredTokens(TokenFile):
    """The tokens of a shard in a store; `path` is where they are kept."""

    fetch: Callable[[int, int], bytes] = lambda at, size: b""
    size: int = 0

    def open(self) -> Descriptor:
        return Descriptor(self.path) if self.path.is_file() else _Partial(self)


class _Partial(Descriptor):
    """A shard of which only some blocks are here; the others are fetched when they are first read."""

    def __init__(self, tokens: StoredTokens) -> None:
        self.tokens = tokens
        self.number = _open(tokens.path.with_suffix(".part"), tokens.size)
        blocks = _open(tokens.path.with_suffix(".have"), -(-tokens.size // BLOCK))
        try:
            self.have = mmap.mmap(blocks, 0)
        finally:
            os.close(blocks)

    def read(self, size: int, at: int) -> bytes:
        first = at // BLOCK
        last = min(-(-(at + size) // BLOCK), len(self.have))
        while (missing := self.have.find(b"\0", first, last)) >= 0:
            self.fetch(missing)
        return super().read(size, at)

    def fetch(self, block: int) -> None:
        """Brings a block here; it counts as here once it is on disk."""
        at = block * BLOCK
        content = self.tokens.fetch(at, min(BLOCK, self.tokens.size - at))
        os.pwrite(self.number, content, at)
        os.fdatasync(self.number)
        self.have[block] = 1

    def fetch_all(self) -> None:
        stores.each(self.fetch, [k for k in range(len(self.have)) if not self.have[k]])


def _open(path: Path, size: int) -> int:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if os.fstat(number).st_size != size:
        os.truncate(number, size)
    return number


class StoredShards:
    """The shards under an address, kept in at most `limit` GiB."""

    def __init__(self, address: str, limit: float) -> None:
        self.address = address
        self.limit = limit

    def corpus(
        self,
        directory: Path,
        manifest: ShardManifest,
        split: str,
        verify: bool,
    ) -> Corpus:
        """Opens the shards of a split, as `open_corpus` does."""
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        shards = manifest.shards[split]
        files = [
            file for shard in shards for file in shard.files(directory, dtype.itemsize)
        ]
        kept = {stores.cache() / digest for _, _, digest in files}
        stores.make_room(
            sum(size for _, size, _ in files), self.limit, self.address, kept
        )
        names = stores.listing(self.address)
        opened = [
            self._file(shard, file, dtype, names)
            for shard, file in _owned(shards, files)
        ]
        for tokens in opened if verify else opened[1::2]:
            self._complete(tokens, verify)
        for tokens in opened[::2]:
            self._promote(tokens)
        offsets = [np.memmap(tokens.path, "<u8", "r") for tokens in opened[1::2]]
        return Corpus(opened[::2], offsets, manifest.contents)

    def _file(
        self,
        shard: Shard,
        file: tuple[Path, int, str],
        dtype: np.dtype,
        names: Any,
    ) -> StoredTokens:
        path, size, digest = file
        entry = names.get(path.name)
        if entry is None or entry.size != size:
            has = (
                "is missing"
                if entry is None
                else f"has {entry.size} bytes instead of {size}"
            )
            raise ConfigError(
                f"the shard {self.address}/{path.name} {has}; prepare the text again."
            )
        read = lambda at, size: stores.read(f"{self.address}/{path.name}", at, size)
        return StoredTokens(
            stores.cache() / digest, dtype, shard.tokens, "", (0, 0, 0), read, size
        )

    def _complete(self, tokens: StoredTokens, verify: bool) -> None:
        """Brings all of a file here; ConfigError if it is not what the manifest says."""
        if tokens.path.is_file():
            if not verify or digest_of_file(tokens.path) == tokens.path.name:
                os.utime(tokens.path)
                return
            tokens.path.unlink()
        partial = _Partial(tokens)
        partial.fetch_all()
        self._promote(tokens)

    def _promote(self, tokens: StoredTokens) -> None:
        """Gives a file that has come whole the name of its digest; ConfigError if it has another."""
        part = tokens.path.with_suffix(".part")
        have = tokens.path.with_suffix(".have")
        if not have.is_file() or b"\0" in have.read_bytes():
            return
        digest = digest_of_file(part)
        if digest == tokens.path.name:
            os.replace(part, tokens.path)
        else:
            part.unlink()
        have.unlink()
        if digest != tokens.path.name:
            raise ConfigError(
                f"a shard in {self.address} has been altered: its digest is not the manifest's; prepare the text "
                "again."
            )


def _owned(shards: Sequence[Shard], files: Sequence[Any]) -> list[tuple[Shard, Any]]:
    return [(shards[i // 2], file) for i, file in enumerate(files)]
