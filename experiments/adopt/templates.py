"""Writes what transformers makes of conversations with the templates of tests/data/golden/templates, which the tests
hold ours against.

The templates there are ours, each written to behave as one that a public model came with: what roles it knows, which
form of calls and contents it wants, what it drops, what it refuses. {% generation %} marks what is to be learned, so
that transformers itself says where that stands; the tests take the marks away, too, and ask for the same. A record's
form is turned here into the one that the template wants, by the table WANTS; ours has to find it. The conversations
stand in expected.json, beside what is made of them.

pip install transformers jinja2 && python -m experiments.adopt.templates     (no torch is needed; it prints what it compared)
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

WHERE = Path(__file__).resolve().parents[2] / "tests" / "data" / "golden" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Templates that write calls: the form of a call's arguments, and of a content beside calls.
WANTS: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(
        ["deepseek_r1", "deepseek_r1_distill", "deepseek_v3", "deepseek_v31"],
        ("text", None),
    ),
    **dict.fromkeys(
        [
            "command_r7b",
            "glm4",
            "harmony",
            "hermes",
            "kimi_k2",
            "llama31",
            "mistral_v3",
            "qwen25",
            "qwen3",
            "qwq",
        ],
        ("object", None),
    ),
    "granite": ("object", ""),
}
# The same template reads a text as well as an object: what the record has is written.
EITHER = ("qwen3", "kimi_k2")


def wanted(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns messages in the form that a template wants."""
    form, empty = WANTS.get(name, (None, None))
    result = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            changed["content"] = message["content"] or empty
            changed["tool_calls"] = [
                _called(each, form, name) for each in message["tool_calls"]
            ]
        elif isinstance(message["content"], list) and name not in ("gemma3", "llama4"):
            changed["content"] = "".join(part["text"] for part in message["content"])
        result.append(changed)
    return result


def _called(each: dict[str, Any], form: str | None, name: str) -> dict[str, Any]:
    arguments = each["function"]["arguments"]
    if isinstance(arguments, str) and form == "object" and name not in EITHER:
        arguments = json.loads(arguments)
    elif isinstance(arguments, dict) and form == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**each, "function": {**each["function"], "arguments": arguments}}


def theirs(
    template: str, messages: list[dict[str, Any]], tools: Any
) -> tuple[str, list[list[int]]]:
    """Returns the text, and the characters of it that are marked."""
    (text,), (spans,) = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **SPECIAL,
    )
    return text, [list(span) for span in spans]


def expected(name: str, template: str, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the text of a record, and the examples that are learned of it where those are not that text and its
    marks; or its refusal.
    """
    messages = wanted(record["messages"], name)
    calls = any("tool_calls" in message for message in messages)
    tools = record.get("tools")
    if calls and name not in WANTS:
        return {"refused": True}
    try:
        text, spans = theirs(template, messages, tools)
        begun = [
            theirs(template, messages[: i + 1], tools)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    except Exception:
        return {"refused": True}
    found: dict[str, Any] = {"text": text, "learned": spans}
    # Without marks each answer is an example of its own where the template writes it differently later on.
    if not all(text.startswith(each) for each, _ in begun):
        found["apart"] = [[each, ours[-1]] for each, ours in begun]
    return found


def main() -> None:
    asked = json.loads((WHERE / "expected.json").read_text())["conversations"]
    table = {
        path.stem: {
            title: expected(path.stem, path.read_text(), record)
            for title, record in asked.items()
        }
        for path in sorted(WHERE.glob("*.jinja"))
    }
    written = {"special": SPECIAL, "conversations": asked, "expected": table}
    (WHERE / "expected.json").write_text(
        json.dumps(written, ensure_ascii=False, indent=0) + "\n"
    )
    cells = [cell for row in table.values() for cell in row.values()]
    refused = sum("refused" in cell for cell in cells)
    print(
        f"{len(table)} templates x {len(asked)} conversations: {len(cells) - refused} texts, {refused} refused"
    )


if __name__ == "__main__":
    main()
