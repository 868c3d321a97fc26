"""From what is asked to tokens, and from tokens to text while they come.

A text becomes tokens as its tokenizer begins texts, a conversation as the model's own template writes it.

No later token changes a text that was given out. A token may end within a character, whose other bytes the next ones
bring. Its spelling may depend on the token before it: sentencepiece leaves out a space at the beginning of a text. So a
token's text is what it adds to that of the tokens before it, held back while it ends on half a character; and what
may be the beginning of a stop string is held back until it is none.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshtrain.data.boundaries import end_of_turn
from meshtrain.data.messages import Unfit, messages_of
from meshtrain.data.template import ChatTemplate, TemplateText
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError

HALF = (
    # What a decoder writes for bytes that are no character, or not yet
    "\N{REPLACEMENT CHARACTER}"
)
# Tokens that may wait for the rest of a character: one has four bytes at most
MOST_HALF = 3
CONTEXT = 8  # tokens of a prompt before which nothing changes how the next is written
# Characters for each token that there is room for: a longer text is judged by its beginning first
GLANCE = 16
# Tokens by which the beginning of a text may have more than the whole, since it ends within one
TORN = 64


class Stream:
    """The text of the tokens that follow a prompt, as they come, up to the first of the stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] | np.ndarray = (),
        stop: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(filter(None, stop))
        self._ids = [int(i) for i in prompt[-CONTEXT:]]
        # Of the ids: all before `_told` is given on, and what comes next is read behind those from `_from`.
        self._from, self._told = 0, len(self._ids)
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False  # a stop string has come; nothing follows

    def push(self, token: int) -> str:
        """Returns what can be given out now that this token has come."""
        if self.stopped:
            return ""
        self._ids.append(token)
        return self._given_out(self._new(final=False))

    def close(self) -> str:
        """Returns what was held back, where no token follows."""
        if self.stopped:
            return ""
        rest = self._given_out(self._new(final=True)) + self._held
        self._held = ""
        return rest

    def _new(self, final: bool) -> str:
        to = len(self._ids)
        known = self._text(self._told)
        whole = self._text(to)
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
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        longest = len(text) + 1
        begun = (
            n
            for stop in self._stop
            for n in range(1, min(len(stop), longest))
            if text.endswith(stop[:n])
        )
        keep = max(begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class Spelling:
    """The text of single tokens, special ones too, as they stand within a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Behind another token a space at the beginning is one.
        self._before = [int(i) for i in tokenizer.encode(["a"])[0][-1:]]
        self._skipped = self._spelt(self._before)

    def spell(self, token: int) -> str:
        """Returns the text of one token; half a character is U+FFFD."""
        if token not in self._known:
            self._known[token] = self._spelt([*self._before, token])[
                len(self._skipped) :
            ]
        return self._known[token]

    def _spelt(self, ids: list[int]) -> str:
        spell = getattr(self.tokenizer, "spell", self.tokenizer.decode)
        return spell(np.array(ids, np.int64))


def encoded(tokenizer: Tokenizer, text: str, most: int | None) -> np.ndarray:
    """Returns the ids of a text; if it has far more than `most`, those of a beginning that has more than twice as many.

    Tokenizing all of it would keep others waiting. Characters tell nothing: a token may have any number of them, and
    some have none.
    """
    size = GLANCE * max(most or 0, TORN)
    while most is not None and size < len(text):
        ids = tokenizer.encode([text[:size]])[0]
        if len(ids) > 2 * most + TORN:
            return ids
        size *= 4
    return tokenizer.encode([text])[0]


def text_tokens(tokenizer: Tokenizer, text: str, most: int | None = None) -> np.ndarray:
    """Returns the tokens of a text to go on with, int32 [T], behind what documents begin with (BOS).

    Never empty: nothing at all is what follows the end of a document. `most`: as `encoded` has it.
    """
    ids = encoded(tokenizer, text, most)
    tokens = np.concatenate([np.array(tokenizer.begin, np.int64), ids.astype(np.int64)])
    return (tokens if len(tokens) else np.array([tokenizer.end_of_document])).astype(
        np.int32
    )


def describe_length(tokens: int, most: int) -> str:
    """Returns how many tokens a prompt has; where it has far more than `most`, not all of it was tokenized."""
    return f"{'at least ' if tokens > 2 * most else ''}{tokens}"


class Conversations:
    """Writes conversations with one template, for many threads."""

    def __init__(self, source: TemplateText, tokenizer: Tokenizer, now: float) -> None:
        """`tokenizer`: one that reads special tokens in a text as such; `now`: the time that the template is told."""
        self.source = source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._template = ChatTemplate(source, now)

    @property
    def reads_tools(self) -> bool:
        """Returns whether the template of conversations with tools reads them."""
        return "tools" in self._template.compiled(True).variables

    def text(
        self, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = True
    ) -> str:
        """Returns what the template makes of a list of messages, with `prompt` up to the beginning of an answer.

        ConfigError for messages that it does not take, and for what it may not do.
        """
        try:
            with self._lock:
                checked = messages_of(messages, "messages")
                return self._template.render(
                    checked, tools, [(len(messages), prompt)], ""
                )[0][0]
        except Unfit as error:
            name = self.source.name
            raise ConfigError(
                f"the chat template {name} does not take these messages {error.detail}."
            ) from None

    def tokens(
        self, messages: list[dict[str, Any]], tools: Any = None, most: int | None = None
    ) -> np.ndarray:
        """Returns the prompt that asks for an answer to messages, int32 [T]; the template writes BOS itself, so none is
        put before it.

        `most`: as `encoded` has it.
        """
        return encoded(self._tokenizer, self.text(messages, tools), most).astype(
            np.int32
        )

    def end_of_turn(self) -> int | None:
        """Returns the special token behind an answer, by which a model says that it has ended; None if the template
        writes none there.
        """
        turn = end_of_turn(
            lambda messages: self.text(messages, prompt=False), self._tokenizer
        )
        return None if turn is None else turn.id
