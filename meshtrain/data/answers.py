"""From the record of a conversation to the tokens of an example, each learned or not.

Learned are the answers, with the token that ends each, and nothing else. Where they stand in the text that the template makes is told by
the template, if it marks them with {% generation %}; else by what it adds (prefix differencing): an answer is what
stands in the text up to it, and not yet in the text before it that ends with the beginning of an answer:

    before    <user>2+2?<end> <assistant>
    up to     <user>2+2?<end> <assistant>4<end>
    whole     <user>2+2?<end> <assistant>4<end> <user>3+3?<end> <assistant>6<end>
                                         ------                            ------    learned

A template may write the same answer differently later on, without its thoughts, say: then the text up to it does not begin the whole, and
each answer becomes an example of its own, learned as the model would have to say it. What an answer is followed by in white space, behind
a mark of its end, is not learned: nobody waits for it.

A special token's text in the content of a message is that special token, as it is when `transformers` applies the template, in training
and in use; messages that hold one are counted, since they can forge the end of a turn.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.data.chat import Conversation, Unfit, conversation, pair
from meshtrain.data.documents import Document
from meshtrain.data.manifest import Contents
from meshtrain.data.shards import ID, LEARNED, REJECTED
from meshtrain.data.template import ChatTemplate
from meshtrain.data.tokenizer import ByteTokenizer, FileTokenizer, Spans
from meshtrain.errors import ConfigError, short

# What is counted of the conversations of a preparation.
EXAMPLES, ANSWERS, TOKENS, APART, SPECIAL = COUNTED = (
    "examples", "learned answers", "learned tokens", "conversations of which each answer is an example", "messages that hold special tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """What the template makes of a conversation, and the characters [begin, end) of it that are learned."""

    text: str
    learned: Spans


# Of a chat one text, of a pair the chosen and the rejected.
Example = tuple[Text, ...]


class Examples:
    """Makes examples of records, with one template and one tokenizer, and counts what is in them."""

    def __init__(self, contents: Contents, template: ChatTemplate, tokenizer: ByteTokenizer | FileTokenizer) -> None:
        if tokenizer.vocab_size > ID + 1:
            raise ConfigError(
                f"the tokenizer {tokenizer.name} has ids of more than 30 bits, too many for conversations."
            )
        self.contents, self.template, self.tokenizer = contents, template, tokenizer
        # The longest first, of which others are the beginning.
        special = sorted(tokenizer.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def of(self, document: Document, counts: Counter[str]) -> list[Example]:
        """The examples of a record; Unfit if it is none. ConfigError for what the template does."""
        sides: tuple[Conversation, ...]
        if self.contents == "pairs":
            sides = pair(document.record)
            found: list[Example] = [tuple(self._whole(side, document.name) for side in sides)]
        else:
            sides = (conversation(document.record),)
            found = [(text,) for text in self._texts(sides[0], document.name)]
            counts[APART] += len(found) > 1
        messages = [message["content"] for side in sides for message in side.messages]
        if self._special is not None:
            counts[SPECIAL] += sum(self._special.search(content) is not None for content in messages)
        counts[EXAMPLES] += len(found)
        counts[ANSWERS] += sum(len(text.learned) for example in found for text in example)
        return found

    def encode(self, examples: Sequence[Example], counts: Counter[str]) -> list[np.ndarray]:
        """The tokens of each example as they are stored: uint32, with LEARNED and REJECTED in their bits."""
        texts = [text for example in examples for text in example]
        encoded = iter(self.tokenizer.encode_marked([text.text for text in texts], [text.learned for text in texts]))
        found = []
        for example in examples:
            tokens = []
            for bit, _ in zip((np.uint32(0), REJECTED), example, strict=False):
                ids, learned = next(encoded)
                counts[TOKENS] += int(learned.sum())
                tokens.append(ids.astype(np.uint32) | np.where(learned, LEARNED, np.uint32(0)) | bit)
            found.append(np.concatenate(tokens))
        return found

    def _whole(self, said: Conversation, name: str) -> Text:
        """The one text of a side of a pair."""
        found = self._texts(said, name)
        if len(found) > 1:
            raise Unfit("no pair", "(it has several answers, which the template writes differently later on)")
        return found[0]

    def _texts(self, said: Conversation, name: str) -> list[Text]:
        if self.template.marks:
            return [self._marked(said, name)]
        return self._differenced(said, name)

    def _marked(self, said: Conversation, name: str) -> Text:
        (text,), spans = self.template.render(said.messages, said.tools, [(len(said.messages), False)], name)
        answers = [i for i, message in enumerate(said.messages) if message["role"] == "assistant"]
        if len(answers) != len(said.learned):
            if len(spans) != len(answers):
                raise Unfit("not to be told apart", f"(the template marks {len(spans)} answers of {len(answers)})")
            spans = [span for i, span in zip(answers, spans, strict=True) if i in said.learned]
        if not spans:
            raise Unfit("without an answer", "that the template marks")
        return Text(text, spans)

    def _differenced(self, said: Conversation, name: str) -> list[Text]:
        cuts = [(len(said.messages), False)]
        for i in said.learned:
            cuts += [(i, True), (i + 1, False)]
        (whole, *others), _ = self.template.render(said.messages, said.tools, cuts, name)
        apart = []
        for i, before, upto in zip(said.learned, others[::2], others[1::2], strict=True):
            if not upto.startswith(before):
                raise Unfit(
                    "not to be told apart",
                    f"(answer {said.learned.index(i) + 1} does not begin as the template begins answers, with {short(ascii(before[-40:]))})",
                )
            content = said.messages[i]["content"].rstrip()
            ended = upto.rstrip()
            # Behind the content stands a mark of the end, behind that nothing that counts.
            end = len(upto) if content and ended.endswith(content) else len(ended)
            if end <= len(before):
                raise Unfit("without an answer", "in what the template makes of it")
            apart.append((upto, (len(before), end)))
        if all(whole.startswith(upto) for upto, _ in apart):
            return [Text(whole, [span for _, span in apart])]
        return [Text(upto, [span]) for upto, span in apart]
