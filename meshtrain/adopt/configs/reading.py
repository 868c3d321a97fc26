"""A file of theirs: of which program it is, and its keys with the lines that they stand in."""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from meshtrain.adopt.configs import deepspeed, llama_factory
from meshtrain.adopt.configs.rows import Given, Table, row_of
from meshtrain.config.tree import compose, problem
from meshtrain.errors import ConfigError, short
from meshtrain.text import read_text

LLAMA_FACTORY, DEEPSPEED = "LLaMA-Factory", "DeepSpeed"
TABLES: dict[str, Table] = {LLAMA_FACTORY: llama_factory.TABLE, DEEPSPEED: deepspeed.TABLE}
MOST_BYTES = 256 * 1024
MISSPELT = 0.85  # likeness from which on an unknown key is taken for another one's misspelling


def read(path: str | Path) -> tuple[str, list[Given]]:
    """The program that a file is for, and its keys in their order; ConfigError if it is for none that we know."""
    name = short(path)
    takes = "a YAML file of LLaMA-Factory, or a JSON file of DeepSpeed"
    content = read_text(path, "config file", f"this command takes {takes}", (".yaml", ".yml", ".json"), MOST_BYTES)
    if str(path).endswith(".json"):
        _check_json(content, name)
    try:
        # No text in JSON holds a bare tab, so those that there are stand between its words, where YAML takes none.
        root = compose(content.replace("\t", " ") if str(path).endswith(".json") else content)
    except yaml.YAMLError as error:
        line, reason = problem(error)
        raise ConfigError(f"{name}{f', line {line}' if line else ''} is not valid YAML: {reason}.") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name} holds no keys with values; give {takes}.")
    given = list(_given(root, "", name))
    known = {kind: sum(row_of(table, one.key) is not None for one in given) for kind, table in TABLES.items()}
    # What both have decides nothing; then the name does.
    usual = DEEPSPEED if str(path).endswith(".json") else LLAMA_FACTORY
    kind = max(known, key=lambda kind: (known[kind], kind == usual))
    if not known[kind]:
        ours = ", as our own configs do" if any(one.key.startswith(("model.", "train.")) for one in given) else ""
        raise ConfigError(f"{name} has no key of LLaMA-Factory or of DeepSpeed{ours}; give {takes}.")
    return kind, given


def _check_json(content: str, name: str) -> None:
    try:
        json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}, line {error.lineno} is not valid JSON: {error.msg.lower()}.") from None


def _given(node: yaml.MappingNode, prefix: str, name: str) -> Iterator[Given]:
    """The keys of a mapping and of those in it; ConfigError for one that stands there twice."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(f"{name}: {key} stands there twice, in lines {seen[key]} and {line}.")
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _given(value_node, f"{key}.", name)
        else:
            yield Given(key, _value(value_node), name, line)


def _value(node: yaml.Node) -> Any:
    """Text, number, switch, null or list; 1e-4 is a number here, which YAML takes for a text."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value) for key, value in node.value}
    kind, written = node.tag.rpartition(":")[2], str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return written.lower() in ("true", "yes", "on")
    if getattr(node, "style", None) is None:
        for convert in (int, float):
            try:
                return convert(written)
            except ValueError:
                continue
    return written


def unknown(kind: str, given: Given) -> str:
    """Why a key that no table has is left out; ConfigError where it is a misspelt one that would be taken over."""
    table = TABLES[kind]
    names = [name for name in table if not name.endswith(".")]
    alike = difflib.get_close_matches(given.key, names, n=1, cutoff=MISSPELT)
    if alike and table[alike[0]].becomes is not None:
        raise ConfigError(f"{given.where}: {kind} has no key {short(given.key)}; did you mean {alike[0]}?")
    return f"no key of {kind}'s that is known here" + (f" (like {alike[0]}, which is left out too)" if alike else "")
