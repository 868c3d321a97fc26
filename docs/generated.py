"""Pages that are made when the documentation is built, from what holds the facts; a hook of mkdocs.

    README.md, CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, experiments/README.md    as pages, with links that lead to pages
    the lines of the config's keys, the parsers of the commands                      tables in place of <!-- generated: ... -->
    docstrings                                                                       the API reference in api/, by pdoc

A fact stays where it is; what is made here has no source of its own.
"""

import argparse
import sys
import tempfile
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for experiments

from experiments import api_reference  # noqa: E402
from meshtrain.cli import Parser  # noqa: E402
from meshtrain.commands import GROUPS, parser_of  # noqa: E402
from meshtrain.config import Config  # noqa: E402
from meshtrain.config.key import LARGEST, Key  # noqa: E402
from meshtrain.config.values import as_text  # noqa: E402

# Files of the repository that are pages, and pictures that they show.
PAGES = {
    "README.md": "index.md",
    "experiments/README.md": "measurements.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
PICTURES = {
    "experiments/interleaved.svg": "experiments/interleaved.svg",
    "experiments/communicate/crossing.svg": "communicate/crossing.svg",
    "experiments/communicate/parameter_server.svg": "communicate/parameter_server.svg",
}
ALONE = ("LICENSE", "CITATION.cff")  # linked to in the repository, but no pages
served = False


def on_startup(command: str, **_: Any) -> None:
    """Leaves the API reference out of `mkdocs serve`, which would make it at every change."""
    global served
    served = command == "serve"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that lie elsewhere in the repository, and the API reference."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_with_links((ROOT / source).read_text())))
    for source, picture in PICTURES.items():
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / source)))
    if served:
        files.append(File.generated(config, "api/index.html", content="left out of mkdocs serve"))
        return files
    with tempfile.TemporaryDirectory() as directory:
        api_reference.build(Path(directory), sources=False)
        for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            name = f"api/{path.relative_to(directory).as_posix()}"
            files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Puts tables in place of the comments that ask for them."""
    for word, made in (("keys", key_tables), ("commands", command_tables)):
        comment = f"<!-- generated: {word} -->"
        if comment in markdown:
            markdown = markdown.replace(comment, "\n".join(made()))
    return markdown


def _with_links(text: str) -> str:
    """Returns the text of a file of the repository with links to files as links to pages."""
    text = text.replace("](docs/", "](")
    for source, page in PAGES.items():
        text = text.replace(f"]({source})", f"]({page})")
    for name in ALONE:
        for words in ("how to cite", "license"):
            text = text.replace(f"[{words}]({name})", f"{words}: `{name}`")
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# --- keys


def key_tables() -> Iterator[str]:
    """Yields a table of each section's keys."""
    yield from _section("", Config)


def _section(path: str, kind: type) -> Iterator[str]:
    hints, rows, below = typing.get_type_hints(kind), [], []
    for declared in fields(kind):
        hint, name = hints[declared.name], f"{path}{declared.name}"
        if is_dataclass(hint):
            below.append((f"{name}.", typing.cast(type, hint)))
        elif "key" in declared.metadata:
            rows.append(_row(name, hint, declared.metadata["key"]))
    if rows:
        yield f"### {path.removesuffix('.')}\n"
        yield "| key | default | takes | meaning | a resume with another value |"
        yield "| --- | --- | --- | --- | --- |"
        yield from rows
        yield ""
    for name, section in below:
        yield from _section(name, section)


def _row(name: str, hint: Any, key: Key) -> str:
    default = "*follows*" if key.null else f"`{as_text(key.default)}`" if as_text(key.default) else '`""`'
    cells = name.rpartition(".")[2], default, _takes(hint, key), _cell(key.doc), _cell(key.resume.value)
    return f"| `{cells[0]}` | {' | '.join(cells[1:])} |"


def _takes(hint: Any, key: Key) -> str:
    """Returns what is legal: words, or a type with its bounds."""
    if key.one_of is not None:
        return ", ".join(f"`{word}`" for word in key.one_of)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{as_text(word)}`" for word in parts)
    if origin is tuple:
        return f"list: {_takes(parts[0], key)}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join("`null`" if part is type(None) else _takes(part, key) for part in parts)
    word = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}[hint]
    bounds = [f"{sign} {bound:g}" for sign, bound in (("≥", key.least), (">", key.above), ("≤", key.most)) if bound is not None and bound not in LARGEST.values()]  # fmt: skip
    return " ".join([word, ", ".join(bounds)]).strip()


# --- commands


def command_tables() -> Iterator[str]:
    """Yields a section for each command, with its usage and options."""
    for name, meaning in (entry for group in GROUPS.values() for entry in group.items()):
        parser = parser_of(name)
        yield f"## {name}\n\n`meshtrain {name}` {_cell(meaning)}.\n"
        yield from _options(parser)
        for word, below in parser.commands.items():
            yield f"### {name} {word}\n"
            if below.description:
                yield f"{_cell(below.description[0].upper() + below.description[1:].rstrip('.'))}.\n"
            yield from _options(below)


def _options(parser: Parser) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            named = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest
            value = "" if action.nargs == 0 else str(action.metavar or named)
            words = " ".join(filter(None, [", ".join(action.option_strings), value]))
            meaning = _cell((action.help or "") % vars(action))
            rows.append(f"| `{words.replace('|', chr(92) + '|')}` | {meaning} |")
    if rows:
        yield "| argument | meaning |\n| --- | --- |"
        yield from rows
        yield ""
