"""From text to token ids: bytes, or any Hugging Face tokenizer.json (`meshtrain.data.tokenizer_file`)."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshtrain.errors import ConfigError, nearest, short

if TYPE_CHECKING:
    from meshtrain.data.boundaries import Boundaries, Spans


class Tokenizer(Protocol):
    """Text to ids below `vocab_size`; `end_of_document` stands after every document; `digest` names the mapping."""

    name: str
    vocab_size: int
    end_of_document: int
    digest: str
    special: tuple[str, ...]  # special tokens, as they are spelled
    # what stands before every document, and before a prompt that no template makes
    begin: tuple[int, ...]
    usual_end: int  # `end_of_document` as versions before data.end took it

    @property
    def boundaries(self) -> "Boundaries":
        """Returns how texts begin and end, and where that is said."""
        ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without `end_of_document`."""
        ...

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence["Spans"]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, whether a token has a character of the spans) of each text that a chat template makes."""
        ...

    def decode(self, ids: np.ndarray) -> str: ...

    def spell(self, ids: np.ndarray) -> str:
        """Returns the text of the ids, special tokens too."""
        ...


class ByteTokenizer:
    """The bytes of the text in UTF-8: 256 ids, and 256 as end of document."""

    name = "byte"
    vocab_size = 257
    end_of_document = 256
    digest = hashlib.sha256(
        b"meshtrain byte tokenizer, end of document 256"
    ).hexdigest()
    special: tuple[str, ...] = ()
    begin: tuple[int, ...] = ()
    usual_end = end_of_document

    @property
    def boundaries(self) -> "Boundaries":
        return _byte_boundaries()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence["Spans"]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        outputs = []
        for text, marked in zip(texts, spans, strict=True):
            learned = np.zeros(len(text), bool)
            for begin, end in marked:
                learned[begin:end] = True
            widths = np.array([len(character.encode()) for character in text], np.int64)
            outputs.append(
                (np.frombuffer(text.encode(), np.uint8), np.repeat(learned, widths))
            )
        return outputs

    def decode(self, ids: np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")

    spell = decode


def load_tokenizer(
    name: str, chat: bool = False, begin: str | None = None, end: str | None = None
) -> Tokenizer:
    """`byte`, or the tokenizer of a tokenizer.json file, to read text or what a chat template makes; ConfigError if it
    is neither.

    begin, end: data.begin and data.end.
    """
    if name == "byte":
        if begin is not None or end is not None:
            _byte_boundaries(begin, end)
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path) and os.path.isfile(path / "tokenizer.json"):
        raise ConfigError(
            f"the tokenizer {name} is a directory; name the file in it: {path / 'tokenizer.json'}."
        )
    if not os.path.isfile(path):
        near = nearest(name, ["byte"]) or "."
        raise ConfigError(
            f"there is no tokenizer file {short(name)}; give byte or a tokenizer.json file{near}"
        )
    from meshtrain.data.tokenizer_file import FileTokenizer

    return FileTokenizer(path, chat, begin, end)


def _byte_boundaries(begin: str | None = None, end: str | None = None) -> "Boundaries":
    from meshtrain.data.boundaries import byte_boundaries

    return byte_boundaries(begin, end)


def use_one_thread() -> None:
    """Keeps the tokenizers library to the calling thread, where several processes tokenize at once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
