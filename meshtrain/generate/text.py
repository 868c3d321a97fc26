"""From tokens to text while they come: what is given out no later token changes.

A token may end within a character, whose other bytes the next ones bring, and how it is written may depend on the one before it (the
space that sentencepiece leaves out at the beginning of a text). So a token's text is what it adds to that of the tokens before it, held
back while it ends on half a character; and what may be the beginning of a stop string is held back until it is none.
"""

from collections.abc import Sequence

import numpy as np

from meshtrain.data.tokenizer import Tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character, or not yet
MOST_HALF = 3  # tokens that may wait for the rest of a character: one has four bytes at most
CONTEXT = 8  # tokens of a prompt before which nothing changes how the next is written


class Stream:
    """The text of the tokens that follow a prompt, as they come, up to the first of the stop strings."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(filter(None, stop))
        self._ids = [int(i) for i in prompt[-CONTEXT:]]
        # Of the ids: all before `_told` is given on, and what comes next is read behind those from `_from`.
        self._from, self._told = 0, len(self._ids)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False  # a stop string has come; nothing follows

    def push(self, token: int) -> str:
        """What can be given out now that this token has come."""
        if self.stopped:
            return ""
        self._ids.append(token)
        return self._given_out(self._new(final=False))

    def close(self) -> str:
        """What was held back, where no token follows."""
        if self.stopped:
            return ""
        rest = self._given_out(self._new(final=True)) + self._held
        self._held = ""
        return rest

    def _new(self, final: bool) -> str:
        """The text of the tokens that are not told yet, but for half a character at their end."""
        to = len(self._ids)
        known, whole = self._text(self._told), self._text(to)
        if whole.endswith(HALF) and not final:
            # Bytes that never become a character must not be waited for.
            to = max(self._told, to - MOST_HALF)
            whole = self._text(to)
        if to == self._told:
            return ""
        new = whole[len(known) :]
        if new:
            # Tokens that are not written (special ones, say) move nothing: the next is read behind what is.
            self._from = self._told
        self._told = to
        if self._from > 4 * CONTEXT:
            del self._ids[: self._from]
            self._from, self._told = 0, self._told - self._from
        return new

    def _text(self, to: int) -> str:
        return self._tokenizer.decode(np.array(self._ids[self._from : to], np.int64))

    def _given_out(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Spelling:
    """The text of single tokens, special ones too, as they stand within a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Behind another token a space at the beginning is one.
        self._before = [int(i) for i in tokenizer.encode(["a"])[0][-1:]]
        self._skipped = self._spelt(self._before)

    def of(self, token: int) -> str:
        """Half a character is U+FFFD."""
        if token not in self._known:
            whole = self._spelt([*self._before, token])
            self._known[token] = whole[len(self._skipped) :]
        return self._known[token]

    def _spelt(self, ids: list[int]) -> str:
        spell = getattr(self._tokenizer, "spell", self._tokenizer.decode)
        return spell(np.array(ids, np.int64))
