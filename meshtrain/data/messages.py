"""Reads messages in any public spelling: who speaks, what is said, which tools are called, and which answers are marked
as learned.

    OpenAI      {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function":
                {"name": ..., "arguments": text or object}}]}
    legacy      {"role": "assistant", "content": null, "function_call": {"name": ..., "arguments": ...}}, answered by
                the role `function`
    Hermes      {"role": "assistant", "content": "", "tool_calls": [{"name": ..., "arguments": ...}]}
    ShareGPT    {"from": "function_call", "value": JSON of a call or of a list of calls}, answered by `observation`;
                several in turn are one message
    Capybara    {"input": question, "output": answer}
    UltraChat   question, answer, question, answer ... as texts

Contents stay as they stand, null and objects too, and so does every other field: the template may read it.

A message may be marked: `weight`, `train`, `loss` and `loss_mask` are 1 or true where it is learned, and 0 or false
where it is context.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshtrain.errors import short

Entry = Mapping[str, Any]
USER = "user"
ASSISTANT = "assistant"
SYSTEM = "system"
TOOL = "tool"
CALL = "function_call"
# Who speaks, in the words of public files; templates know the four.
SPEAKERS = {
    "human": USER,
    "user": USER,
    "prompter": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "ai": ASSISTANT,
    "system": SYSTEM,
    "observation": TOOL,
    "tool": TOOL,
    "function": TOOL,
    "function_response": TOOL,
    "tool_response": TOOL,
    CALL: ASSISTANT,
    "tool_call": ASSISTANT,
}
CALLING = (CALL, "tool_call")
MARKS = ("weight", "train", "loss", "loss_mask")
# A field with one of these words in its name says what is learned.
MARKING = {
    "weight",
    "weights",
    "train",
    "trainable",
    "loss",
    "mask",
    "masked",
    "learn",
    "learned",
    "ignore",
    "ignored",
}
SPELT = ("role", "content", "from", "value", "tool_calls", "function_call")

Message = dict[str, Any]  # role, content and whatever else templates know


class Unfit(Exception):
    """A record of which no example can be made: the kind of problem, and the detail."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class Turn(NamedTuple):
    """A message, and whether it is marked as learned; None: it is not marked."""

    message: Message
    marked: bool | None = None


def turns_of(entries: Any, name: str) -> list[Turn]:
    """Reads a list of messages, in whichever spelling each came; Unfit if it is none. name: of the list in its
    record.
    """
    if not isinstance(entries, list) or not entries:
        raise Unfit("no conversation", f"(its {name} is not a list of messages)")
    if len(entries) % 2 == 0 and all(isinstance(entry, str) for entry in entries):
        return [
            said(role, text)
            for role, text in zip(
                (USER, ASSISTANT) * (len(entries) // 2), entries, strict=True
            )
        ]
    turns: list[Turn] = []
    calling = False
    for entry in entries:
        if not isinstance(entry, dict):
            raise Unfit("no conversation", "(a message is not a JSON object)")
        if (
            "input" in entry
            and "output" in entry
            and not {"role", "from"} & entry.keys()
        ):
            turns += [
                said(USER, entry["input"]),
                said(ASSISTANT, entry["output"], _marked(entry)),
            ]
            continue
        turn = _turn(entry)
        called_before = calling
        calling = _speaker(entry) in CALLING
        if calling and called_before:
            turns[-1].message["tool_calls"] += turn.message["tool_calls"]
        else:
            turns.append(turn)
    return turns


def messages_of(entries: Any, name: str) -> list[Message]:
    """Returns messages as templates take them; Unfit unless `entries` is a list of messages. `name` is the list's name
    in its record.
    """
    return [turn.message for turn in turns_of(entries, name)]


def said(role: str, content: Any, marked: bool | None = None) -> Turn:
    """Returns a turn of text alone."""
    return Turn({"role": role, "content": _content(content, role, False)}, marked)


def text_of(content: Any) -> str:
    """Returns the text of a message's content: of parts the text of all, of null none, of a tool's object its JSON."""
    if isinstance(content, str):
        return content
    if is_parts(content):
        return "".join(part["text"] for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False)


def is_parts(content: Any) -> bool:
    """Returns whether a content is a list of parts, each a text."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        )
    )


def function_of(call: Entry) -> Entry:
    """Returns what a call says of its function, name and arguments, in OpenAI's spelling or in Hermes'."""
    return call.get("function", call)


def listed(value: Any, what: str) -> list[Any]:
    """Returns a list, which may stand as JSON in a text, and so may each of its entries; nothing for an empty one, or
    for null.
    """
    value = decoded(value, what)
    if isinstance(value, dict) and what != "tools":
        value = [value]
    if value is not None and not isinstance(value, list):
        raise Unfit("no conversation", f"(its {what} is not a list)")
    entries = [decoded(entry, what) for entry in value or []]
    if not all(isinstance(entry, dict) for entry in entries):
        raise Unfit("no conversation", f"(its {what} is not a list of objects)")
    return entries


def decoded(value: Any, what: str) -> Any:
    """Returns what a JSON text says, and what is none as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise Unfit("no conversation", f"(its {what} is not JSON)") from None


def calls_of(value: Any, what: str) -> list[dict[str, Any]]:
    """Returns calls in OpenAI's spelling of calls that stand alone, as an object, a list, or JSON of either."""
    calls = listed(value, what)
    for call in calls:
        if not isinstance(call.get("name"), str) or not isinstance(
            call.get("arguments"), str | dict
        ):
            raise Unfit(
                "no conversation", f"(a {what} is not JSON with name and arguments)"
            )
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls
    ]


