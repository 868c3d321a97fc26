"""Reads records of conversations: who says what, and which answers are learned.

`CHATS` and `SIDES` name the shapes that are understood.

    messages              {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
                          or conversations, conversation, dialogue ..., and each message in any spelling of messages.py
    Alpaca                {"instruction": "Add.", "input": "2+2", "output": "4"}, with `history`: [[question, answer],
                          ...]; Dolly: context, response
    prompt and answer     {"prompt": text or messages, "completion": text or messages}; only the completion is learned
    question and answer   {"question": "2+2?", "response": "4"}
    question and calls    {"query": "Rain?", "tools": ..., "answers": [{"name": ..., "arguments": ...}]} (xLAM)

`system` (or system_prompt) goes before any of them; beside them stand `tools` (or functions), `documents` and
`chat_template_kwargs`, which the template is given. Pairs have two answers, `chosen` and `rejected`, each a text, a
message or messages, to one of the prompts above:

    {"prompt": ..., "chosen": ..., "rejected": ...}; also question, query, input, instruction (with input, history) or
    messages {"chosen": whole conversation, "rejected": whole conversation}, as messages or as the text of a dialogue,
    \\n\\nHuman: ... \\n\\nAssistant: ...

A statement that a record makes twice is read once: a prompt beside whole conversations, a system prompt beside a first
message of the system. Where the two differ, the record is refused; and so is every other shape, by the names of its
fields.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshtrain.data.messages import (
    ASSISTANT,
    SYSTEM,
    USER,
    Message,
    Turn,
    Unfit,
    calls_of,
    listed,
    said,
    text_of,
    turns_of,
)
from meshtrain.errors import nearest, short

LISTS = ("messages", "conversations", "conversation")
# These may hold something else than a list.
MORE_LISTS = ("dialogue", "dialog", "turns", "data")
QUESTIONS = ("question", "query")
ANSWERS = ("response", "answer")
SYSTEMS = ("system", "system_prompt")
SIDES = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
# Characters of a prompt that both answers begin with, from which on it is the prompt and no chance
REPEATED = 20
DIALOGUE = re.compile(r"(?:^|\n\n)(Human|Assistant):")

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools that there were, and which of the messages are answers to learn, by index."""

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: Any = None
    values: Fields = field(default_factory=dict)  # that the template is given by name
    passed_over: int = 0  # messages that are marked as learned and are no answers


# Turns, and how many of them are a prompt.
Turns = tuple[list[Turn], int]


class Shape(NamedTuple):
    """A shape of records: `needs` has a field of each group; `read` returns the turns, and how many of them come before
    what is learned.
    """

    name: str
    needs: tuple[tuple[str, ...], ...]
    read: Callable[[Fields], Turns]

    def fits(self, fields: Fields) -> bool:
        if self.read is _messages:
            return bool(_lists(fields))
        return all(_first(fields, group) is not None for group in self.needs)


class Foreign(NamedTuple):
    """A public shape that is refused by name: the fields that tell it, and the way out."""

    fields: tuple[str, ...]
    why: str


RANKED = "answers are ranked or rated, which data.format pairs reads as chosen and rejected alone"
KTO = "an answer is marked as good or bad by itself (KTO), which no objective here learns from"
FOREIGN = (
    Foreign(("kto_tag",), KTO),
    Foreign(("prompt", "completion", "label"), KTO),
    *(
        Foreign(names, RANKED)
        for names in (
            ("answers", "prompt"),
            ("completions",),
            ("generations",),
            ("human_ref_A", "human_ref_B"),
            ("response_0", "response_1"),
            ("response1", "response2"),
            ("response_a", "response_b"),
            ("conversation_a", "conversation_b"),
        )
    ),
    Foreign(
        ("parent_id", "text"),
        "each record is one message of a tree, of which messages make a conversation",
    ),
    Foreign(("chat",), "a dialogue in one text is read as messages"),
)


def conversation(record: Any) -> Conversation:
    """Returns a record's conversation; Unfit if it has none, or no answer in it."""
    fields = _fields(record)
    _refuse_foreign(fields, marked=True)
    shapes = [shape for shape in CHATS if shape.fits(fields)]
    if not shapes:
        if _sides(fields):
            raise Unfit(
                "no conversation",
                "(it has chosen and rejected, which data.format pairs reads)",
            )
        raise Unfit("no conversation", _unknown(fields))
    turns, before = shapes[0].read(fields)
    for other in shapes[1:]:
        _agree(other.read(fields)[0], turns, other.name, shapes[0].name)
    if shapes[0].name == "messages" and isinstance(fields.get("prompt"), str):
        _agree([said(USER, fields["prompt"])], turns, "prompt", "messages")
    whole = _add_system(fields, turns)
    return _learning(whole, before + len(whole) - len(turns), fields)


