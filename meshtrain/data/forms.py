"""Other forms of the same messages: templates are of two kinds in many things, and a record has only one of the two.

    arguments of a call     an object, or its JSON as a text (Qwen's templates want the one, DeepSeek's the other)
    content beside calls    null, or nothing ("")
    content                 parts, each a text, or one text
    what a tool answers     an object, or its JSON as a text
    a call, a tool          with its `function`, or flat

The form in which the record stands comes first. Another is taken if the template fails on this one, or loses a call or
its arguments. So it is if the template writes a form that models do not read: JSON within JSON, Python's own spelling,
None.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

from meshtrain.data.messages import (
    SYSTEM,
    TOOL,
    Message,
    function_of,
    is_parts,
    text_of,
)
from meshtrain.errors import ConfigError

MOST_FORMS = 32
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # fields of a message
# What these roles are called by templates that do not know them.
ROLES = {"developer": SYSTEM, "ipython": TOOL}


class Form(NamedTuple):
    """Messages and tools as a template is given them."""

    messages: Sequence[Message]
    tools: Any


Change = Callable[[Form], Form]


def spoken(messages: Sequence[Message], words: set[str]) -> list[Message]:
    """Returns the messages with the roles that a template knows, by the words in it, and a thought under each of its
    names.
    """
    return [
        _thinking(
            {**message, "role": ROLES[message["role"]]}
            if message["role"] in ROLES.keys() - words
            else message
        )
        for message in messages
    ]


def _thinking(message: Message) -> Message:
    thought = next(
        (message[name] for name in THOUGHTS if message.get(name) is not None), None
    )
    # As transformers does from 5.24 on.
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def best(first: Form, render: Callable[[Form], str]) -> Form:
    """Returns the form of which the template writes most; the error of the first where it takes none."""
    usual, rare = _axes(first)
    choices = _combined(first, usual)
    if len(choices) == 1 and not rare:
        return first
    found, failed = _most(choices, first, render)
    # The names of some are missing: functions may stand where the template does not look.
    if rare and (found is None or _misses(found[1], first)):
        again, _ = _most(_combined(first, usual + rare)[1:], first, render)
        found = max(
            filter(None, (found, again)), key=lambda each: each[0], default=None
        )
    if found is None:
        assert failed is not None
        raise failed
    _, text, form = found
    # An empty content beside calls may become an answer of its own.
    shorter = _each_content(_emptied)(form)
    if shorter != form and (other := _most([shorter], first, render)[0]) is not None:
        form = shorter if other[0] >= found[0] and len(other[1]) < len(text) else form
    return form


Found = tuple[tuple[int, ...], str, Form]


def _most(
    choices: Sequence[Form], first: Form, render: Callable[[Form], str]
) -> tuple[Found | None, Exception | None]:
    """The first of the forms with most points; None, with the first error, where all fail."""
    found: Found | None = None
    failed: Exception | None = None
    for form in choices:
        try:
            text = render(form)
        except ConfigError:
            raise
        except Exception as error:
            failed = failed or error
            continue
        points = _points(text, first)
        if found is None or points > found[0]:
            found = points, text, form
    return found, failed


def _axes(first: Form) -> tuple[list[list[Change]], list[list[Change]]]:
    """Returns the changes that templates often want, and the changes that they seldom want."""
    usual: list[list[Change]] = [
        [_each_call(_object), _each_call(_text)],
        [_each_content(_filled), _each_content(_emptied)],
        [_each_content(_joined)],
        [_each_content(_write_json)],
    ]
    rare: list[list[Change]] = [
        [_each_call(_flat), _each_call(_wrapped)],
        [_each_tool(_flat), _each_tool(_wrapped)],
    ]
    real = [
        [[change for change in axis if change(first) != first] for axis in axes]
        for axes in (usual, rare)
    ]
    return [axis for axis in real[0] if axis], [axis for axis in real[1] if axis]


def _combined(first: Form, axes: Sequence[Sequence[Change]]) -> list[Form]:
    """The forms of the same messages, the one in which they stand first, then those with fewest changes."""
    choices = sorted(
        product(*([None, *axis] for axis in axes)),
        key=lambda choice: sum(map(bool, choice)),
    )
    return [
        reduce(lambda form, change: change(form) if change else form, choice, first)
        for choice in choices[:MOST_FORMS]
    ]


def _names(form: Form) -> Counter[str]:
    """Counts how often each function is called or offered."""
    calls = (
        function_of(call)["name"]
        for message in form.messages
        for call in message.get("tool_calls") or ()
    )
    tools = (function_of(tool) for tool in form.tools or ())
    return Counter(calls) + Counter(
        str(tool.get("name")) for tool in tools if isinstance(tool, dict)
    )


def _misses(text: str, form: Form) -> bool:
    return any(text.count(name) < count for name, count in _names(form).items())


def _points(text: str, form: Form) -> tuple[int, ...]:
    """Returns how much a text keeps of a record, and how little clutter it adds; the first number that differs
    decides.
    """
    functions = [
        function_of(call)
        for message in form.messages
        for call in message.get("tool_calls") or ()
    ]
    arguments = [_parsed(function.get("arguments")) for function in functions]
    contents = [message["content"] for message in form.messages]
    odd = {
        json.dumps(spelt, ensure_ascii=ascii)
        for value in arguments
        for spelt in _texts(value)
        for ascii in (True, False)
    }
    odd |= {str(value) for value in arguments if value is not None} - {
        spelt for value in arguments for spelt in _texts(value)
    }
    odd |= {json.dumps(content) for content in contents if is_parts(content)}
    odd |= {str(content) for content in contents if isinstance(content, dict | list)}
    said = {text_of(content).strip() for content in contents}
    leaves = {leaf for value in arguments for leaf in _leaves(value)}
    return (
        sum(map(text.count, _names(form))),
        -sum(map(text.count, odd)),
        -text.count("None"),
        sum(leaf in text for leaf in leaves),
        sum(each in text for each in said),
    )


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _texts(value: Any) -> set[str]:
    """The JSON of arguments as a text, with spaces and without."""
    if value is None:
        return set()
    return {
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    }


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    elif value not in ("", None):
        yield str(value)


# --- changes


def _each_call(change: Callable[[Message], Message]) -> Change:
    def changed(form: Form) -> Form:
        return form._replace(
            messages=[
                {
                    **message,
                    "tool_calls": [change(call) for call in message["tool_calls"]],
                }
                if message.get("tool_calls")
                else message
                for message in form.messages
            ]
        )

    return changed


def _each_tool(change: Callable[[Message], Message]) -> Change:
    return lambda form: form._replace(
        tools=form.tools and [change(tool) for tool in form.tools]
    )


def _each_content(change: Callable[[Message], Any]) -> Change:
    def changed(form: Form) -> Form:
        return form._replace(
            messages=[
                {**message, "content": change(message)} for message in form.messages
            ]
        )

    return changed


def _change_arguments(call: Message, arguments: Any) -> Message:
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _object(call: Message) -> Message:
    arguments = function_of(call).get("arguments")
    parsed = _parsed(arguments)
    if isinstance(arguments, str) and parsed is not None:
        return _change_arguments(call, parsed)
    return call


def _text(call: Message) -> Message:
    arguments = function_of(call).get("arguments")
    if isinstance(arguments, dict):
        return _change_arguments(call, json.dumps(arguments, ensure_ascii=False))
    return call


def _flat(call: Message) -> Message:
    if not isinstance(call.get("function"), dict):
        return call
    return {
        **{
            name: value
            for name, value in call.items()
            if name not in ("function", "type")
        },
        **call["function"],
    }


def _wrapped(call: Message) -> Message:
    if "function" in call:
        return {"type": "function", **call}
    return {"type": "function", "function": call}


def _filled(message: Message) -> Any:
    return "" if message["content"] is None else message["content"]


def _emptied(message: Message) -> Any:
    if message["content"] == "" and message.get("tool_calls"):
        return None
    return message["content"]


def _joined(message: Message) -> Any:
    if is_parts(message["content"]):
        return text_of(message["content"])
    return message["content"]


def _write_json(message: Message) -> Any:
    content = message["content"]
    if isinstance(content, dict | list) and not is_parts(content):
        return text_of(content)
    return content
