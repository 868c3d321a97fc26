"""The words that `data.source` takes beside a path: each kind of source is one entry, and nobody asks for one by its
name.

    stdlib      the Python files of the standard library: documents
    synthetic   random tokens or images from the seed, for benchmarks: rows, of which no document is made
    digits      scikit-learn's images of digits

A kind from outside: `SOURCES.register(SourceKind("mine", documents=function))` before the config is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshtrain.registry import Registry, late

DATASET = "hf:"  # begins the name of a dataset of Hugging Face's
MIXTURE = "mixture"  # data.source where data.mixture names the sources


@dataclass(frozen=True)
class SourceKind:
    """A word, and which functions open what it names.

    documents: (data: DataConfig, tokenizer: Tokenizer) -> `data.shards.Source`; they can be batched in every way, mixed
    and held out.
    rows: (config: Config, split: str) -> `data.batches.EpochRows`; they are drawn: nothing is read, so nothing has a
    digest.
    images: (config: Config) -> `data.images.image_sources.ImageSource`, for a family of images.
    """

    name: str
    documents: Callable[..., Any] | None = None
    rows: Callable[..., Any] | None = None
    images: Callable[..., Any] | None = None
    of_python: bool = False  # another version of Python has other content


def is_dataset(source: str) -> bool:
    """Returns whether a source is hf:NAME[:SPLIT[:COLUMN]], and no address of a store (hf://)."""
    return source.startswith(DATASET) and not source.startswith(f"{DATASET}//")


def has_documents(source: str) -> bool:
    """Returns whether a `data.source` or an entry of `data.mixture` is made of documents, as every path is."""
    return source not in SOURCES or SOURCES[source].documents is not None


def has_text(source: str) -> bool:
    """Returns whether a `data.source` may be text: documents, or rows of tokens."""
    return has_documents(source) or SOURCES[source].rows is not None


def has_images(source: str) -> bool:
    """Returns whether a `data.source` may be images: a path is found out about when it is opened."""
    return source not in SOURCES or SOURCES[source].images is not None


SOURCES = Registry(
    SourceKind(
        "stdlib", documents=late("meshtrain.data.cache:open_stdlib"), of_python=True
    ),
    SourceKind(
        "synthetic",
        rows=late("meshtrain.data.token_rows:SyntheticRows"),
        images=late("meshtrain.data.images.image_sources:synthetic_images"),
    ),
    SourceKind(
        "digits", images=late("meshtrain.data.images.image_sources:open_digits")
    ),
)
