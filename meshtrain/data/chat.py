"""Reads records of conversations in any of these forms: who says what, and which answers are learned.

    OpenAI     {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    ShareGPT   {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    Alpaca     {"instruction": "Add.", "input": "2+2", "output": "4"}

    TRL        {"prompt": text or messages, "completion": text or messages}, of which only what completes is learned

`system` goes before any of them, `tools` beside; an Alpaca record may have a `history` of [question, answer] before it. An answer with
`weight: 0` (OpenAI) is context, not learned. Arguments of a call that are JSON in a string (OpenAI) become what they say, which is what
templates write. Pairs have two answers, `chosen` and `rejected`:

    TRL              {"prompt": text or messages, "chosen": text or messages, "rejected": ...}; without prompt both are whole conversations
    LLaMA-Factory    {"conversations": [...], "chosen": {"from": "gpt", "value": ...}, "rejected": {...}}, or Alpaca with both in place of output
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshtrain.errors import short

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
# Who speaks, in the words of ShareGPT's files.
SPEAKERS = {
    "human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT,
    "model": ASSISTANT, "system": SYSTEM, "observation": TOOL, "tool": TOOL, "function_call": ASSISTANT,
}  # fmt: skip

Message = dict[str, Any]  # role, content and whatever else templates know


class Unfit(Exception):
    """A record of which no example can be made: the kind of problem, and the detail."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools that there were, and which of the messages are answers to learn, by index."""

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: Any = None


def conversation(record: Any) -> Conversation:
    """Returns a record's conversation; Unfit if it has none, or no answer in it."""
    fields = _fields(record)
    if "prompt" in fields and "completion" in fields:
        before = _prompt(fields)
        messages = before + _side(fields["completion"])
        return _learning(messages, range(len(before), len(messages)), fields)
    if (named := _named(fields, "messages", "conversations", "conversation")) is not None:
        messages = _system(fields) + named
    elif "instruction" in fields and "output" in fields:
        messages = [*_instruction(fields), _message({"role": ASSISTANT, "content": fields["output"]})]
    else:
        raise Unfit(
            "no conversation",
            "(it has neither messages, nor conversations, nor instruction and output, nor prompt and completion)",
        )
    return _learning(messages, range(len(messages)), fields)


def pair(record: Any) -> tuple[Conversation, Conversation]:
    """Returns a record's conversations with the chosen and with the rejected answer; Unfit if it is no pair."""
    fields = _fields(record)
    if "chosen" not in fields or "rejected" not in fields:
        raise Unfit("no pair", "(it has no chosen and rejected)")
    before = _prompt(fields)
    sides = [before + _side(fields[name]) for name in ("chosen", "rejected")]
    if sides[0] == sides[1]:
        raise Unfit("no pair", "(chosen and rejected are the same)")
    differ = (i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b)
    shared = next(differ, min(map(len, sides)))
    chosen, rejected = (_learning(side, range(shared, len(side)), fields) for side in sides)
    return chosen, rejected


def messages_of(entries: Any, name: str) -> list[Message]:
    """Returns messages in OpenAI's form, whichever each came in; Unfit if it is no list of them. name: of the list in its record."""
    if not isinstance(entries, list) or not entries:
        raise Unfit("no conversation", f"(its {name} is no list of messages)")
    return [_message(entry) for entry in entries]


def _fields(record: Any) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise Unfit("no conversation", "(no JSON object)")
    return record


def _learning(messages: list[Message], among: Sequence[int], fields: Mapping[str, Any]) -> Conversation:
    answers = [i for i in among if messages[i]["role"] == ASSISTANT]
    if any(not messages[i]["content"].strip() and not messages[i].get("tool_calls") for i in answers):
        raise Unfit("with an empty answer")
    learned = tuple(i for i in answers if messages[i].pop("weight", 1) != 0)
    if not learned:
        raise Unfit("without an answer")
    tools = fields.get("tools")
    if isinstance(tools, str) and tools.strip():
        # Templates take a list; some files have it as JSON in a string.
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Unfit("no conversation", "(its tools are not JSON)") from None
    return Conversation(tuple(messages), learned, tools or None)


def _named(fields: Mapping[str, Any], *names: str) -> list[Message] | None:
    name = next((name for name in names if name in fields), None)
    return None if name is None else messages_of(fields[name], name)


def _system(fields: Mapping[str, Any]) -> list[Message]:
    return [_message({"role": SYSTEM, "content": fields["system"]})] if fields.get("system") else []


def _instruction(fields: Mapping[str, Any]) -> list[Message]:
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Unfit("no conversation", "(its history is no list of questions and answers)")
    turns = [
        _message({"role": role, "content": text})
        for turn in history
        for role, text in zip((USER, ASSISTANT), turn, strict=True)
    ]
    parts = [fields["instruction"], fields.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise Unfit("no conversation", "(its instruction or input is no text)")
    return [*_system(fields), *turns, _message({"role": USER, "content": "\n".join(filter(None, parts))})]


def _prompt(fields: Mapping[str, Any]) -> list[Message]:
    """The messages that both sides of a pair have before their answers; none where they hold them themselves."""
    if "prompt" in fields:
        prompt = fields["prompt"]
        if isinstance(prompt, str):
            return [*_system(fields), _message({"role": USER, "content": prompt})]
        return _system(fields) + messages_of(prompt, "prompt")
    if "instruction" in fields:
        return _instruction(fields)
    return _system(fields) + (_named(fields, "messages", "conversations") or [])


def _side(answer: Any) -> list[Message]:
    if isinstance(answer, list):
        return messages_of(answer, "chosen or rejected")
    return [_message({"role": ASSISTANT, "content": answer} if isinstance(answer, str) else answer)]


def _message(entry: Any) -> Message:
    if not isinstance(entry, dict):
        raise Unfit("no conversation", "(a message is no JSON object)")
    role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if not isinstance(role, str):
        raise Unfit("no conversation", "(a message does not say whose it is)")
    if "from" in entry and "role" not in entry:
        if role not in SPEAKERS:
            raise Unfit("no conversation", f"(nobody is called {short(repr(role))}; known are {', '.join(SPEAKERS)})")
        if role == "function_call":
            return {"role": ASSISTANT, "content": "", "tool_calls": [_call(content)]}
        return {"role": SPEAKERS[role], "content": _text(content, role)}
    others = {name: value for name, value in entry.items() if name not in ("role", "content")}
    if isinstance(calls := others.get("tool_calls"), list):
        others["tool_calls"] = [_with_arguments(call) for call in calls]
    # A message that only calls tools has no content.
    text = "" if content is None and entry.get("tool_calls") else _text(content, role)
    return {"role": role, "content": text, **others}


def _text(content: Any, role: str) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in content)
    if not isinstance(content, str):
        raise Unfit("no conversation", f"(a message of {short(role)} is no text)")
    return content


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are an object, where they were one as JSON in a string."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _call(content: Any) -> dict[str, Any]:
    """A call of a tool, which ShareGPT's files write as JSON in a string."""
    try:
        call = json.loads(content)
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unfit("no conversation", "(a function_call is no JSON with name and arguments)") from None
