"""Strict YAML: what is read, where it stood, and one plain sentence when it is wrong.

Values are decoded by the type that `schema` declares, since YAML itself reads `1e-3` as a string. No loader that we know gives
`--set a.b=c` over YAML with line numbers and a suggestion, hence this one.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from meshtrain.config.check import check, resolve
from meshtrain.config.errors import ConfigError
from meshtrain.config.schema import Config

NULL_TAG, TRUE, FALSE = "tag:yaml.org,2002:null", {"true", "yes", "on"}, {"false", "no", "off"}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The checked, resolved config of a YAML file (None: of the defaults) with `key.path=value` overrides, in their order.

    ConfigError (one sentence) otherwise.
    """
    node = _read(Path(path)) if path is not None else None
    config = _section(Config, node, "", str(path)) if node is not None else Config()
    for override in overrides:
        config = _override(config, override)
    config = resolve(config)
    check(config)
    return config


def decode(values: dict[str, Any]) -> Config:
    """A checked config from nested dicts, for notebooks and tests."""
    node = yaml.compose(yaml.safe_dump(values)) if values else None
    config = resolve(_section(Config, node, "", "the given values") if node is not None else Config())
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The whole config as YAML; `load` of it gives an equal config."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    return yaml.safe_dump(plain(config), sort_keys=False, width=120)


def read_section(kind: type, path: Path, what: str, flag: str) -> Any:
    """A dataclass of `schema.key` fields from a YAML file of its own, as strictly as a config; `what` and `flag` name it in errors."""
    return _section(kind, _read(path, what, flag), "", str(path))


def _read(path: Path, what: str = "config file", flag: str = "--config") -> yaml.Node:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
            if path.parent.is_dir()
            else []
        )
        raise ConfigError(
            f"there is no {what} {path}" + (f"; did you mean {path.parent / near[0]}?" if near else ".")
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; {flag} takes a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; {flag} takes a YAML file in UTF-8.") from None
    try:
        node = yaml.compose(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{where} is not valid YAML: {problem}.") from None
    if node is None:
        raise ConfigError(f"{path} is empty; it needs at least one section, such as 'mesh: {{data: 2}}'.")
    return node


def _section(kind: type, node: yaml.Node, prefix: str, source: str) -> Any:
    """A dataclass from a YAML mapping; keys it leaves out keep their defaults."""
    what = f"section {prefix[:-1]!r}" if prefix else "a config"
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_at(source, node)}: {what} must be a mapping of keys to values, not {_shape(node)}.")
    hints, given = typing.get_type_hints(kind), {}
    for key_node, value_node in node.value:
        name = str(key_node.value)
        if name not in hints:
            raise ConfigError(
                f"{_at(source, key_node)}: there is no {'key' if prefix else 'section'} {prefix}{name}{_nearest(name, list(hints)) or _legal(hints)}"
            )
        if name in given:
            raise ConfigError(f"{_at(source, key_node)}: {prefix}{name} stands here twice.")
        if dataclasses.is_dataclass(hints[name]):
            empty = value_node.tag == NULL_TAG
            given[name] = (
                hints[name]() if empty else _section(typing.cast(type, hints[name]), value_node, f"{name}.", source)
            )
        else:
            given[name] = _value(kind, name, hints[name], value_node, f"{_at(source, value_node)}: {prefix}{name}")
    return kind(**given)


def _override(config: Config, text: str) -> Config:
    path, equals, value = text.partition("=")
    section_name, dot, name = path.strip().partition(".")
    source = f"--set {text}"
    if not equals or not dot or not name:
        raise ConfigError(f"{source}: write --set section.key=value, for example --set mesh.data=2.")
    sections = typing.get_type_hints(Config)
    if section_name not in sections:
        raise ConfigError(
            f"{source}: there is no section {section_name}{_nearest(section_name, list(sections)) or _legal(sections)}"
        )
    section = getattr(config, section_name)
    hints = typing.get_type_hints(type(section))
    if name not in hints:
        raise ConfigError(
            f"{source}: there is no key {section_name}.{name}{_nearest(name, list(hints)) or _legal(hints)}"
        )
    try:
        node = yaml.compose(value) if value.strip() else yaml.ScalarNode("tag:yaml.org,2002:str", "")
    except yaml.YAMLError:
        node = yaml.ScalarNode("tag:yaml.org,2002:str", value)
    decoded = _value(type(section), name, hints[name], typing.cast(yaml.Node, node), f"{source}: {section_name}.{name}")
    return dataclasses.replace(config, **{section_name: dataclasses.replace(section, **{name: decoded})})


def _value(kind: type, name: str, hint: Any, node: yaml.Node, where: str) -> Any:
    decoded = _decode(hint, node, where)
    bounds = next(f.metadata for f in dataclasses.fields(kind) if f.name == name)
    for number in decoded if isinstance(decoded, tuple) else (decoded,):
        if isinstance(number, int | float) and not isinstance(number, bool):
            if bounds["least"] is not None and not number >= bounds["least"]:
                raise ConfigError(f"{where} is {number}; it must be at least {bounds['least']}.")
            if bounds["above"] is not None and not number > bounds["above"]:
                raise ConfigError(f"{where} is {number}; it must be above {bounds['above']}.")
            if bounds["most"] is not None and not number <= bounds["most"]:
                raise ConfigError(f"{where} is {number}; it must be at most {bounds['most']}.")
    return decoded


def _decode(hint: Any, node: yaml.Node, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if node.tag == NULL_TAG:
            return None
        return _decode(next(a for a in args if a is not type(None)), node, where)
    if origin is tuple:
        if isinstance(node, yaml.SequenceNode):
            return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(node.value))
        raise ConfigError(
            f"{where} is {_shape(node)}; it must be a list, such as [{'2, 3' if args[0] is int else 'qkv, mlp_out'}]."
        )
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where} is {_shape(node)}; it must be {_expected(hint)}.")
    text = str(node.value)
    wrong = ConfigError(f"{where} is {text!r}; it must be {_expected(hint)}.")
    if origin is Literal:
        choices = {str(a): a for a in args}
        if text in choices:
            return choices[text]
        raise ConfigError(
            f"{where} is {text!r}; it must be one of {', '.join(choices)}{_nearest(text, list(choices)) or '.'}"
        )
    if node.tag == NULL_TAG or (text == "" and hint is not str):
        raise ConfigError(f"{where} has no value; it must be {_expected(hint)}.")
    if hint is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise wrong
    if hint is str:
        if text == "":
            raise ConfigError(f"{where} is empty; it must be {_expected(hint)}.")
        return text
    try:
        number = hint(text.replace("_", "")) if hint is int else float(text)
    except ValueError:
        raise wrong from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ConfigError(f"{where} is {text!r}; it must be a finite number.")
    return number


def _expected(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        hint, "one of " + ", ".join(map(str, typing.get_args(hint)))
    )


def _at(source: str, node: yaml.Node) -> str:
    return (
        f"{source}, line {node.start_mark.line + 1}"
        if node.start_mark is not None and not source.startswith("the given")
        else source
    )


def _shape(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a mapping" if isinstance(node, yaml.MappingNode) else f"the single value {node.value!r}"


def _nearest(word: str, legal: list[str]) -> str:
    near = difflib.get_close_matches(word, legal, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _legal(names: Iterable[str]) -> str:
    return f"; legal are {', '.join(names)}."
