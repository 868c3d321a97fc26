"""Token shards on disk, the corpus that they form together, and the source that has them by split.

    DIR/manifest.json            counts, digests, tokenizer; plan.json and units/ beside it record how (prepare.py)
    DIR/train-00000.tokens       uint16 or uint32, little-endian:   E d d d E d d d d d E d d E
    DIR/train-00000.offsets      uint64, little-endian:               1       5           11  14
    DIR/validation-00000.tokens  ...                                  first label of each document, and the end

E is the end-of-document token, d a document's own. A shard begins with an E, so that every document is predicted from
the E before it and ends with the E that it predicts: each stored token but the first is a label exactly once. Where
documents begin with a token of their own, B, they are predicted from that, and what ends one is E and the B of the
next:

    B d d d E B d d d d d E B d d E B

In conversations (`examples`) an E only stands between two: the first token of one is predicted from nothing, and
nothing comes after its last. Their tokens are uint32, and say in their highest bits whether they are learned (LEARNED),
and in the second half of a pair that they are (REJECTED):

    E d d D D E ...      D: learned        a pair:   E c c C C r r R R R E ...
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshtrain.config.schema import DataConfig
from meshtrain.data.manifest import (
    COUNTED,
    MANIFEST,
    RECIPE,
    SPECIAL,
    SPLITS,
    TOKENS,
    Contents,
    ShardManifest,
    read_manifest,
)
from meshtrain.data.template import find_template
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, short
from meshtrain.files import refuse_passing, retried

SHARE = 0.003  # of the time, for looks at the stamps of shards
MOST_OPEN = 256  # files at a time; a process may have 1,024


Stamp = tuple[int, int, int]  # when content and inode last changed, in ns, and bytes


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of one shard, read by position.

    The file can be memory-mapped as it is, but the kernel maps far more around a row than is read: random rows of a 2
    GB mapping soon count as 2 GB of resident memory, and giving it back costs more than was saved (a row of 1,024: 1.8
    us mapped, 6.1 us mapped and given back, 3.7 us by position). And a mapped file that is cut short meanwhile
    kills the process.
    """

    path: Path
    dtype: np.dtype
    count: int
    digest: str = ""  # the manifest's; none: not watched
    stamp: Stamp = (0, 0, 0)  # before it was verified

    def open(self) -> "Descriptor":
        return Descriptor(self.path)


class Descriptor:
    """An open file, closed with the last reference to it: not while it is read, whatever another thread opens
    meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.number = retried(lambda: os.open(path, os.O_RDONLY))

    def read(self, size: int, at: int) -> bytes:
        """`size` bytes from `at` on, or fewer at the end of the file."""
        data = self._read_once(size, at)
        # A read may be interrupted before its end.
        while 0 < len(data) < size and (
            more := self._read_once(size - len(data), at + len(data))
        ):
            data += more
        return data

    def _read_once(self, size: int, at: int) -> bytes:
        return retried(lambda: os.pread(self.number, size, at))

    def stamp(self) -> Stamp:
        return _stamp(os.fstat(self.number))

    # Bound here: the module may be taken down before the last reference.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


@lru_cache(maxsize=MOST_OPEN)
def descriptor(file: TokenFile) -> Descriptor:
    """Opens a file when it is first read; of many files, the least recently used are closed."""
    return file.open()


class _Watch:
    """Finds shards that are altered in place while they are read, in at most SHARE of the time.

    A changed stamp (of a write, but also of a chmod or another link) has the file digested: what that says counts. Not
    found: what leaves no stamp at once, such as a write on another machine, and what was read in the milliseconds since
    the last look.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = files
        self.stamps = [file.stamp for file in files]
        self.lock = threading.Lock()
        self.due = 0.0

    def look(self, shards: Iterable[int]) -> None:
        """Checks shards after they have been read; OSError for one that is not as it was prepared."""
        began = time.monotonic()
        if began < self.due or not self.lock.acquire(blocking=False):
            return
        try:
            spent = time.thread_time()
            changed = [
                shard
                for shard in shards
                if self.files[shard].digest
                and descriptor(self.files[shard]).stamp() != self.stamps[shard]
            ]
            # Not of the clock: on a busy machine that would put the next look off.
            self.due = began + (time.thread_time() - spent) / SHARE
            for shard in changed:
                self._judge(shard)
        finally:
            self.lock.release()

    def _judge(self, shard: int) -> None:
        file = descriptor(self.files[shard])
        digest = hashlib.sha256()
        at = 0
        self.stamps[shard] = file.stamp()
        while data := file.read(1 << 20, at):
            digest.update(data)
            at += len(data)
        if digest.hexdigest() != self.files[shard].digest:
            raise OSError(
                f"the shard {self.files[shard].path} was altered while it was being read: its digest is no longer the "
                "manifest's; "
                "prepare the text again"
            )


