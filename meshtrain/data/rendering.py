"""Jinja as chat templates expect it.

A template comes with a model from anywhere and is a program: as in `transformers`, the sandbox keeps it from files and
from Python's insides; `limits` keeps it from taking for ever.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError

from meshtrain.data.limits import LimitedEnvironment


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what stands between is put between two marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.used = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(
            line
        )

    def _marked(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, by which Python's insides are reached."""

    def __init__(self, /, *pairs: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the name {name} in a namespace")
        super().__setitem__(name, value)


def _no_file(name: str) -> str:
    raise SecurityError(f"the file {name}")


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def environment(now: float) -> LimitedEnvironment:
    """Makes what chat templates expect, as transformers' documentation says ("Writing a chat template"): blocks
    trimmed, and these functions.

    `strftime_now` gives a time that the input decides, so that the same input becomes the same tokens on any day.
    """
    sandbox = LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        loader=jinja2.FunctionLoader(_no_file),
    )
    sandbox.filters["tojson"] = _json
    sandbox.limit()

    def strftime_now(form: str) -> str:
        sandbox.limits.format(form)
        return datetime.fromtimestamp(now, UTC).strftime(form)

    sandbox.globals.update(
        raise_exception=_raise_exception, strftime_now=strftime_now, namespace=Namespace
    )
    return sandbox