def pair(record: Any) -> tuple[Conversation, Conversation]:
    """Returns a record's conversations with the chosen and with the rejected answer; Unfit unless it has both."""
    fields = _fields(record)
    names = _sides(fields)
    if names is None:
        _refuse_foreign(fields, marked=False)
        chat = any(shape.fits(fields) for shape in CHATS)
        raise Unfit(
            "no pair",
            "(it has no chosen and rejected"
            + (", and data.format chat reads it)" if chat else ")"),
        )
    sides = [_side(fields[name], name) for name in names]
    prompts = dict(_prompts(fields))
    whole = [any(turn.message["role"] == USER for turn in side) for side in sides]
    if whole[0] != whole[1]:
        raise Unfit(
            "ambiguous",
            "(one of chosen and rejected is a whole conversation, the other only an answer)",
        )
    if whole[0]:
        for name, turns in prompts.items():
            _agree(turns, sides[0], name, names[0])
        stated = [
            text_of(turn.message["content"])
            for turns in prompts.values()
            for turn in turns
            if turn.message["role"] == SYSTEM
        ]
        sides = [_add_system(fields, side, stated) for side in sides]
    elif prompts:
        sides = _continued(prompts, sides, fields, names)
    else:
        raise Unfit(
            "no pair",
            "(chosen and rejected answer nothing: it has no prompt, nor are they whole conversations)",
        )
    sides = [_add_system(fields, side) for side in sides]
    shared = _count_shared(*([turn.message for turn in side] for side in sides))
    chosen, rejected = (_learning(side, shared, fields) for side in sides)
    return chosen, rejected


def _count_shared(first: list[Message], second: list[Message]) -> int:
    """Returns how many messages two conversations begin with alike; Unfit unless two answers follow."""
    if first == second:
        raise Unfit("no pair", "(chosen and rejected are the same)")
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    shared = next(differ, min(len(first), len(second)))
    if any(
        shared < len(side) and side[shared]["role"] != ASSISTANT
        for side in (first, second)
    ):
        raise Unfit("no pair", "(chosen and rejected answer different prompts)")
    return shared


def _fields(record: Any) -> Fields:
    if not isinstance(record, dict):
        raise Unfit("no conversation", "(not a JSON object)")
    return record


def _first(fields: Fields, names: Iterable[str]) -> str | None:
    """Returns the first of the names that stands there, and is not null."""
    return next((name for name in names if fields.get(name) is not None), None)


def _sides(fields: Fields) -> tuple[str, str] | None:
    return next(
        (
            names
            for names in SIDES
            if all(fields.get(name) is not None for name in names)
        ),
        None,
    )


def _refuse_foreign(fields: Fields, marked: bool) -> None:
    """Unfit for a shape that is known and cannot be learned from. marked: also where the rest of the record would be
    understood.
    """
    for foreign in FOREIGN:
        told = all(fields.get(name) is not None for name in foreign.fields)
        if told and (
            foreign.why == KTO
            or not marked
            or not any(shape.fits(fields) for shape in CHATS)
        ):
            kind = "no conversation" if marked else "no pair"
            raise Unfit(kind, f"(it has {' and '.join(foreign.fields)}: {foreign.why})")


def _unknown(fields: Fields) -> str:
    known = sorted({name for shape in CHATS for group in shape.needs for name in group})
    seen = short(", ".join(map(str, fields))) or "nothing"
    near = next(
        filter(
            None, (nearest(str(name), known) for name in fields if name not in known)
        ),
        "",
    )
    shapes = ", nor ".join(
        " and ".join(group[0] for group in shape.needs) for shape in CHATS
    )
    return f"(it has neither {shapes}, but {seen}{near})"


