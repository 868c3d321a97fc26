"""manifest.json, which describes a directory of token shards, and the names of all that may lie beside it (shards.py,
prepare.py).
"""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from meshtrain.errors import ConfigError, refusal
from meshtrain.files import refuse_passing, retried

MANIFEST = "manifest.json"
RECIPE = "plan.json"
UNITS = "units"
FORMAT = 1
STORED = (".tokens", ".offsets")  # how the files of a shard end
SPLITS = ("train", "validation")
# The kind of documents, as in `data.format`.
Contents = Literal["text", "chat", "pairs"]
# The bits of a token of conversations: two marks, and its id.
LEARNED = np.uint32(1 << 31)
REJECTED = np.uint32(1 << 30)
ID = REJECTED - np.uint32(1)
PADDING = -1  # the first label of a stretch of zeros, see `token_rows`
# Counts of a preparation of conversations; a manifest has others of what a template leaves out, where there is any.
EXAMPLES, ANSWERS, TOKENS, APART, SPECIAL = COUNTED = (
    "examples",
    "learned answers",
    "learned tokens",
    "conversations of which each answer is an example",
    "messages that hold special tokens",
)
# Fields of a manifest of conversations alone
OF_CHATS = ("contents", "template_digest", "counts")


@dataclass(frozen=True)
class Shard:
    """A shard's entry in the manifest."""

    name: str
    documents: int
    tokens: int  # with the end-of-document token that it begins with
    tokens_digest: str
    offsets_digest: str

    def files(self, directory: Path, token_bytes: int) -> list[tuple[Path, int, str]]:
        """(path, size in bytes, digest) of its tokens and of its offsets, as they were written."""
        tokens = directory / f"{self.name}.tokens"
        offsets = directory / f"{self.name}.offsets"
        sizes = self.tokens * token_bytes, (self.documents + 1) * 8
        return [
            (tokens, sizes[0], self.tokens_digest),
            (offsets, sizes[1], self.offsets_digest),
        ]


@dataclass(frozen=True)
class ShardManifest:
    """The content of a directory of shards.

    A pure function of the input's content and the options, whatever prepared it.
    """

    tokenizer: str
    tokenizer_digest: str
    vocab_size: int
    end_of_document: int
    dtype: str
    validation_fraction: float
    shards: dict[str, tuple[Shard, ...]]  # by split
    skipped: dict[str, int]  # documents that were not taken, by reason
    format: int = FORMAT
    contents: Contents = "text"
    template_digest: str = ""
    # of conversations: by what is counted (examples.COUNTED)
    counts: dict[str, int] = field(default_factory=dict)
    begin: tuple[
        int, ...
        # What each document begins with; an older manifest does not say so, and has nothing
    ] = ()

    def count(self, split: str, what: str) -> int:
        return sum(getattr(shard, what) for shard in self.shards[split])

    @property
    def digest(self) -> str:
        """Names all that the manifest says."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def digest_of(self, *splits: str) -> str:
        """Names what these splits hold and nothing else: equal digests, equal documents in the same order."""
        shards = [
            (s.tokens_digest, s.offsets_digest)
            for split in splits
            for s in self.shards[split]
        ]
        return hashlib.sha256(
            json.dumps([self.tokenizer_digest, self.dtype, shards]).encode()
        ).hexdigest()

    def to_json(self) -> str:
        values = asdict(self)
        if self.contents == "text":
            values = {
                name: value for name, value in values.items() if name not in OF_CHATS
            }
        if not self.begin:
            del values["begin"]
        return json.dumps(values, indent=1) + "\n"


def is_preparation(directory: Path) -> bool:
    """Returns whether shards have been prepared there, finished and whole or not; a manifest.json or plan.json alone
    may be anybody's.
    """
    if (directory / RECIPE).is_file() and (directory / UNITS).is_dir():
        return True
    path = directory / MANIFEST
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return b'"tokenizer_digest"' in stream.read(4096) or any(
            directory.glob("*.tokens")
        )


def are_prepared(names: Collection[str]) -> bool:
    """Returns whether names of objects are those of prepared shards, finished or not."""
    return (MANIFEST in names or RECIPE in names) and any(
        name.endswith(STORED) for name in names
    )


def read_manifest(directory: Path) -> ShardManifest:
    """Reads the manifest of a directory of shards; ConfigError if it is none of ours."""
    path = directory / MANIFEST
    try:
        if not retried(path.is_file):
            raise ConfigError(
                f"{directory} holds no prepared shards: there is no {MANIFEST} in it."
            )
        values: dict[str, Any] = json.loads(retried(path.read_bytes))
        if values["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {values['format']}; this version reads {FORMAT}: prepare the text again."
            )
        shards = {
            split: tuple(Shard(**shard) for shard in values["shards"][split])
            for split in SPLITS
        }
        manifest = ShardManifest(
            **{**values, "shards": shards, "begin": tuple(values.get("begin", ()))}
        )
        if manifest.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {manifest.dtype!r}")
        if manifest.contents not in get_args(Contents):
            raise ValueError(f"contents is {manifest.contents!r}")
        if not all(
            type(number) is int
            for number in (manifest.end_of_document, *manifest.begin)
        ):
            raise ValueError(
                f"begin is {manifest.begin!r}, end_of_document {manifest.end_of_document!r}"
            )
        for shard in (*shards["train"], *shards["validation"]):
            if not re.fullmatch(r"[\w-]+", shard.name):
                raise ValueError("a shard's name is a path")
            if {type(shard.tokens), type(shard.documents)} != {int}:
                raise ValueError("a count of a shard is not a whole number")
        return manifest
    except ConfigError:
        raise
    except OSError as error:
        refuse_passing(path, error)
        raise ConfigError(f"{path} cannot be read: {refusal(error)}.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not the manifest of prepared shards ({str(error)[:200]})."
        ) from None
