"""Token shards on disk, and the corpus that they make together.

    DIR/manifest.json            counts, digests, tokenizer; plan.json and units/ beside it: how they came about (prepare.py)
    DIR/train-00000.tokens       uint16 or uint32, little-endian:   E d d d E d d d d d E d d E
    DIR/train-00000.offsets      uint64, little-endian:               1       5           11  14
    DIR/validation-00000.tokens  ...                                  first label of each document, and the end

E is the end-of-document token, d a document's own. A shard begins with an E, so that every document is predicted from the E
before it and ends with the E that it predicts: each stored token but the first is a label exactly once.

Of conversations (`answers`) the E only stand between: the first token of one is predicted from nothing, and nothing comes after its last.
Their tokens are uint32, and say in their highest bits whether they are learned (LEARNED), and in the second half of a pair that they
are (REJECTED):

    E d d D D E ...      D: learned        a pair:   E c c C C r r R R R E ...
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshtrain.data.manifest import Contents, Manifest, Shard
from meshtrain.errors import ConfigError, refusal
from meshtrain.files import temporary_beside, write_atomically

PADDING = -1  # the first label of a stretch of zeros
LEARNED, REJECTED = np.uint32(1 << 31), np.uint32(1 << 30)
ID = REJECTED - np.uint32(1)  # the bits of a token that are its id
MOST_OPEN = 256  # files at a time; a process may have 1,024


class ShardWriter:
    """Writes one shard: appended to, digested on the way, renamed when whole."""

    def __init__(self, directory: Path, name: str, end_of_document: int, dtype: np.dtype) -> None:
        self.name, self.dtype, self.end = name, dtype, np.array([end_of_document], dtype)
        self.path = directory / f"{name}.tokens"
        self.temporary = temporary_beside(self.path)
        self.digest, self.tokens = hashlib.sha256(), 1
        self.offsets = [1]
        self.waiting = [self.end]

    def add(self, ids: np.ndarray) -> None:
        """More of the document."""
        self.waiting.append(ids)
        self.tokens += len(ids)

    def end_document(self) -> None:
        self.add(self.end)
        self.offsets.append(self.tokens)

    def flush(self) -> None:
        """Writes what has been added; the file comes into being with the first."""
        if self.tokens > 1 and self.waiting:
            tokens = np.concatenate(self.waiting, dtype=self.dtype, casting="unsafe")
            with open(self.temporary, "ab") as stream:
                stream.write(tokens.data)
            self.digest.update(tokens.data)
            self.waiting = []

    def close(self) -> Shard | None:
        """The finished shard; None, and no file, if it has no document."""
        self.flush()
        if self.tokens == 1:
            return None
        offsets = np.array(self.offsets, "<u8").tobytes()
        with open(self.temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(self.temporary, self.path)
        write_atomically(self.path.with_suffix(".offsets"), offsets)
        digests = self.digest.hexdigest(), hashlib.sha256(offsets).hexdigest()
        return Shard(self.name, len(self.offsets) - 1, self.tokens, *digests)

    def discard(self) -> None:
        """Gives the room of an unfinished shard back; of a finished one nothing is left to give."""
        self.temporary.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of one shard, read by position.

    The file can be memory-mapped as it is, but the kernel maps far more around a row than is read: random rows of a 2 GB mapping soon
    count as 2 GB of resident memory, and giving it back costs more than was saved (a row of 1,024: 1.8 us mapped, 6.1 us mapped and
    given back, 3.7 us by position; experiments/bench_data.py, reading). And a mapped file that is cut short meanwhile kills the process.
    """

    path: Path
    dtype: np.dtype
    count: int