def _agree(
    stated: Sequence[Turn], turns: Sequence[Turn], name: str, other: str
) -> None:
    """Unfit where what a user says in one field of a record stands nowhere in the other."""
    there = [text_of(turn.message["content"]).strip() for turn in turns]
    for turn in stated:
        text = text_of(turn.message["content"]).strip()
        if turn.message["role"] == USER and not any(
            text in each or (each and each in text) for each in there
        ):
            raise Unfit("ambiguous", f"(its {name} is not what its {other} says)")


def _add_system(
    fields: Fields, turns: list[Turn], stated: Sequence[str] = ()
) -> list[Turn]:
    """The turns behind the record's own system prompt, which may be `stated` elsewhere, or stand as their first message
    already.
    """
    texts = [*stated, *(fields[name] for name in SYSTEMS if fields.get(name))]
    if not texts:
        return turns
    if not all(isinstance(text, str) for text in texts):
        raise Unfit("no conversation", "(its system is not text)")
    first = (
        text_of(turns[0].message["content"])
        if turns[0].message["role"] == SYSTEM
        else None
    )
    if len({text.strip() for text in texts + ([] if first is None else [first])}) > 1:
        raise Unfit("ambiguous", "(it has two system prompts, which differ)")
    return turns if first is not None else [said(SYSTEM, texts[0]), *turns]


def _learning(turns: Sequence[Turn], before: int, fields: Fields) -> Conversation:
    """The conversation of which the answers behind the first `before` turns are learned, but for those that are marked
    as context.
    """
    messages = [turn.message for turn in turns]
    if not any(message["role"] == USER for message in messages):
        raise Unfit("without a user's turn")
    answers = [
        i for i in range(before, len(messages)) if messages[i]["role"] == ASSISTANT
    ]
    if any(
        not text_of(messages[i]["content"]).strip()
        and not messages[i].get("tool_calls")
        for i in answers
    ):
        raise Unfit("with an empty answer")
    learned = tuple(i for i in answers if turns[i].marked is not False)
    if not learned:
        raise Unfit("without an answer")
    others = sum(
        bool(turn.marked) and turn.message["role"] != ASSISTANT for turn in turns
    )
    return Conversation(
        tuple(messages), learned, _tools(fields, messages), _values(fields), others
    )


def _tools(fields: Fields, messages: Sequence[Message]) -> list[Any] | None:
    tools = listed(fields.get("tools"), "tools")
    functions = [
        {"type": "function", "function": each}
        for each in listed(fields.get("functions"), "functions")
    ]
    if tools and functions and tools != functions:
        raise Unfit("ambiguous", "(it has tools and functions, which differ)")
    # Hermes' files have the tools in the system's text, too.
    if messages[0]["role"] == SYSTEM and "<tools>" in text_of(messages[0]["content"]):
        return None
    return tools or functions or None


def _values(fields: Fields) -> dict[str, Any]:
    values = fields.get("chat_template_kwargs") or {}
    if not isinstance(values, dict):
        raise Unfit("no conversation", "(its chat_template_kwargs is not an object)")
    documents = fields.get("documents")
    if (
        isinstance(documents, list)
        and documents
        and all(isinstance(each, dict) for each in documents)
    ):
        return {"documents": documents, **values}
    return dict(values)


# --- the shapes


def _messages(fields: Fields) -> Turns:
    (name, turns), *others = (
        (name, turns_of(fields[name], name)) for name in _lists(fields)
    )
    for other, theirs in others:
        if not _same(theirs, turns):
            raise Unfit("ambiguous", f"(its {other} is not what its {name} says)")
    return turns, 0


def _lists(fields: Fields) -> list[str]:
    """The names of a record's lists of messages."""
    sure = [name for name in LISTS if fields.get(name) is not None]
    return sure or [name for name in MORE_LISTS if isinstance(fields.get(name), list)]


def _instruction(fields: Fields) -> list[Turn]:
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise Unfit(
            "no conversation", "(its history is not a list of questions and answers)"
        )
    turns = [
        said(role, text)
        for turn in history
        for role, text in zip((USER, ASSISTANT), turn, strict=True)
    ]
    parts = [
        fields["instruction"],
        fields.get("input") or "",
        fields.get("context") or "",
    ]
    if not all(isinstance(part, str) for part in parts):
        raise Unfit("no conversation", "(its instruction or input is not text)")
    return [*turns, said(USER, "\n".join(filter(None, parts)))]


def _alpaca(fields: Fields) -> Turns:
    answer = fields[str(_first(fields, ("output", *ANSWERS)))]
    return [*_instruction(fields), said(ASSISTANT, answer)], 0


