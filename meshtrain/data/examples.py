"""From the record of a conversation to the tokens of an example, each learned or not.

Learned are the answers, with the token that ends each, and nothing else. A template that marks them with {% generation
%} says where they stand in its text; else what it adds does (prefix differencing): an answer is what stands in the text
up to it, and not yet in the text before it that ends with the beginning of an answer:

    before    <user>2+2?<end> <assistant>
    up to     <user>2+2?<end> <assistant>4<end>
    whole     <user>2+2?<end> <assistant>4<end> <user>3+3?<end> <assistant>6<end>
                                         ------                            ------    learned

A template may write the same answer differently later on, without its thoughts, say: then the text up to it does not
begin the whole, and each answer becomes an example of its own, learned as the model would have to say it. White space
behind the mark that ends an answer is
not learned: nobody waits for it. The beginning of an answer may open a thought, which a template leaves out of answers
that are written: then an answer is learned from where the two part, and counted.

Nothing is learned that says nothing: an answer of which the template writes neither text nor call is refused.

A special token's text in the content of a message is that special token, as it is when `transformers` applies the
template, in training and in use; messages that hold one are counted, since they can forge the end of a turn.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.data.boundaries import Spans
from meshtrain.data.chat import Conversation, conversation, pair
from meshtrain.data.documents import Document
from meshtrain.data.manifest import (
    ANSWERS,
    APART,
    EXAMPLES,
    LEARNED,
    REJECTED,
    SPECIAL,
    TOKENS,
    Contents,
)
from meshtrain.data.messages import ASSISTANT, Message, Unfit, function_of, text_of
from meshtrain.data.template import READ, ChatTemplate
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import short

# Counts of what a template leaves out, or a record asks for in vain; they are named where there are any.
THOUGHTS = "answers without the thought that they have, or that the template opens"
UNWRITTEN = "messages that the template does not write"
PASSED_OVER = "messages marked as learned that are no answers"
UNREAD = {
    field: f"conversations with {field}, which the template does not read"
    for field in READ
}
NOTED = (THOUGHTS, UNWRITTEN, PASSED_OVER, *UNREAD.values())

# How a thought is opened: by a mark.
OPENED = re.compile(r"\s*(?:[<\[◁]|$)")
# A mark that has begun and not ended.
BROKEN = re.compile(r"[<\[◁][^>\]▷\n]{0,40}$")
OPENING = re.compile(r"<(\w+)>\s*$")
THOUGHT = "</think>"


@dataclass(frozen=True)
class LearnedText:
    """The text that the template renders of a conversation, and the characters [begin, end) of it that are learned."""

    text: str
    learned: Spans


# One text of a chat; the chosen and the rejected one of a pair.
Example = tuple[LearnedText, ...]


class Examples:
    """Makes examples of records, with one template and one tokenizer, and counts what is in them."""

    def __init__(
        self, contents: Contents, template: ChatTemplate, tokenizer: Tokenizer
    ) -> None:
        self.contents = contents
        self.template = template
        self.tokenizer = tokenizer
        # The longest first, of which others are the beginning.
        special = sorted(tokenizer.special, key=len, reverse=True)
        self._special = (
            re.compile("|".join(map(re.escape, special))) if special else None
        )

    def read(self, document: Document, counts: Counter[str]) -> list[Example]:
        """Returns the examples of a record; Unfit if it is none. ConfigError for what the template does."""
        if self.contents == "pairs":
            sides: tuple[Conversation, ...] = pair(document.record)
            texts = [self._texts(side, document.name, counts) for side in sides]
            if any(len(side) > 1 for side in texts):
                raise Unfit(
                    "no pair",
                    "(it has several answers, which the template writes differently later on)",
                )
            examples: list[Example] = [tuple(side[0] for side in texts)]
        else:
            sides = (conversation(document.record),)
            examples = [
                (text,) for text in self._texts(sides[0], document.name, counts)
            ]
            counts[APART] += len(examples) > 1
        if self._special is not None:
            contents = [
                text_of(message["content"])
                for side in sides
                for message in side.messages
            ]
            counts[SPECIAL] += sum(
                self._special.search(content) is not None for content in contents
            )
        counts[EXAMPLES] += len(examples)
        counts[ANSWERS] += sum(
            len(text.learned) for example in examples for text in example
        )
        return examples

    def encode(
        self, examples: Sequence[Example], counts: Counter[str]
    ) -> list[np.ndarray]:
        """Returns the tokens of each example as they are stored: uint32, with LEARNED and REJECTED in their bits."""
        texts = [text for example in examples for text in example]
        encoded = iter(
            self.tokenizer.encode_marked(
                [text.text for text in texts], [text.learned for text in texts]
            )
        )
        stored = []
        for example in examples:
            tokens = []
            for bit, _ in zip((np.uint32(0), REJECTED), example, strict=False):
                ids, learned = next(encoded)
                counts[TOKENS] += int(learned.sum())
                tokens.append(
                    ids.astype(np.uint32)
                    | np.where(learned, LEARNED, np.uint32(0))
                    | bit
                )
            stored.append(np.concatenate(tokens))
        return stored

    def _texts(
        self, talk: Conversation, name: str, counts: Counter[str]
    ) -> list[LearnedText]:
        marks = self.template.compiled(talk.tools).marks
        noted: Counter[str] = Counter()
        texts = (
            self._marked(talk, name, noted)
            if marks
            else self._differenced(talk, name, noted)
        )
        noted[PASSED_OVER] += talk.passed_over
        noted += Counter(
            UNREAD[field]
            for field in self.template.unread(talk.messages, talk.tools, talk.values)
        )
        # Of a record that is refused nothing is counted.
        counts += noted
        return texts

    def _render(
        self, talk: Conversation, cuts: Sequence[tuple[int, bool]], name: str
    ) -> tuple[list[str], list[tuple[int, int]]]:
        return self.template.render(talk.messages, talk.tools, cuts, name, talk.values)

    def _marked(
        self, talk: Conversation, name: str, counts: Counter[str]
    ) -> list[LearnedText]:
        (text,), spans = self._render(talk, [(len(talk.messages), False)], name)
        answers = [
            i for i, message in enumerate(talk.messages) if message["role"] == ASSISTANT
        ]
        if len(answers) == len(spans):
            spans = [
                span
                for i, span in zip(answers, spans, strict=True)
                if i in talk.learned
            ]
            for i, (begin, end) in zip(talk.learned, spans, strict=True):
                counts[THOUGHTS] += self._check(talk.messages[i], text[begin:end])
        elif len(answers) != len(talk.learned):
            raise Unfit(
                "not to be told apart",
                f"(the template marks {len(spans)} answers of {len(answers)})",
            )
        if not spans:
            raise Unfit("without an answer", "that the template marks")
        counts[UNWRITTEN] += unwritten(talk, text)
        return [LearnedText(text, spans)]

    def _differenced(
        self, talk: Conversation, name: str, counts: Counter[str]
    ) -> list[LearnedText]:
        cuts = [(len(talk.messages), False)]
        for i in talk.learned:
            cuts += [(i, True), (i + 1, False)]
        (whole, *others), _ = self._render(talk, cuts, name)
        answers = []
        for number, (i, before, upto) in enumerate(
            zip(talk.learned, others[::2], others[1::2], strict=True), 1
        ):
            begin: int | None = len(before)
            if not upto.startswith(before):
                (closed,), _ = self._render(talk, [(i, False)], name)
                begin = common_beginning(closed, before, upto)
            if begin is None:
                raise Unfit(
                    "not to be told apart",
                    f"(answer {number} does not begin as the template begins answers, with "
                    f"{short(ascii(before[-40:]))})",
                )
            end = end_of_answer(text_of(talk.messages[i]["content"]).rstrip(), upto)
            if end <= begin:
                raise Unfit("without an answer", "in what the template makes of it")
            counts[THOUGHTS] += self._check(
                talk.messages[i], upto[begin:end]
            ) or begin < len(before)
            answers.append((upto, (begin, end)))
        counts[UNWRITTEN] += unwritten(talk, whole)
        if all(whole.startswith(upto) for upto, _ in answers):
            return [LearnedText(whole, [span for _, span in answers])]
        return [LearnedText(upto, [span]) for upto, span in answers]

    def _check(self, answer: Message, text: str) -> bool:
        """Returns whether a thought is left out; Unfit if the learned text of an answer does not say what the answer
        does.
        """
        for call in answer.get("tool_calls") or ():
            if function_of(call)["name"] not in text:
                raise Unfit(
                    "not written by the template",
                    f"(the call of {short(function_of(call)['name'])})",
                )
        content = text_of(answer["content"])
        if content.strip() and not _shows(content, text):
            raise Unfit("with an empty answer", "in what the template makes of it")
        return THOUGHT in content and THOUGHT not in text


def end_of_answer(content: str, upto: str) -> int:
    """Returns where an answer ends in the text up to it: behind the content stands a mark of the end, behind that
    nothing that counts.
    """
    ended = upto.rstrip()
    return len(upto) if content and ended.endswith(content) else len(ended)


def common_beginning(closed: str, before: str, upto: str) -> int | None:
    """Returns where an answer begins that the template begins otherwise than its own prompt for one.

    closed: the text before the answer; before: with the beginning of an answer; upto: with the answer itself. None: it
    is not to be told.

        the prompt opens a thought, and the answer has none     <user>2+2?<assistant>  <think>     4<end>
        the text before has another end, the prompt follows     <user>2+2?<assistant>4</s>  \\n<assistant>  5</s>
    """
    shared = len(os.path.commonprefix([before, upto]))  # noqa: RUF071  of characters
    prompt = before.removeprefix(closed)
    if not before.startswith(closed) or not prompt.strip():
        return None
    if shared <= len(closed):
        at = upto.find(prompt, shared)
        return at + len(prompt) if at >= 0 and at == upto.rfind(prompt) else None
    if (broken := BROKEN.search(before, len(closed), shared)) is not None:
        shared = broken.start()
    # A thought that the prompt opens and closes at once, and the answer fills.
    opened = OPENING.search(before, len(closed), shared)
    if opened is not None and before[shared:].lstrip().startswith(f"</{opened[1]}>"):
        shared = opened.start()
    if before[len(closed) : shared].strip() and OPENED.match(before[shared:]):
        return shared
    return None


def unwritten(talk: Conversation, text: str) -> int:
    """Counts the messages of others than the model of which the template leaves something out."""
    contents = (
        text_of(message["content"])
        for message in talk.messages
        if message["role"] != ASSISTANT
    )
    return sum(
        content.strip() not in text
        and not all(word in text for word in re.findall(r"\w+", content))
        for content in contents
    )


def _shows(content: str, text: str) -> bool:
    """Returns whether a text has any part of a content, which templates may shorten."""
    if content.strip() in text:
        return True
    return any(found.group() in text for found in re.finditer(r"\w+", content))
