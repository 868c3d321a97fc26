"""A Hugging Face tokenizer.json, through the `tokenizers` library: read, and trained."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.data.tokenizer import Spans
from meshtrain.errors import ConfigError, not_installed, refusal, short
from meshtrain.files import refuse_passing, retried, write_atomically

# What others call the end of a document.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
LEAST_VOCABULARY = 257  # of a byte-level BPE: the bytes and the end of document
MOST_VOCABULARY = 1 << 24  # the tokenizers library sets room aside for all of it


class FileTokenizer:
    """The tokenizer of a tokenizer.json. If it has no token of END_TOKENS, the end of document is one id more than it has.

    chat: special tokens that stand in a text are read as such, as in what a chat template makes.
    """

    def __init__(self, path: Path, chat: bool = False) -> None:
        library = _library()
        try:
            data = retried(path.read_bytes)
        except OSError as error:
            refuse_passing(path, error)
            raise ConfigError(f"the tokenizer {path} cannot be read: {refusal(error)}.") from None
        try:
            self._tokenizer = library.Tokenizer.from_str(data.decode())
        # The library raises nothing more specific.
        except Exception as error:
            raise ConfigError(
                f"{path} is not a tokenizer.json that the tokenizers library can read ({short(str(error))})."
            ) from None
        # A file may come with either switched on.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that quotes <|endoftext|> does not end there.
        self._tokenizer.encode_special_tokens = not chat
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special and token.content)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps.
        size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = next((vocabulary[token] for token in END_TOKENS if token in vocabulary), size)
        self.vocab_size = max(size, self.end_of_document + 1)
        self.name = f"{type(self._tokenizer.model).__name__}-{self.vocab_size}"
        self.digest = hashlib.sha256(data).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[tuple[np.ndarray, np.ndarray]]:
        outputs = []
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding, marked in zip(encodings, spans, strict=True):
            learned = np.zeros(len(encoding), bool)
            for begin, end in marked:
                learned[_tokens(encoding, begin, end)] = True
            outputs.append((np.array(encoding.ids, np.uint32), learned))
        return outputs

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i != self.end_of_document])

    def spell(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """The ids that its own post-processor puts before a text, such as BOS."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))


def _tokens(encoding: Any, begin: int, end: int) -> slice:
    """The tokens of the characters [begin, end), those between them that have no character among them.

    A character may have several tokens, all of which count (of the last one transformers' mask has the first alone), and some (white
    space, to some tokenizers) none. By asking for each border: all offsets as Python's numbers would take as long as tokenizing.
    """
    tokens = (encoding.char_to_token(at) for at in range(begin, end))
    first = next((token for token in tokens if token is not None), None)
    if first is None:
        return slice(0, 0)
    last = next(token for at in range(end - 1, begin - 1, -1) if (token := encoding.char_to_token(at)) is not None)
    while last + 1 < len(encoding) and (encoding.token_to_chars(last + 1) or (end, end))[0] < end:
        last += 1
    return slice(first, last + 1)


def train_bpe(texts: Iterable[str], vocab_size: int, output: Path) -> None:
    """Trains a byte-level BPE of `vocab_size` ids, the end of document among them, and writes it as a tokenizer.json."""
    if not LEAST_VOCABULARY <= vocab_size <= MOST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size is {vocab_size}; it must be from {LEAST_VOCABULARY}, the bytes and the end of document, to {MOST_VOCABULARY}."
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
    write_atomically(Path(os.path.realpath(output)), tokenizer.to_str(pretty=True).encode())


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.models
    except ImportError:
        raise not_installed("a tokenizer.json needs the tokenizers library", "tokenizers") from None
    return tokenizers
