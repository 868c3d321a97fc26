"""The chat template of a tokenizer: found beside it, and rendered in a process that can do no harm (`rendering`).

There is no registry of templates here, which would drift from the models': a conversation becomes the text that the template which came
with the tokenizer makes of it. As in `transformers`, `chat_template.jinja` goes before the `chat_template` of `tokenizer_config.json`,
of several in one file the one called `default` counts, and a template is told the special tokens by name (`bos_token` ...).
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.data.chat import Unfit
from meshtrain.errors import ConfigError, short
from meshtrain.text import read_text

CONFIG, JINJA = "tokenizer_config.json", "chat_template.jinja"
MOST_BYTES = 16 << 20  # of either file
RENDERING = Path(__file__).with_name("rendering.py")
SECONDS = 10.0  # of processor time that a template may take for a conversation
MEMORY = 1 << 30  # bytes that it may need
MOST_TEXT = 1 << 24  # characters that it may make


@dataclass(frozen=True)
class TemplateText:
    """A template, where it was found, and what it is told of the tokenizer."""

    name: str
    text: str
    special: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Names the template; what it makes of a conversation depends on `special` too."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def find_template(template: str | None, tokenizer: str) -> TemplateText:
    """What `data.template` names, or the one beside `data.tokenizer`; ConfigError if there is none."""
    beside = None if tokenizer == "byte" else Path(os.path.expanduser(tokenizer)).parent
    config = _config(beside / CONFIG) if beside is not None and (beside / CONFIG).is_file() else {}
    special = {name: text for name in config if name.endswith("_token") and (text := _token(config[name]))}
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
    return read_text(
        path,
        "chat template",
        "data.template takes a Jinja file or a tokenizer_config.json",
        (".jinja", ".json"),
        MOST_BYTES,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_text(path))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"{short(path)} is damaged: it is no JSON object.")
    return config


def _of_config(config: dict[str, Any], path: object) -> str:
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str) or not found:
        raise ConfigError(f"{short(path)} holds no chat_template (of several, one must be called default).")
    return found


def _token(given: Any) -> str | None:
    """A special token, which stands as itself or as an object with its content."""
    found = given.get("content") if isinstance(given, dict) else given
    return found if isinstance(found, str) else None


class ChatTemplate:
    """Renders conversations; the process that does so is started at the first and ends with `close`, or with this one.

    ConfigError: a template that is no Jinja, computes for more than SECONDS, needs more than MEMORY, or asks for a file or for
    Python's insides. Nothing of it runs in this process.
    """

    def __init__(self, found: TemplateText, now: float = 0.0) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError(
                "chat templates need the jinja2 library, which is not installed: pip install 'meshtrain[chat]'."
            )
        self.found = found
        # A session of its own: who interrupts us at a terminal does not interrupt it, and it ends when its input does.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(RENDERING)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        limits = {"seconds": SECONDS, "memory": MEMORY, "characters": MOST_TEXT}
        self.marks: bool = self._ask({"template": found.text, "now": now, **limits}, "")["marks"]

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Any, cuts: Sequence[tuple[int, bool]], name: str
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """(a text for each cut, what {% generation %} marks of the first: characters [begin, end)); Unfit if it takes no such messages.

        A cut (count, prompt) is the first `count` messages, with `prompt` also the beginning of an answer.
        name: of the record, for an error.
        """
        values = {**self.found.special, "tools": tools, "documents": None}
        answer = self._ask(
            {"messages": list(messages), "values": values, "cuts": list(cuts)}, f" (conversation {short(name)})"
        )
        if "problem" in answer:
            raise Unfit("not taken by the template", f"({short(answer['problem'])})")
        return answer["texts"], [(begin, end) for begin, end in answer["spans"]]

    def _ask(self, request: dict[str, Any], name: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request, ensure_ascii=False).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            code = self._process.wait()
            self.close()
            late = f"computes for more than {SECONDS:g} s"
            raise self._refused(
                late if code == -signal.SIGPROF else f"ended the process that renders it ({code})", name
            )
        answer = json.loads(line)
        if "refused" in answer:
            self.close()
            raise self._refused(answer["refused"], name)
        return answer

    def _refused(self, what: str, name: str) -> ConfigError:
        return ConfigError(
            f"the chat template {self.found.name} {what}{name}; mend it, or give another with data.template."
        )

    def close(self) -> None:
        """Ends the process, which has nothing to lose."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()
