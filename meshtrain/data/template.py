"""The chat template of a tokenizer: found beside it, and rendered in Jinja's sandbox (`rendering`).

Templates are not registered here, where they would drift from the models': a conversation becomes the text that the
template which came with the tokenizer makes of it. As in `transformers`, `chat_template.jinja` goes before the
`chat_template` of `tokenizer_config.json`, and a template sees the special tokens by name (`bos_token` ...). If there
are several, in one file or in `additional_chat_templates/`, a conversation with tools has the one called `tool_use`,
and every other has `default`.
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from meshtrain.data.forms import THOUGHTS, Form, best, spoken
from meshtrain.data.messages import TOOL, Message, Unfit
from meshtrain.errors import ConfigError, not_installed, short
from meshtrain.files import read_text

CONFIG = "tokenizer_config.json"
JINJA = "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
DEFAULT = "default"
TOOL_USE = "tool_use"
# Beside chat_template.jinja, where a model has another template for conversations with tools.
OF_TOOLS = Path("additional_chat_templates") / f"{TOOL_USE}.jinja"
MOST_BYTES = 16 << 20  # of either file
MOST_CHARACTERS = 1 << 18  # of one template
# Characters of no script; two of them that a conversation does not have are its marks.
PRIVATE = tuple(map(chr, range(0xF0000, 0xF0400)))
VALUES = "chat_template_kwargs"
# Fields of records and of messages that say something, and that not every template reads.
READ = (
    "tools",
    "documents",
    VALUES,
    "tool_calls",
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
    "tags",
)


@dataclass(frozen=True)
class TemplateText:
    """A template, its path, and the special tokens of the tokenizer, which it sees by name."""

    name: str
    text: str
    special: dict[str, str] = field(default_factory=dict)
    # The template of conversations with tools, where it is another
    of_tools: str | None = None

    @property
    def digest(self) -> str:
        """Names the template; what it makes of a conversation depends on `special` too."""
        text = (
            self.text
            if self.of_tools is None
            else json.dumps([self.text, self.of_tools])
        )
        return hashlib.sha256(text.encode()).hexdigest()


def find_template(template: str | None, tokenizer: str) -> TemplateText:
    """Reads the template that `data.template` names, or the one beside `data.tokenizer`; ConfigError if there is
    none.
    """
    beside = None if tokenizer == "byte" else Path(os.path.expanduser(tokenizer)).parent
    config = (
        _config(beside / CONFIG)
        if beside is not None and (beside / CONFIG).is_file()
        else {}
    )
    mapped = (
        _config(beside / SPECIAL)
        if beside is not None and (beside / SPECIAL).is_file()
        else {}
    )
    special = _special_tokens(mapped) | _special_tokens(config)
    if template is not None:
        path = Path(os.path.expanduser(template))
        named = (
            _read_listed(_config(path), template)
            if path.suffix == ".json"
            else _read_jinja(path)
        )
        return _checked(short(template), special, *named)
    if beside is not None and (beside / JINJA).is_file():
        return _checked(str(beside / JINJA), special, *_read_jinja(beside / JINJA))
    if beside is not None and config.get("chat_template"):
        text, of_tools = _read_listed(config, beside / CONFIG)
        if (beside / OF_TOOLS).is_file():
            of_tools = _text(beside / OF_TOOLS)
        return _checked(str(beside / CONFIG), special, text, of_tools)
    missing = "the tokenizer byte has none"
    if beside is not None:
        missing = (
            f"beside the tokenizer {short(tokenizer)} there is neither {JINJA} nor a {CONFIG} with a "
            "chat_template"
        )
    raise ConfigError(
        f"conversations need a chat template, but {missing}; give one with data.template (prepare: --template)."
    )


def _text(path: Path) -> str:
    takes = "data.template takes a Jinja file or a tokenizer_config.json"
    return read_text(path, "chat template", takes, (".jinja", ".json"), MOST_BYTES)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_text(path))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"{short(path)} is damaged: it is not a JSON object.")
    return config


def _checked(
    name: str, special: dict[str, str], text: str, of_tools: str | None
) -> TemplateText:
    for each in filter(None, (text, of_tools)):
        if len(each) > MOST_CHARACTERS:
            raise ConfigError(
                f"the chat template {short(name)} has {len(each):,} characters, but at most {MOST_CHARACTERS:,} are "
                "taken."
            )
    return TemplateText(name, text, special, of_tools)


def _read_jinja(path: Path) -> tuple[str, str | None]:
    """The text of a Jinja file, and the one for tools, which a tokenizer's own template may have in a folder beside
    it.
    """
    more = path.parent / OF_TOOLS
    return _text(path), _text(more) if path.name == JINJA and more.is_file() else None


def _read_listed(config: dict[str, Any], path: object) -> tuple[str, str | None]:
    template = config.get("chat_template")
    of_tools = None
    if isinstance(template, list):
        by_name = {
            entry["name"]: entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = by_name.get(DEFAULT)
        of_tools = by_name.get(TOOL_USE)
    if not isinstance(template, str) or not template:
        raise ConfigError(
            f"{short(path)} holds no chat_template (of several, one must be called {DEFAULT})."
        )
    return template, of_tools if isinstance(of_tools, str) and of_tools else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name; each stands in the file as itself or as an object with its content."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in tokens.items()
    }
    return {
        name: token
        for name, token in tokens.items()
        if isinstance(token, str) and token
    }


class CompiledTemplate:
    """One template, compiled: whether it marks answers, the variables that it reads, and the words that it compares
    with.
    """

    def __init__(self, text: str, environment: Any) -> None:
        from jinja2 import nodes

        environment.used = False
        environment.limits.reset(len(text))
        tree = environment.parse(text)
        self.template = environment.from_string(text)
        self.marks: bool = environment.used
        self.variables = {
            name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"
        }
        self.words = {
            constant.value
            for constant in tree.find_all(nodes.Const)
            if isinstance(constant.value, str)
        }


class Watched(dict[str, Any]):
    """A message that notes which of its fields are read."""

    def __init__(self, message: Message, read: set[str]) -> None:
        super().__init__(message)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def items(self) -> Any:
        self._read.update(self)
        return super().items()

    def values(self) -> Any:
        self._read.update(self)
        return super().values()

    def __repr__(self) -> str:
        self._read.update(self)
        return super().__repr__()


class ChatTemplate:
    """Renders conversations.

    ConfigError: a template that is no Jinja, or asks for a file, for Python's insides, or for too much.
    """

    def __init__(self, source: TemplateText, now: float = 0.0) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise not_installed("chat templates need the jinja2 library", "chat")
        from jinja2 import TemplateSyntaxError

        from meshtrain.data.rendering import environment

        self.source = source
        self._environment = environment(now)
        self._read: set[str] = set()
        try:
            self._usual = CompiledTemplate(source.text, self._environment)
            self._of_tools = (
                self._usual
                if source.of_tools is None
                else CompiledTemplate(source.of_tools, self._environment)
            )
        except TemplateSyntaxError as error:
            raise self._refused(
                f"is not Jinja (line {error.lineno}: {error.message})"
            ) from None
        # What is constant in it is computed now, and may fail in any way.
        except Exception as error:
            raise self._refused(
                f"cannot be compiled ({short(str(error) or type(error).__name__)})"
            ) from None

    def compiled(self, tools: Any) -> CompiledTemplate:
        """Returns the template of a conversation with these tools, or without any."""
        return self._of_tools if tools else self._usual

    def unread(
        self, messages: Sequence[Message], tools: Any, values: Mapping[str, Any]
    ) -> list[str]:
        """Returns the fields of the conversation rendered last that its template has not read, of those that say
        something (READ).
        """
        names = ({"tools"} if tools else set()) | set(values)
        given = {
            name if name in READ else VALUES
            for name in names - self.compiled(tools).variables
        }
        there = {
            field
            for message in messages
            for field in message
            if message["role"] != TOOL and message[field]
        }
        read = self._read | (set(THOUGHTS) if self._read & set(THOUGHTS) else set())
        return [field for field in READ if field in given or field in there - read]

    def render(
        self,
        messages: Sequence[Message],
        tools: Any,
        cuts: Sequence[tuple[int, bool]],
        name: str,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """(a text for each cut, what {% generation %} marks of the first: characters [begin, end)); Unfit if it takes
        no such messages.

        A cut (count, prompt) is the first `count` messages, with `prompt` also the beginning of an answer.
        name: of the record, for an error; values: what the record itself gives the template.

        The template sees what the record says, calls and contents as they stand. Where they have another form, and the
        template fails on this one or writes it worse (`forms`), it sees that.
        """
        compiled = self.compiled(tools)
        try:
            request = json.dumps([messages, tools, values], ensure_ascii=False)
        except RecursionError:
            raise Unfit("no conversation", "(nested too deeply)") from None
        begin, end = islice(
            (mark for mark in PRIVATE if mark not in request + self.source.text), 2
        )
        given = {"documents": None, **(values or {}), **self.source.special}

        def rendered(
            form: Form, count: int, prompt: bool, marks: tuple[str, str] = ("", "")
        ) -> str:
            # What was marked of another text would stand in this one.
            self._environment.marks = marks
            self._environment.limits.reset(len(request))
            values = {**given, "tools": form.tools, "add_generation_prompt": prompt}
            return self._written(
                compiled, {**values, "messages": form.messages[:count]}, name
            )

        try:
            self._read = set()
            known = Form(spoken(messages, compiled.words), tools)
            form = best(known, lambda form: rendered(form, len(messages), False))
            (count, prompt), *others = cuts
            # Only of the first are spans asked for.
            texts = [rendered(form, count, prompt, (begin, end))]
            texts += [rendered(form, count, prompt) for count, prompt in others]
        except ConfigError:
            raise
        except Exception as error:
            raise Unfit(
                "not taken by the template",
                f"({short(str(error) or type(error).__name__)})",
            ) from None
        texts[0], spans = unmarked(texts[0], begin, end)
        return texts, spans

    def _written(
        self, compiled: CompiledTemplate, values: dict[str, Any], name: str
    ) -> str:
        """Returns the text of a template, and notes which fields of the messages it reads."""
        from jinja2.exceptions import SecurityError

        watched = [Watched(message, self._read) for message in values["messages"]]
        try:
            return compiled.template.render({**values, "messages": watched})
        except SecurityError as error:
            raise self._refused(
                f"asks for what no template may have ({error}) (conversation {short(name)})"
            ) from None

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"the chat template {self.source.name} {why}; mend it, or give another with data.template."
        )


def unmarked(text: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns a text without its marks, and the spans between them, which may nest: characters [begin, end)."""
    spans = []
    depth = 0
    at = 0
    began = 0
    for piece in re.split(f"([{begin}{end}])", text):
        if piece == begin:
            began = began if depth else at
            depth += 1
        elif piece == end:
            depth -= 1
            if depth == 0 and at > began:
                spans.append((began, at))
        else:
            at += len(piece)
    return text.replace(begin, "").replace(end, ""), spans