class _Descriptor:
    """An open file, closed with the last reference to it: not while it is read, whatever another thread opens meanwhile."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def read(self, size: int, at: int) -> bytes:
        """`size` bytes from `at` on, or fewer at the end of the file."""
        return os.pread(self.number, size, at)

    def __del__(self) -> None:
        os.close(self.number)


@lru_cache(maxsize=MOST_OPEN)
def descriptor(file: TokenFile) -> _Descriptor:
    """Opened when first read; of many files, the least recently used are closed."""
    return _Descriptor(file.path)


class Corpus:
    """The documents of one split: one stream of labels numbered from 0, over all shards.

    offsets: of each shard, memory-mapped; needed only to find documents.
    contents: text, chat or pairs; the documents of the last two are read as `stretches` says, and never cut.
    """

    def __init__(self, tokens: Sequence[TokenFile], offsets: Sequence[np.ndarray], contents: Contents = "text") -> None:
        self.tokens, self.offsets, self.dtype, self.contents = list(tokens), list(offsets), tokens[0].dtype, contents
        # The number of each shard's first label, and the count of labels: int64.
        self.starts = np.cumsum([0, *(shard.count - 1 for shard in tokens)])

    @property
    def labels(self) -> int:
        """Tokens that can be predicted: all documents with their ends."""
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return sum(len(offsets) - 1 for offsets in self.offsets)

    def cut(self, first: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stretches of labels cut at the borders of shards: how many each becomes; first label and length of each of those."""
        ends = first + lengths
        shards = np.searchsorted(self.starts, first, side="right") - 1
        counts = np.searchsorted(self.starts, ends - 1, side="right") - shards
        # The shard of each: the one its stretch begins in, and as many further as come before it.
        shards = np.arange(counts.sum()) + np.repeat(shards - (np.cumsum(counts) - counts), counts)
        begins = np.maximum(np.repeat(first, counts), self.starts[shards])
        return counts, begins, np.minimum(np.repeat(ends, counts), self.starts[shards + 1]) - begins

    def read(self, first: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, labels) of stretches, one behind another: labels first .. first + length of each, and the token before each label.

        No stretch reaches over the border of a shard; one that begins at PADDING is zeros.
        """
        shards = np.searchsorted(self.starts, first, side="right") - 1
        places = first - self.starts[shards]  # in the shard, of the token before the first label
        width = self.dtype.itemsize
        wanted = list(zip(shards.tolist(), (places * width).tolist(), ((lengths + 1) * width).tolist(), strict=True))
        found = [
            descriptor(self.tokens[shard]).read(size, at) if shard >= 0 else bytes(size) for shard, at, size in wanted
        ]
        tokens, labels = b"".join([data[:-width] for data in found]), b"".join([data[width:] for data in found])
        if len(tokens) != width * lengths.sum():
            short = next(shard for (shard, _, size), data in zip(wanted, found, strict=True) if len(data) < size)
            raise OSError(f"the shard {self.tokens[short].path} was cut short while it was being read")
        return np.frombuffer(tokens, self.dtype), np.frombuffer(labels, self.dtype)

    def __add__(self, other: "Corpus") -> "Corpus":
        """The documents of both."""
        return Corpus(self.tokens + other.tokens, self.offsets + other.offsets, self.contents)


def open_corpus(directory: Path, manifest: Manifest, split: str, verify: bool) -> Corpus:
    """Opens the shards of a split; ConfigError for one that is missing, truncated or (with verify) altered."""
    dtype, shards = np.dtype(manifest.dtype).newbyteorder("<"), manifest.shards[split]
    files = [file for shard in shards for file in shard.files(directory, dtype.itemsize)]
    for path, size, _ in files:
        _check_size(path, size)
    if verify:
        # Hashing releases the interpreter's lock.
        with ThreadPoolExecutor() as pool:
            found = pool.map(_readable_digest, [path for path, _, _ in files])
            for (path, _, digest), now in zip(files, found, strict=True):
                if now != digest:
                    raise ConfigError(
                        f"{path} has been altered: its digest is not the manifest's; prepare the text again."
                    )
    return Corpus(
        [TokenFile(directory / f"{shard.name}.tokens", dtype, shard.tokens) for shard in shards],
        [np.memmap(directory / f"{shard.name}.offsets", "<u8", "r") for shard in shards],
        manifest.contents,
    )


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _readable_digest(path: Path) -> str:
    try:
        return digest_of_file(path)
    except OSError as error:
        raise ConfigError(f"the shard {path} cannot be read: {refusal(error)}.") from None


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ConfigError(
            f"the shard {path} is missing, though the manifest beside it names it; prepare the text again."
        ) from None
    except OSError as error:
        raise ConfigError(f"the shard {path} cannot be read: {refusal(error)}.") from None
    if size != expected:
        raise ConfigError(
            f"the shard {path} has {size} bytes instead of {expected}: it is "
            f"{'truncated' if size < expected else 'not what was prepared'}; prepare the text again."
        )
