"""From what is asked to tokens: a text as the tokenizer begins texts, a conversation as the model's own template writes it."""

import threading
from typing import Any

import numpy as np

from meshtrain.data.chat import Unfit, messages_of
from meshtrain.data.template import ChatTemplate, TemplateText
from meshtrain.data.tokenizer import ChatTokenizer, FileTokenizer
from meshtrain.errors import ConfigError


def of_text(tokenizer: ChatTokenizer, text: str) -> np.ndarray:
    """The tokens of a text that is to be gone on with, int32 [T], behind what the tokenizer's own post-processor puts before a text (BOS).

    Never empty: nothing at all is what follows the end of a document.
    """
    ids = tokenizer.encode([text])[0]
    begun = tokenizer.begin if isinstance(tokenizer, FileTokenizer) else ()
    found = np.concatenate([np.array(begun, np.int64), ids.astype(np.int64)])
    return (found if len(found) else np.array([tokenizer.end_of_document])).astype(np.int32)


class Conversations:
    """Writes conversations with one template, for many threads; its process is started anew if a conversation was too much for it."""

    def __init__(self, found: TemplateText, tokenizer: ChatTokenizer, now: float) -> None:
        """`tokenizer`: one that reads special tokens in a text as such; `now`: the time that the template is told."""
        self.found, self._tokenizer, self._now = found, tokenizer, now
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = ChatTemplate(found, now)

    def text(self, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = True) -> str:
        """What the template makes of a list of messages, with `prompt` up to the beginning of an answer.

        ConfigError for messages that it does not take, and for what it may not do.
        """
        with self._lock:
            if self._template is None:
                self._template = ChatTemplate(self.found, self._now)
            try:
                texts, _ = self._template.render(
                    messages_of(messages, "messages"), tools, [(len(messages), prompt)], ""
                )
            except Unfit as error:
                raise ConfigError(
                    f"the chat template {self.found.name} does not take these messages {error.detail}."
                ) from None
            except ConfigError:
                self._template = None
                raise
        return texts[0]

    def tokens(self, messages: list[dict[str, Any]], tools: Any = None) -> np.ndarray:
        """The prompt that asks for an answer to messages, int32 [T]; the template writes BOS itself, so that none is put before it."""
        found = self._tokenizer.encode([self.text(messages, tools)])[0]
        return found.astype(np.int32)

    def end_of_turn(self) -> int | None:
        """The special token behind an answer, by which a model says that it has ended; None if the template writes none there."""
        said = "Yes"
        messages = [{"role": "user", "content": "Are you there?"}, {"role": "assistant", "content": said}]
        try:
            _, mark, behind = self.text(messages, prompt=False).rpartition(said)
        except ConfigError:
            return None
        special = [
            (at, -len(word), word) for word in self._tokenizer.special if mark and (at := behind.find(word)) >= 0
        ]
        if not special:
            return None
        ids = self._tokenizer.encode([min(special)[2]])[0]
        return int(ids[0]) if len(ids) == 1 else None

    def close(self) -> None:
        with self._lock:
            if self._template is not None:
                self._template.close()
                self._template = None