def _turn(entry: Entry) -> Turn:
    role = _speaker(entry)
    others = {
        name: value for name, value in entry.items() if name not in (*SPELT, *MARKS)
    }
    content = _either(entry, "content", "value")
    if role in CALLING:
        calls = calls_of(content, CALL)
        if not calls:
            raise Unfit("no conversation", f"(a {CALL} calls nothing)")
        return Turn(
            {"role": ASSISTANT, "content": None, "tool_calls": calls, **others},
            _marked(entry),
        )
    calls = _calls(entry)
    known = SPEAKERS.get(role, role)
    content = _content(content, known, bool(calls))
    message = {"role": known, "content": content, **others}
    return Turn(message | ({"tool_calls": calls} if calls else {}), _marked(entry))


def _speaker(entry: Entry) -> str:
    role = _either(entry, "role", "from")
    if not isinstance(role, str):
        raise Unfit("no conversation", "(a message does not say whose it is)")
    if role.lower() in SPEAKERS:
        return role.lower()
    # Templates may know more roles than these, but not by ShareGPT's words.
    if "role" not in entry:
        raise Unfit(
            "no conversation",
            f"(nobody is called {short(repr(role))}; known are {', '.join(SPEAKERS)})",
        )
    return role


def _either(entry: Entry, ours: str, theirs: str) -> Any:
    """Returns the value of a field that has two names; Unfit if both stand there and differ."""
    values = [entry[name] for name in (ours, theirs) if entry.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise Unfit("ambiguous", f"(a message has {ours} and {theirs}, which differ)")
    return values[0] if values else None


def _calls(entry: Entry) -> list[dict[str, Any]]:
    calls = listed(entry.get("tool_calls"), "tool_calls")
    for call in calls:
        function = function_of(call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unfit("no conversation", "(a tool_call has no name of a function)")
    legacy = calls_of(entry.get(CALL), CALL)
    if (
        calls
        and legacy
        and [function_of(call)["name"] for call in calls]
        != [legacy[0]["function"]["name"]]
    ):
        raise Unfit("ambiguous", f"(a message has tool_calls and {CALL}, which differ)")
    return calls or legacy


def _content(content: Any, role: str, calls: bool) -> Any:
    """Returns a content as it stands, where a template can write it as text."""
    if isinstance(content, str) or is_parts(content) or (content is None and calls):
        return content
    # A tool may answer with an object.
    if role == TOOL and isinstance(content, dict | list) and content:
        return content
    kinds = (
        {str(part.get("type")) for part in content if isinstance(part, dict)}
        if isinstance(content, list)
        else set()
    )
    other = ", ".join(sorted(kinds - {"text"}))
    raise Unfit(
        "no conversation",
        f"(a message of {short(role)} is not text{f', but {short(other)}' if other else ''})",
    )


def _marked(entry: Entry) -> bool | None:
    marks = {
        name: value
        for name, value in entry.items()
        if value is not None and MARKING & set(name.split("_"))
    }
    for name, value in marks.items():
        if name not in MARKS:
            raise Unfit(
                "marked in a way that is not known",
                f"({short(name)}; known marks are {', '.join(MARKS)})",
            )
        if not isinstance(value, int | float) or value not in (0, 1):
            raise Unfit(
                "marked in a way that is not known",
                f"({name} is {short(repr(value))}, but an answer is learned, which is 1 or true, or it is not, which "
                "is 0 or false)",
            )
    if len(set(map(bool, marks.values()))) > 1:
        raise Unfit("ambiguous", f"(a message has {' and '.join(marks)}, which differ)")
    return bool(next(iter(marks.values()))) if marks else None
