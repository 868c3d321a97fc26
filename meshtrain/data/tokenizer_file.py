"""A Hugging Face tokenizer.json, through the `tokenizers` library: read, and trained."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.data.boundaries import END_TOKENS, Spans, read_boundaries
from meshtrain.errors import ConfigError, not_installed, refusal, short
from meshtrain.files import refuse_passing, retried, write_atomically

# What the library raises where its own code fails; it derives from BaseException alone.
PANIC = "PanicException"
ENCODING = "cannot make tokens of a text"
DECODING = "cannot make a text of tokens"
LEAST_VOCABULARY = 257  # of a byte-level BPE: the bytes and the end of document
MOST_VOCABULARY = 1 << 24  # the tokenizers library sets room aside for all of it


class FileTokenizer:
    """The tokenizer of a tokenizer.json; how texts begin and end is as it and the files beside it say
    (`meshtrain.data.boundaries`).

    chat: special tokens that stand in a text are read as such, as in what a chat template makes. begin, end: data.begin
    and data.end.
    """

    def __init__(
        self,
        path: Path,
        chat: bool = False,
        begin: str | None = None,
        end: str | None = None,
    ) -> None:
        library = _library()
        self._path = path
        try:
            data = retried(path.read_bytes)
        except OSError as error:
            refuse_passing(path, error)
            raise ConfigError(
                f"the tokenizer {path} cannot be read: {refusal(error)}."
            ) from None
        with self._said("is not a tokenizer.json that the tokenizers library can read"):
            self._tokenizer = library.Tokenizer.from_str(data.decode())
        # A file may come with either switched on.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that quotes <|endoftext|> does not end there.
        self._tokenizer.encode_special_tokens = not chat
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(
            token.content for token in added if token.special and token.content
        )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps.
        size = max(vocabulary.values(), default=-1) + 1
        with self._said("has a post-processor that the tokenizers library cannot run"):
            self.boundaries = read_boundaries(path, self._tokenizer, size, begin, end)
        # what versions that read no file beside it took for the end
        self.usual_end = next(
            (vocabulary[token] for token in END_TOKENS if token in vocabulary), size
        )
        self.begin = tuple(mark.id for mark in self.boundaries.begin)
        self.end_of_document = self.boundaries.end.id
        self.vocab_size = max(size, self.end_of_document + 1)
        self.name = f"{type(self._tokenizer.model).__name__}-{self.vocab_size}"
        self.digest = hashlib.sha256(data).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._said(ENCODING):
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        outputs = []
        with self._said(ENCODING):
            encodings = self._tokenizer.encode_batch(
                list(texts), add_special_tokens=False
            )
        for encoding, marked in zip(encodings, spans, strict=True):
            learned = np.zeros(len(encoding), bool)
            for begin, end in marked:
                learned[_tokens(encoding, begin, end)] = True
            outputs.append((np.array(encoding.ids, np.uint32), learned))
        return outputs

    def decode(self, ids: np.ndarray) -> str:
        with self._said(DECODING):
            return self._tokenizer.decode(
                [int(i) for i in ids if i != self.end_of_document]
            )

    def spell(self, ids: np.ndarray) -> str:
        with self._said(DECODING):
            return self._tokenizer.decode(
                [int(i) for i in ids], skip_special_tokens=False
            )

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """Turns what the library raises into a sentence: nothing more specific than Exception, and of a panic in Rust
        not even that.
        """
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise ConfigError(
                f"{self._path} {what} ({short(str(error))}); mend the file, or give another."
            ) from None


def _tokens(encoding: Any, begin: int, end: int) -> slice:
    """The tokens of the characters [begin, end), those between them that have no character among them.

    A character may have several tokens, all of which count (of the last one transformers' mask has the first alone),
    and some (white space, to some tokenizers) none. By asking for each border: all offsets as Python's numbers would
    take as long as tokenizing.
    """
    tokens = (encoding.char_to_token(at) for at in range(begin, end))
    first = next((token for token in tokens if token is not None), None)
    if first is None:
        return slice(0, 0)
    last = next(
        token
        for at in range(end - 1, begin - 1, -1)
        if (token := encoding.char_to_token(at)) is not None
    )
    while (
        last + 1 < len(encoding)
        and (encoding.token_to_chars(last + 1) or (end, end))[0] < end
    ):
        last += 1
    return slice(first, last + 1)


def train_bpe(texts: Iterable[str], vocab_size: int, output: Path) -> None:
    """Trains a byte-level BPE of `vocab_size` ids, the end of document among them, and writes it as a
    tokenizer.json.
    """
    if not LEAST_VOCABULARY <= vocab_size <= MOST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size is {vocab_size}; it must be from {LEAST_VOCABULARY}, the bytes and the end of document, to "
            f"{MOST_VOCABULARY}."
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        Path(os.path.realpath(output)), tokenizer.to_str(pretty=True).encode()
    )


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.models
    except ImportError:
        raise not_installed(
            "a tokenizer.json needs the tokenizers library", "tokenizers"
        ) from None
    return tokenizers
