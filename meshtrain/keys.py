"""python -m meshtrain.keys [KEY]: what the keys of a config mean, from the lines that declare them (`meshtrain
config`).

    meshtrain config                    all keys, with defaults and meanings; of a section: meshtrain config mesh
    meshtrain config mesh.data          one: meaning, bounds, default, what a resume does with a change
    meshtrain config --json-schema      for editors: configs/schema.json, which configs/*.yaml name in their first line
    meshtrain config --markdown         for the reference page

Nothing of it is said twice: each comes from the line in which `meshtrain.config` declares the key.
"""

import dataclasses
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import Any, Literal, NamedTuple

from meshtrain.cli import DONE, Parser, command
from meshtrain.config import Config, ConfigError
from meshtrain.config.key import Key, meant
from meshtrain.config.load import BASE, BASE_KEY
from meshtrain.config.values import as_text, takes
from meshtrain.errors import nearest, short

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}  # of JSON


class DeclaredKey(NamedTuple):
    """A key with its path, such as mesh.data, and its declared type."""

    path: str
    hint: Any
    key: Key

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def default(self) -> str:
        if self.key.null:
            return "follows from other keys"
        return as_text(self.key.default) or "empty"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.json_schema:
        print(json_schema(), end="")
        return DONE
    named = _named(options.key)
    if options.markdown:
        print(markdown(named))
    elif options.json:
        print(json.dumps([_record(entry) for entry in named], indent=2))
    else:
        print(_one(named[0]) if named[0].path == options.key else _table(named))
    return DONE


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain config", description="Explains the keys of a config."
    )
    parser.add_argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="a key, such as mesh.data, or a section (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="prints JSON, for programs")
    parser.add_argument(
        "--json-schema",
        action="store_true",
        help="prints a JSON schema for completion in editors",
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="prints tables in Markdown, a section each",
    )
    return parser


def declared(kind: type = Config, prefix: str = "") -> Iterator[DeclaredKey]:
    """Yields every key of a config in the order of its sections."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            yield from declared(typing.cast(type, hint), f"{path}.")
        elif "key" in field.metadata:
            yield DeclaredKey(path, hint, field.metadata["key"])


def _named(name: str | None) -> list[DeclaredKey]:
    """Returns the key of a name, or all of a section; ConfigError if there is none."""
    every = list(declared())
    named = [
        entry
        for entry in every
        if name is None or entry.path == name or entry.path.startswith(f"{name}.")
    ]
    if not named:
        paths = [entry.path for entry in every]
        alike = [path for path in paths if path.rpartition(".")[2] == name]
        near = (
            f"; did you mean {meant(str(name))}?"
            if meant(str(name))
            else nearest(str(name), paths)
        )
        ending = f"; there is {', '.join(alike)}." if alike else near
        raise ConfigError(
            f"there is no key {short(name)}{ending or '; meshtrain config lists all.'}"
        )
    return named


def _record(entry: DeclaredKey) -> dict[str, Any]:
    key = entry.key
    record = {
        "key": entry.path,
        "takes": takes(entry.hint, key),
        "default": key.default,
        "follows": key.follows is not None,
    }
    return record | {"meaning": key.doc, "resume": key.resume.value}


def _one(entry: DeclaredKey) -> str:
    key = entry.key
    width = get_terminal_size().columns - 12
    follows = ", resolved from other keys" if key.follows and not key.null else ""
    lines = {
        "": key.doc,
        "takes": takes(entry.hint, key),
        "default": entry.default + follows,
        "a resume": f"with another value: {key.resume.value}",
        "set it": f"--set {entry.path}=VALUE, or in the file: "
        f"{entry.path.replace('.', ': {')}: VALUE{'}' * entry.path.count('.')}",
    }
    text = "\n".join(
        textwrap.fill(
            line,
            max(width, 40),
            initial_indent=f"  {name:<10}",
            subsequent_indent=" " * 12,
        )
        for name, line in lines.items()
        if line
    )
    return f"{entry.path}\n{text}"


def _table(entries: Sequence[DeclaredKey]) -> str:
    lines = []
    width = max(get_terminal_size().columns, 60)
    for entry in entries:
        meaning = textwrap.wrap(
            entry.key.doc, width - 4, initial_indent="    ", subsequent_indent="    "
        )
        lines += [f"{entry.path}: {entry.default}", *meaning]
    return "\n".join(lines)


def markdown(entries: Sequence[DeclaredKey] = ()) -> str:
    """Returns tables of all keys, or of `entries`, as Markdown: a section each under a heading of the third level.

    A key is a link to itself, with its path as the anchor.
    """
    lines: list[str] = []
    section = None
    every = list(entries or declared())
    sections = list(
        dict.fromkeys(entry.section for entry in every)
    )  # one may stand amid the keys of another
    for entry in sorted(every, key=lambda entry: sections.index(entry.section)):
        head, _, name = entry.path.rpartition(".")
        if head != section:
            section = head
            lines += [
                "",
                f"### {head}",
                "",
                "| key | default | takes | meaning | a resume with another value |",
                "| --- | --- | --- | --- | --- |",
            ]
        cells = (
            f"[`{name}`](#{entry.path}){{#{entry.path}}}",
            f"`{entry.default}`",
            takes(entry.hint, entry.key),
            entry.key.doc,
            entry.key.resume.value,
        )
        lines.append(
            "| "
            + " | ".join(
                cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells
            )
            + " |"
        )
    return "\n".join(lines[1:])


# --- the schema


def json_schema() -> str:
    """Returns a JSON schema of a config's YAML, for editors: they complete keys and words, and show what keys mean.

    It is wider than what is legal: a name that somebody registers is a text, and what contradicts another key is seen
    when a config is loaded.
    """
    root = _section(Config)
    base = {"description": f"{BASE_KEY.doc}.", "type": "string"}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A config of meshtrain",
        **root,
        "properties": {BASE: base, **root["properties"]},
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _section(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    properties = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            properties[field.name] = _section(typing.cast(type, hint))
        elif "key" in field.metadata:
            key: Key = field.metadata["key"]
            default = {} if key.null else {"default": key.default}
            properties[field.name] = {
                "description": f"{key.doc}.",
                **default,
                **_schema(hint, key),
            }
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def _schema(hint: Any, key: Key) -> dict[str, Any]:
    """Returns the schema of a value of a `hint` within the bounds of its key."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {
            "anyOf": [
                {"type": "null"} if a is type(None) else _schema(a, key) for a in args
            ]
        }
    if origin is Literal:
        schema: dict[str, Any] = {"enum": list(args)}
    elif origin is tuple:
        schema = {"type": "array", "items": _schema(args[0], key)}
    elif key.one_of is not None:
        schema = {"anyOf": [{"enum": list(key.one_of)}, {"type": "string"}]}
    else:
        bounds = {
            "minimum": key.least,
            "exclusiveMinimum": key.above,
            "maximum": key.most,
        }
        schema = {"type": TYPES[hint]} | {
            name: bound for name, bound in bounds.items() if bound is not None
        }
    return {"anyOf": [schema, {"type": "null"}]} if key.null else schema


if __name__ == "__main__":
    sys.exit(main())