def _prompt(prompt: Any, name: str) -> list[Turn]:
    """The turns of a prompt: a text, the text of a dialogue up to where it is answered, or messages."""
    if not isinstance(prompt, str):
        return turns_of([prompt] if isinstance(prompt, dict) else prompt, name)
    dialogue = _dialogue(prompt)
    if dialogue and not dialogue[-1].message["content"]:
        return dialogue[:-1]
    return dialogue or [said(USER, prompt)]


def _completed(fields: Fields) -> Turns:
    name = str(_first(fields, ("completion", *ANSWERS)))
    prompt = _prompt(fields["prompt"], "prompt")
    answer = _side(fields[name], name)
    if any(turn.message["role"] == USER for turn in answer) and _same(
        answer[: len(prompt)], prompt
    ):
        prompt = []
    return prompt + answer, len(prompt)


def _answered(fields: Fields) -> Turns:
    question, answer = (
        fields[str(_first(fields, names))] for names in (QUESTIONS, ANSWERS)
    )
    return [said(USER, question), said(ASSISTANT, answer)], 0


def _called(fields: Fields) -> Turns:
    calls = calls_of(fields["answers"], "answers")
    if not calls:
        raise Unfit("without an answer")
    return [
        said(USER, fields["query"]),
        Turn({"role": ASSISTANT, "content": None, "tool_calls": calls}),
    ], 0


# The first that fits is read.
CHATS = (
    Shape("messages", ((*LISTS, *MORE_LISTS),), _messages),
    Shape("instruction", (("instruction",), ("output", *ANSWERS)), _alpaca),
    Shape("prompt", (("prompt",), ("completion", *ANSWERS)), _completed),
    Shape("question", (QUESTIONS, ANSWERS), _answered),
    Shape("query", (("query",), ("tools",), ("answers",)), _called),
)


# --- pairs


def _dialogue(text: str) -> list[Turn]:
    """The turns of a dialogue in one text; none of a text that is none."""
    start, *rest = DIALOGUE.split(text)
    if start.strip() or not rest:
        return []
    roles = {"Human": USER, "Assistant": ASSISTANT}
    return [
        said(roles[name], said_there.strip())
        for name, said_there in zip(rest[::2], rest[1::2], strict=True)
    ]


def _side(answer: Any, name: str) -> list[Turn]:
    if isinstance(answer, str):
        return _dialogue(answer) or [said(ASSISTANT, answer)]
    turns = turns_of(answer if isinstance(answer, list) else [answer], name)
    if not any(turn.message["role"] == ASSISTANT for turn in turns):
        raise Unfit("without an answer", f"(in its {name})")
    return turns


def _prompts(fields: Fields) -> Iterable[tuple[str, list[Turn]]]:
    """(field, turns) of each prompt that a record of a pair has; the first goes before the answers."""
    if lists := _lists(fields):
        yield lists[0], _messages(fields)[0]
    if fields.get("prompt") is not None:
        yield "prompt", _prompt(fields["prompt"], "prompt")
    if fields.get("instruction") is not None:
        yield "instruction", _instruction(fields)
    elif (name := _first(fields, (*QUESTIONS, "input"))) is not None:
        yield name, _prompt(fields[name], name)


def _continued(
    prompts: Mapping[str, list[Turn]],
    sides: Sequence[list[Turn]],
    fields: Fields,
    names: tuple[str, str],
) -> list[list[Turn]]:
    (name, before), *others = prompts.items()
    # A list may hold the chosen answer already.
    if _same(before[-len(sides[0]) :], sides[0]):
        before = before[: -len(sides[0])]
    if not before or before[-1].message["role"] == ASSISTANT:
        raise Unfit(
            "ambiguous", f"(its {name} ends on an answer, which is not the chosen one)"
        )
    for other, turns in others:
        _agree(turns, before, other, name)
    texts = [fields[side] for side in names]
    prompt = fields.get(name)
    if (
        isinstance(prompt, str)
        and len(prompt) >= REPEATED
        and all(str(text).startswith(prompt) for text in texts)
    ):
        sides = [[said(ASSISTANT, text[len(prompt) :].strip())] for text in texts]
    return [before + side for side in sides]


def _same(turns: Sequence[Turn], others: Sequence[Turn]) -> bool:
    return [turn.message for turn in turns] == [turn.message for turn in others]
