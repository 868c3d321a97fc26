"""The chat template of a tokenizer: found beside it, and rendered in Jinja's sandbox (`rendering`).

There is no registry of templates here, which would drift from the models': a conversation becomes the text that the template which came
with the tokenizer makes of it. As in `transformers`, `chat_template.jinja` goes before the `chat_template` of `tokenizer_config.json`,
of several in one file the one called `default` counts, and a template sees the special tokens by name (`bos_token` ...).
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from meshtrain.data.chat import Unfit
from meshtrain.errors import ConfigError, not_installed, short
from meshtrain.files import read_text

CONFIG, JINJA = "tokenizer_config.json", "chat_template.jinja"
MOST_BYTES = 16 << 20  # of either file


@dataclass(frozen=True)
class TemplateText:
    """A template, its path, and the special tokens of the tokenizer, which it sees by name."""

    name: str
    text: str
    special: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Names the template; what it makes of a conversation depends on `special` too."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def find_template(template: str | None, tokenizer: str) -> TemplateText:
    """Reads the template that `data.template` names, or the one beside `data.tokenizer`; ConfigError if there is none."""
    beside = None if tokenizer == "byte" else Path(os.path.expanduser(tokenizer)).parent
    config = _config(beside / CONFIG) if beside is not None and (beside / CONFIG).is_file() else {}
    special = _special_tokens(config)
    if template is not None:
        path = Path(os.path.expanduser(template))
        if path.suffix == ".json":
            return TemplateText(short(template), _of_config(_config(path), template), special)
        return TemplateText(short(template), _text(path), special)
    if beside is not None and (beside / JINJA).is_file():
        return TemplateText(str(beside / JINJA), _text(beside / JINJA), special)
    if config.get("chat_template"):
        return TemplateText(str(beside / CONFIG), _of_config(config, beside / CONFIG), special)  # type: ignore[operator]
    missing = "the tokenizer byte has none"
    if beside is not None:
        missing = (
            f"beside the tokenizer {short(tokenizer)} there is neither {JINJA} nor a {CONFIG} with a chat_template"
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
        raise ConfigError(f"{short(path)} is damaged: it is no JSON object.")
    return config


def _of_config(config: dict[str, Any], path: object) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if not isinstance(template, str) or not template:
        raise ConfigError(f"{short(path)} holds no chat_template (of several, one must be called default).")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name; each stands in the file as itself or as an object with its content."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str) and token}


class ChatTemplate:
    """Renders conversations. ConfigError: a template that is no Jinja, or asks for a file or for Python's insides."""

    def __init__(self, source: TemplateText, now: float = 0.0) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise not_installed("chat templates need the jinja2 library", "chat")
        from jinja2 import TemplateSyntaxError

        from meshtrain.data.rendering import environment

        self.source, self._environment = source, environment(now)
        try:
            self._template = self._environment.from_string(source.text)
        except TemplateSyntaxError as error:
            raise self._refused(f"is not Jinja (line {error.lineno}: {error.message})") from None
        # What is constant in it is computed now, and may fail in any way.
        except Exception as error:
            raise self._refused(f"cannot be compiled ({short(str(error) or type(error).__name__)})") from None
        self.marks: bool = self._environment.used  # type: ignore[attr-defined]

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Any, cuts: Sequence[tuple[int, bool]], name: str
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """(a text for each cut, what {% generation %} marks of the first: characters [begin, end)); Unfit if it takes no such messages.

        A cut (count, prompt) is the first `count` messages, with `prompt` also the beginning of an answer.
        name: of the record, for an error.
        """
        from jinja2.exceptions import SecurityError

        from meshtrain.data.rendering import PRIVATE, unmarked

        request = json.dumps([messages, tools], ensure_ascii=False) + self.source.text
        begin, end = islice((mark for mark in PRIVATE if mark not in request), 2)
        texts: list[str] = []
        try:
            for count, prompt in cuts:
                # Only of the first are spans asked for.
                self._environment.marks = ("", "") if texts else (begin, end)  # type: ignore[attr-defined]
                values = {**self.source.special, "tools": tools, "documents": None, "add_generation_prompt": prompt}
                texts.append(self._template.render(messages=list(messages[:count]), **values))
        except SecurityError as error:
            raise self._refused(f"asks for what no template may have ({error}) (conversation {short(name)})") from None
        except Exception as error:
            raise Unfit("not taken by the template", f"({short(str(error) or type(error).__name__)})") from None
        texts[0], spans = unmarked(texts[0], begin, end)
        return texts, spans

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"the chat template {self.source.name} {why}; mend it, or give another with data.template.")