class Corpus:
    """The documents of one split: one stream of labels numbered from 0, over all shards.

    offsets: of each shard, memory-mapped; needed only to find documents.
    contents: text, chat or pairs; the documents of the last two are read as `stretches` says, and never cut.
    """

    def __init__(
        self,
        tokens: Sequence[TokenFile],
        offsets: Sequence[np.ndarray],
        contents: Contents = "text",
    ) -> None:
        self.tokens = list(tokens)
        self.offsets = list(offsets)
        self.dtype = tokens[0].dtype
        self.contents = contents
        self.watch = _Watch(self.tokens)
        # The number of each shard's first label, and the count of labels: int64.
        self.starts = np.cumsum([0, *(shard.count - 1 for shard in tokens)])

    @property
    def labels(self) -> int:
        """Tokens that can be predicted: all documents with their ends."""
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return sum(len(offsets) - 1 for offsets in self.offsets)

    def cut(
        self, first: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stretches of labels cut at the borders of shards: how many each becomes; first label and length of each of
        those.
        """
        ends = first + lengths
        shards = np.searchsorted(self.starts, first, side="right") - 1
        counts = np.searchsorted(self.starts, ends - 1, side="right") - shards
        # The shard of each: the one its stretch begins in, and as many further as come before it.
        shards = np.arange(counts.sum()) + np.repeat(
            shards - (np.cumsum(counts) - counts), counts
        )
        begins = np.maximum(np.repeat(first, counts), self.starts[shards])
        return (
            counts,
            begins,
            np.minimum(np.repeat(ends, counts), self.starts[shards + 1]) - begins,
        )

    def read(
        self, first: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, labels) of stretches, one behind another: labels first .. first + length of each, and the token
        before each label.

        No stretch reaches over the border of a shard; one that begins at PADDING is zeros.
        """
        shards = np.searchsorted(self.starts, first, side="right") - 1
        # In the shard, of the token before the first label
        places = first - self.starts[shards]
        width = self.dtype.itemsize
        wanted = list(
            zip(
                shards.tolist(),
                (places * width).tolist(),
                ((lengths + 1) * width).tolist(),
                strict=True,
            )
        )
        read = [
            descriptor(self.tokens[shard]).read(size, at) if shard >= 0 else bytes(size)
            for shard, at, size in wanted
        ]
        tokens = b"".join([data[:-width] for data in read])
        labels = b"".join([data[width:] for data in read])
        if len(tokens) != width * lengths.sum():
            cut = next(
                shard
                for (shard, _, size), data in zip(wanted, read, strict=True)
                if len(data) < size
            )
            raise OSError(
                f"the shard {self.tokens[cut].path} was cut short while it was being read"
            )
        self.watch.look({shard for shard in shards.tolist() if shard >= 0})
        return np.frombuffer(tokens, self.dtype), np.frombuffer(labels, self.dtype)

    def __add__(self, other: "Corpus") -> "Corpus":
        """The documents of both."""
        return Corpus(
            self.tokens + other.tokens, self.offsets + other.offsets, self.contents
        )


def open_corpus(
    directory: Path, manifest: ShardManifest, split: str, verify: bool
) -> Corpus:
    """Opens the shards of a split; ConfigError for one that is missing, truncated or (with verify) altered."""
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    shards = manifest.shards[split]
    files = [
        file for shard in shards for file in shard.files(directory, dtype.itemsize)
    ]
    stamps = {path: _checked_stamp(path, size) for path, size, _ in files}
    if verify:
        # Hashing releases the interpreter's lock.
        with ThreadPoolExecutor() as pool:
            digests = pool.map(digest_of_file, stamps)
            altered = next(
                (
                    path
                    for (path, _, digest), now in zip(files, digests, strict=True)
                    if now != digest
                ),
                None,
            )
        if altered is not None:
            raise ConfigError(
                f"{altered} has been altered: its digest is not the manifest's; prepare the text again."
            )
    tokens = [
        TokenFile(path, dtype, shard.tokens, digest, stamps[path])
        for shard, (path, _, digest) in zip(shards, files[::2], strict=True)
    ]
    offsets = [np.memmap(path, "<u8", "r") for path, _, _ in files[1::2]]
    return Corpus(tokens, offsets, manifest.contents)


def digest_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file; Unreadable if it cannot be read now: that says nothing of what is in it."""

    def digest() -> str:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    try:
        return retried(digest)
    except OSError as error:
        refuse_passing(path, error)
        raise


def _checked_stamp(path: Path, expected: int) -> Stamp:
    try:
        stat = retried(path.stat)
    except FileNotFoundError:
        raise ConfigError(
            f"the shard {path} is missing, though the manifest beside it names it; prepare the text again."
        ) from None
    if stat.st_size != expected:
        what = "truncated" if stat.st_size < expected else "not what was prepared"
        raise ConfigError(
            f"the shard {path} has {stat.st_size} bytes instead of {expected}: it is {what}; prepare the text again."
        )
    return _stamp(stat)


@dataclass(frozen=True)
class Source:
    """An opened source: its splits (None: no document in it) and what its manifest says."""

    name: str
    manifest: ShardManifest
    train: Corpus | None
    validation: Corpus | None
    notes: tuple[str, ...] = ()  # on how its documents begin and end

    def digest(self, split: str) -> str:
        """Names the documents of train, validation or all."""
        return self.manifest.digest_of(*(SPLITS if split == "all" else (split,)))

    def corpus(self, split: str) -> Corpus | None:
        """The documents of train, validation or all."""
        if split == "all" and self.train is not None and self.validation is not None:
            return self.train + self.validation
        return {
            "train": self.train,
            "validation": self.validation,
            "all": self.train or self.validation,
        }[split]

    def describe(
        self, documents: int, shortened: Callable[[], tuple[int, int]], longest: int
    ) -> list[str]:
        """Returns notes on how much of conversations is learned and fits rows of `longest` tokens; none on text.

        `shortened` counts the documents that are cut off and those that are left out.
        """
        manifest = self.manifest
        if manifest.contents == "text":
            return []
        stored = sum(manifest.count(split, "tokens") for split in SPLITS)
        notes = [f"{manifest.counts[TOKENS] / stored:.0%} of the tokens are learned"]
        cut, left_out = shortened()
        if cut:
            notes.append(
                f"{cut:,} of {documents:,} examples end at token {longest}, where a row does"
            )
        if left_out:
            why = (
                "they are longer than a row"
                if manifest.contents == "pairs"
                else f"no answer begins in their first {longest} tokens"
            )
            notes.append(
                f"{left_out:,} of {documents:,} examples are left out, since {why}"
            )
        if special := manifest.counts[SPECIAL]:
            notes.append(
                f"{special:,} messages hold special tokens, which are read as such"
            )
        return notes + [
            f"{count:,} {what}"
            for what, count in manifest.counts.items()
            if what not in COUNTED
        ]


def open_shards(
    directory: Path,
    name: str,
    data: DataConfig,
    tokenizer: Tokenizer,
    opens: Callable[[Path, ShardManifest, str, bool], Corpus] = open_corpus,
) -> Source:
    """Opens shards that were prepared for a tokenizer and a validation share, and are still whole; ConfigError if
    not. `opens` opens those of a split.
    """
    if not (directory / MANIFEST).is_file() and (directory / RECIPE).is_file():
        raise ConfigError(
            f"the preparation of {name} was not finished; run the same `meshtrain data prepare` again."
        )
    manifest = read_manifest(directory)
    if manifest.tokenizer_digest != tokenizer.digest:
        raise ConfigError(
            f"the shards in {name} were made with the tokenizer {manifest.tokenizer} ({manifest.vocab_size} tokens), "
            "but data.tokenizer is "
            f"{data.tokenizer}; set data.tokenizer to "
            f"{'byte' if manifest.tokenizer == 'byte' else directory / 'tokenizer.json'}."
        )
    if manifest.contents != data.format:
        raise ConfigError(
            f"the shards in {name} hold {manifest.contents}, but data.format is {data.format}; set data.format to "
            f"{manifest.contents}."
        )
    if (
        data.template is not None
        and find_template(data.template, data.tokenizer).digest
        != manifest.template_digest
    ):
        raise ConfigError(
            f"the shards in {name} were made with another chat template than data.template "
            f"{short(data.template)}; leave the key out, or "
            "prepare them again."
        )
    if data.validation is not None and data.validation != manifest.validation_fraction:
        raise ConfigError(
            f"data.validation is {data.validation}, but the shards in {name} were prepared with "
            f"{manifest.validation_fraction}; "
            "leave the key out, or prepare them again."
        )
    train, validation = (
        opens(directory, manifest, split, data.verify)
        if manifest.shards[split]
        else None
        for split in SPLITS
    )
    return Source(
        name,
        manifest,
        train,
        validation,
        tuple(_boundary_notes(name, manifest, data, tokenizer)),
    )


def _boundary_notes(
    name: str, manifest: ShardManifest, data: DataConfig, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yields where documents begin or end otherwise than texts do when the model is used; ConfigError where a key asks
    for that.
    """
    marks = tokenizer.boundaries
    end = (manifest.end_of_document,)
    for key, stored, mark in (
        ("begin", manifest.begin, marks.begin),
        ("end", end, (marks.end,)),
    ):
        # a conversation begins and ends as its template has it
        if manifest.contents != "text" or stored == tuple(one.id for one in mark):
            continue
        there = _spelt(tokenizer, stored)
        wanted = " ".join(map(str, mark)) or "nothing"
        if getattr(data, key) is not None:
            raise ConfigError(
                f"data.{key} is {short(getattr(data, key))}, but the documents in {name} {key} with {there}; prepare "
                "them again, or leave the key out."
            )
        source = f" (of {mark[0].source})" if mark else ""
        legal = _spelt(tokenizer, stored, plain=True)
        yield (
            f"its documents {key} with {there}, but with {wanted}{source} when the model is used; prepare them again, "
            f"or set data.{key} to {legal}"
        )


def _spelt(tokenizer: Tokenizer, ids: Sequence[int], plain: bool = False) -> str:
    if not ids:
        return "none" if plain else "nothing"
    texts = [tokenizer.spell(np.array([number])) or f"id {number}" for number in ids]
    if plain:
        return texts[0]
    return " ".join(
        f"{text} ({number})" for text, number in zip(texts, ids, strict=True)
    )
