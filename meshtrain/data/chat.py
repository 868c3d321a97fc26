"""Records of conversations, each in the form that it says itself: what was said, by whom, and which answers are learned.

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
    """A record of which no example can be made: the kind of problem, and what exactly."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Conversation:
    """What was said, the tools there were, and which of the messages are answers to learn, by index."""

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: Any = None


def conversation(record: Any) -> Conversation:
    """A record's conversation; Unfit if it has none, or no answer in it."""
    fields = _fields(record)
    if "prompt" in fields and "completion" in fields:
        before = _prompt(fields)
        messages = before + _side(fields["completion"])
        return _learning(messages, range(len(before), len(messages)), fields)
    messages = _messages(fields)
    return _learning(messages, range(len(messages)), fields)


def pair(record: Any) -> tuple[Conversation, Conversation]:
    """A record's conversations with the chosen and with the rejected answer; Unfit if it is no pair."""
    fields = _fields(record)
    if "chosen" not in fields or "rejected" not in fields:
        raise Unfit("no pair", "(it has no chosen and rejected)")
    before = _prompt(fields)
    sides = [before + _side(fields[name]) for name in ("chosen", "rejected")]
    if sides[0] == sides[1]:
        raise Unfit("no pair", "(chosen and rejected are the same)")
    shared = next(
        (i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(len(sides[0]), len(sides[1]))
    )
    chosen, rejected = (_learning(side, range(shared, len(side)), fields) for side in sides)
    return chosen, rejected


def _fields(record: Any) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise Unfit("no conversation", "(no JSON object)")
    return record


def _learning(messages: list[Message], among: Sequence[int], fields: Mapping[str, Any]) -> Conversation:
    """The answers among these messages are learned, if they have something to say."""
    answers = [i for i in among if messages[i]["role"] == ASSISTANT]
    for i in answers:
        if not messages[i]["content"].strip() and not messages[i].get("tool_calls"):
            raise Unfit("with an empty answer")
    learned = tuple(i for i in answers if messages[i].pop("weight", 1) != 0)
    if not learned:
        raise Unfit("without an answer")
    return Conversation(tuple(messages), learned, _tools(fields.get("tools")))


def _tools(given: Any) -> Any:
    """Tools as templates take them, a list; some files have it as JSON in a string."""
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise Unfit("no conversation", "(its tools are not JSON)") from None
    return given or None


def _messages(fields: Mapping[str, Any]) -> list[Message]:
    named = next((name for name in ("messages", "conversations", "conversation") if name in fields), None)
    if named is not None:
        return _system(fields) + messages_of(fields[named], named)
    if "instruction" not in fields or "output" not in fields:
        raise Unfit(
            "no conversation",
            "(it has neither messages, nor conversations, nor instruction and output, nor prompt and completion)",
        )
    return [*_asked(fields), _message({"role": ASSISTANT, "content": fields["output"]})]


def _system(fields: Mapping[str, Any]) -> list[Message]:
    return [_message({"role": SYSTEM, "content": fields["system"]})] if fields.get("system") else []


def _asked(fields: Mapping[str, Any]) -> list[Message]:
    """Of an Alpaca record: all but the answer."""
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Unfit("no conversation", "(its history is no list of questions and answers)")
    said = [text for turn in history for text in turn]
    roles = [USER, ASSISTANT] * len(history)
    earlier = [_message({"role": role, "content": text}) for role, text in zip(roles, said, strict=True)]
    parts = [fields["instruction"], fields.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise Unfit("no conversation", "(its instruction or input is no text)")
    return [*_system(fields), *earlier, _message({"role": USER, "content": "\n".join(filter(None, parts))})]


def _prompt(fields: Mapping[str, Any]) -> list[Message]:
    """What both sides of a pair have before their answers; nothing where they hold it themselves."""
    if "prompt" in fields:
        given = fields["prompt"]
        asked = [_message({"role": USER, "content": given})] if isinstance(given, str) else messages_of(given, "prompt")
        return _system(fields) + asked
    if "instruction" in fields:
        return _asked(fields)
    named = next((name for name in ("messages", "conversations") if name in fields), None)
    return _system(fields) + (messages_of(fields[named], named) if named is not None else [])


def _side(given: Any) -> list[Message]:
    if isinstance(given, list):
        return messages_of(given, "chosen or rejected")
    return [_message({"role": ASSISTANT, "content": given} if isinstance(given, str) else given)]


def messages_of(given: Any, name: str) -> list[Message]:
    """Messages in OpenAI's form, whichever each came in; Unfit if it is no list of them. `name` it has in its record."""
    if not isinstance(given, list) or not given:
        raise Unfit("no conversation", f"(its {name} is no list of messages)")
    return [_message(each) for each in given]


def _message(given: Any) -> Message:
    """A message in OpenAI's form, whichever it came in."""
    if not isinstance(given, dict):
        raise Unfit("no conversation", "(a message is no JSON object)")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if not isinstance(role, str):
        raise Unfit("no conversation", "(a message does not say whose it is)")
    if "from" in given and "role" not in given:
        if role not in SPEAKERS:
            raise Unfit("no conversation", f"(nobody is called {short(repr(role))}; known are {', '.join(SPEAKERS)})")
        if role == "function_call":
            return {"role": ASSISTANT, "content": "", "tool_calls": [_call(content)]}
        return {"role": SPEAKERS[role], "content": _text(content, role)}
    others = {name: value for name, value in given.items() if name not in ("role", "content")}
    if isinstance(calls := others.get("tool_calls"), list):
        others["tool_calls"] = [_with_arguments(call) for call in calls]
    # Of a call of tools alone there is nothing to say.
    said = "" if content is None and given.get("tool_calls") else _text(content, role)
    return {"role": role, "content": said, **others}


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
