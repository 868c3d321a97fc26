"""Loads a config: strict YAML, overrides, and one plain sentence with the line for what is wrong.

Values are decoded by the type that `schema` declares, since YAML itself reads `1e-3` as a string. No loader that we
know gives `--set a.b=c` over YAML with line numbers and a suggestion, hence this one.
"""

import contextlib
import dataclasses
import functools
import os
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshtrain.config.auto import AUTO
from meshtrain.config.check import check, hook_texts, importing
from meshtrain.config.follow import nested, put, resolve, unresolved, value_of
from meshtrain.config.key import SYNONYMS, Followed, Key, Resume, keys, meant
from meshtrain.config.places import config_file, from_file, local, placed
from meshtrain.config.schema import Config, RunConfig
from meshtrain.config.telemetry import holds_secret
from meshtrain.config.values import (
    NULL,
    TOO_DEEP,
    compose,
    names_accepted,
    plain,
    problem,
    shape,
    value,
)
from meshtrain.errors import ConfigError, masked, names_secret, nearest, short
from meshtrain.files import read_text
from meshtrain.registry import PLUGINS, NotImported, Unimported
from meshtrain.schedule.generators import SCHEDULES
from meshtrain.schedule.table import Table

Words = tuple[str, ...]
Values = dict[str, Any]  # by section, or by path

IMPORTS = "run.imports"
BASE = "base"
BASE_KEY = Key(
    None, "the config that this one changes, a YAML file or one that comes along"
)
MAX_BYTES = 256 * 1024  # PyYAML reads so much in a few seconds
MAX_BITS = 2**13  # of a whole number that is written in decimals
GIVEN = "the given values"
ALERTS = "telemetry.alerts"
EXAMPLE = "it needs at least one section, such as 'mesh: {data: 2}'"


def load(
    source: str | Path | Mapping[str, Any] | Config | None,
    overrides: Sequence[str] = (),
    *,
    reading: bool = False,
) -> Config:
    """Returns the checked, resolved config of a source, with a list of `key.path=value` overrides in their order.

    A source is a YAML file, the name of a config that comes along, nested dicts, another config, or None for the
    defaults. Values that follow from other keys follow from the overridden ones.

    With `reading` no code of a run directory or of others is imported unless it is trusted: names that it would bring
    are taken as they are (`registry.Unimported`). Raises ConfigError, one sentence, if the source is not a config.
    """
    _check_overrides(overrides)
    _plug_in()
    overridden: Words | None = None
    for override in overrides:
        if override.partition("=")[0].strip() == IMPORTS:
            overridden = _take(_override(Config(), override).run.imports, None)
    left_out: str | None = None
    if isinstance(source, Config):
        config = unresolved(source)
        model_keys = set(_changed(config.model))
    else:
        values, left_out = _read_source(source, reading)
        config = filled(Config(), values)
        model_keys = set(_flatten(values.get("model", {})))
    for override in overrides:
        config = _override(config, override)
        model_keys.add(override.partition("=")[0].strip().removeprefix("model."))
    if overridden is not None:
        config = put(config, run={"imports": overridden})
    elif isinstance(source, Config):
        config = put(config, run={"imports": _take(config.run.imports, None)})
    # What a run has written may be of an older version.
    if not (
        reading
        and isinstance(source, str | os.PathLike)
        and Path(source).name == "config.yaml"
    ):
        _refuse_secrets(config)
    if left_out is not None:
        return _only_read(config, left_out)
    config = resolve(_fill_from_weights(config, model_keys))
    check(config)
    return config


def _check_overrides(overrides: Any) -> None:
    """Raises ConfigError unless the overrides are a list of texts."""
    # A text is a sequence of texts too, its letters.
    listed = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not listed or not all(isinstance(override, str) for override in overrides):
        legal = "a list of texts, such as ['mesh.data=2']"
        raise ConfigError(
            f"the overrides are {short(repr(overrides))}; they must be {legal}."
        )


def _read_source(source: Any, reading: bool) -> tuple[Values, str | None]:
    """Returns the values of a file, of nested dicts or of None, and what `_read_config` left out."""
    if source is None:
        return {}, None
    if isinstance(source, Mapping):
        return _read_mapping(source), None
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"the config is {short(repr(source))}; it may be a file, nested dicts, a config or None."
        )
    return _read_config(config_file(source), reading)


def _refuse_secrets(config: Config) -> None:
    """ConfigError for a text that logs somebody in: config.yaml, checkpoints, trackers and jobs hold what a config
    does, for all to read.
    """
    for path in keys(type(config)):
        values = value_of(config, path)
        for text in values if isinstance(values, tuple) else (values,):
            # a path may have an = in it
            if not isinstance(text, str) or not (
                "://" in text or path == ALERTS or "=" not in text
            ):
                continue
            url = text.removeprefix("webhook:")
            if masked(url) != url or (
                url != text and url[:1] != "$" and holds_secret(url)
            ):
                way = "leave it out, and put it"
                if url != text:
                    way = "write webhook:$VARIABLE, and the address"
                raise ConfigError(
                    f"{path} holds a secret, which a run would write into its files; {way} into a variable of the "
                    "environment."
                )


def given_devices(source: str | Path, overrides: Sequence[str] = ()) -> int:
    """Returns the devices of a config file's mesh as it is given, whether it is legal or not."""
    config = filled(Config(), _read_config(config_file(source), reading=True)[0])
    for override in overrides:
        config = _override(config, override)
    return config.mesh.devices


class _Dumper(yaml.SafeDumper):
    """Writes paths as their text and NumPy numbers as numbers too, and what followed as what is named."""

    def represent_data(self, data: Any) -> yaml.Node:
        if isinstance(data, os.PathLike):
            data = os.fsdecode(data)
        elif isinstance(data, Followed | Unimported):
            data = str(data)
        elif isinstance(data, np.generic):
            data = data.item()
        if isinstance(data, (bytes, set)):
            raise yaml.representer.RepresenterError("no value of a config", data)
        if isinstance(data, int) and data.bit_length() > MAX_BITS:
            data = hex(
                data
                # Python writes no decimals of so many digits; where it stands it is refused
            )
        return super().represent_data(data)


def _changed(section: Any) -> Iterator[str]:
    return (
        path
        for path, key in keys(type(section)).items()
        if value_of(section, path) != key.default
    )


def _flatten(values: Mapping[str, Any], before: str = "") -> Values:
    """Returns {"moe": {"top_k": 2}} as {"moe.top_k": 2}."""
    by_path: Values = {}
    for name, inner in values.items():
        path = before + name
        by_path |= (
            _flatten(inner, f"{path}.") if isinstance(inner, Mapping) else {path: inner}
        )
    return by_path


def _fill_from_weights(config: Config, model_keys: Set[str]) -> Config:
    """Fills the section model from the config.json of model.weights.

    Raises ConfigError where one of `model_keys` contradicts it.

    A config that says all of it, as a run's own does, needs the directory no longer.
    """
    weights = config.model.weights
    if weights is None or {"family", "layers", "d_model", "vocab_size"} <= model_keys:
        return config
    from meshtrain.hf_families import section_of

    theirs = section_of(local(weights, config.data.cache_gib, "config.json"))
    try:
        _read_mapping({"model": theirs})
    except ConfigError as error:
        raise ConfigError(
            f"the model in {short(weights)}: {str(error).removeprefix(f'{GIVEN}: ')}"
        ) from None
    # what no weight depends on may be otherwise
    free = {
        path
        for path, key in keys(type(config.model)).items()
        if key.resume is Resume.REPORTED
    }
    for path, wanted in _flatten(theirs).items():
        if path in model_keys & free:
            continue
        if path in model_keys and (ours := value_of(config.model, path)) != wanted:
            has = f"but the model in {short(weights)} has {wanted}"
            raise ConfigError(f"model.{path} is {ours}, {has}; leave the key out.")
        config = put(config, model=nested(path, wanted))
    return config


def _read_mapping(values: Mapping[str, Any]) -> Values:
    try:
        node = compose(yaml.dump(dict(values), Dumper=_Dumper)) if values else None
    except yaml.representer.RepresenterError as error:
        data = error.args[-1]
        sentence = f"{GIVEN} hold {short(repr(data))}; they may be texts, paths, numbers, switches and lists."
        if isinstance(data, Table):
            sentence = (
                f"{GIVEN} hold the schedule table {short(data.name)} itself; write it to a file, with "
                "Path('mine.csv').write_text(table.to_csv()), and give that path."
            )
        raise ConfigError(sentence) from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = problem(error)[1] if isinstance(error, yaml.YAMLError) else TOO_DEEP
        raise ConfigError(f"{GIVEN} are no config: {reason}.") from None
    if node is None:
        return {}
    taken = _take(_imports(node, GIVEN), None)
    return _add_imports(_section(Config, node, "", GIVEN, "config"), taken)


def _read_config(
    file: str | Path, reading: bool, above: Words = ()
) -> tuple[Values, str | None]:
    """Returns the values of a config's file, over those of its base, once what run.imports names is imported; and where
    that was left out, what to trust.

    `above`: the files of which this one is the base, directly or not.
    """
    node, source = _composed(file, "config", BASE if above else "--config", EXAMPLE)
    path = Path(file)
    above = (*above, os.path.realpath(path))
    values: Values = {}
    run: str | None = None
    if (base := _base(node, source, path.parent, above)) is not None:
        values, run = _read_config(base, reading, above)
    if entries := _imports(node, source):
        # what is legal elsewhere may be registered there
        imports = importing()
        if reading and (here := imports.left_out(path)):
            run = here
        else:
            # A run writes all sections
            written = {name.value for name, _ in node.value}
            of_run = imports.is_of_run(path) or (
                path.name == "config.yaml"
                and set(typing.get_type_hints(Config)) <= written
            )
            entries = imports.take(
                entries, path, path.absolute().parent if of_run else None
            )
    with names_accepted(run) if run else contextlib.nullcontext():
        own = placed(
            _section(Config, node, "", source, "config"), keys(Config), path.parent
        )
    inherited = values.get("run", {}).get("imports", ())
    merged = _merge(values, own)
    return _add_imports(merged, tuple(dict.fromkeys((*inherited, *entries)))), run


def config_files(file: str | Path) -> list[str | Path]:
    """Returns a config's file, its base, the base of that, and so on."""
    files = [file]
    above: Words = ()
    while True:
        above = (*above, os.path.realpath(files[-1]))
        node, source = _composed(
            files[-1], "config", "--config" if len(files) == 1 else BASE, EXAMPLE
        )
        base = _base(node, source, Path(files[-1]).parent, above)
        if base is None:
            return files
        files.append(base)


def _base(
    node: yaml.Node, source: str, folder: Path, above: Sequence[str]
) -> str | Path | None:
    """Takes the base out of the root of a config in `folder`, and returns its file.

    ConfigError for one of the files `above` it, which would lead in a circle.
    """
    for pair in node.value if isinstance(node, yaml.MappingNode) else ():
        if pair[0].value == BASE:
            where = f"{_locate(source, pair[1])}: {BASE}"
            text = value(str, BASE_KEY, pair[1], where)
            file = config_file(from_file(text, folder))
            if os.path.realpath(file) in above:
                raise ConfigError(
                    f"{where} is {short(text)}, which leads back to itself; a base may have no part in a circle."
                )
            node.value.remove(pair)
            return file
    return None


def _merge(values: Mapping[str, Any], new: Mapping[str, Any]) -> Values:
    """Returns values with new ones in their place, section by section."""
    inner = {
        name: _merge(values[name], section)
        for name, section in new.items()
        if isinstance(section, Mapping) and name in values
    }
    return {**values, **new, **inner}


def _add_imports(values: Values, taken: Words) -> Values:
    if taken:
        values["run"]["imports"] = taken
    return values


def _imports(config: yaml.Node, source: str) -> Words:
    """Returns run.imports of a config whose other keys are not read yet."""
    node: yaml.Node | None = config
    for name in IMPORTS.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        node = next(
            (inner for key_node, inner in pairs if key_node.value == name), None
        )
    if node is None:
        return ()
    hint = typing.get_type_hints(RunConfig)["imports"]
    where = f"{_locate(source, node)}: {IMPORTS}"
    entries: Words = value(hint, keys(RunConfig)["imports"], node, where)
    return entries


def _only_read(config: Config, run: str) -> Config:
    """Returns a config whose imports were left out, resolved and checked as far as that goes without them.

    `run`: what to trust.

    NotImported where a value follows from what they would bring.
    """
    schedule = config.parallel.schedule
    names = {key: text for key, text in hook_texts(config).items() if text is not None}
    if schedule not in (AUTO, *SCHEDULES) and not schedule.endswith(".csv"):
        names["parallel.schedule"] = schedule
    for key, text in names.items():
        config = put(config, **nested(key, Unimported(text, key, run)))
    for name in ("imports", "callbacks"):
        entries = tuple(
            Unimported(entry, f"run.{name}", run) for entry in getattr(config.run, name)
        )
        config = put(config, run={name: entries})
    config = resolve(config, as_far=True)
    with contextlib.suppress(NotImported):
        check(config)
    return config


@functools.cache
def _plug_in() -> None:
    if metadata.entry_points(group=PLUGINS):
        importing().plugins()


def _take(entries: Words, named_by: Path | None) -> Words:
    taken: Words = importing().take(entries, named_by) if entries else ()
    return taken


def to_yaml(config: Config) -> str:
    """Returns all of the config as YAML; `load` of it gives an equal config."""

    def bare(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                f.name: bare(getattr(value, f.name)) for f in dataclasses.fields(value)
            }
        if isinstance(value, tuple):
            return [bare(v) for v in value]
        return value

    return yaml.dump(bare(config), Dumper=_Dumper, sort_keys=False, width=120)


def read_section(
    kind: type,
    path: str | Path,
    what: str,
    flag: str,
    example: str,
) -> Any:
    """Reads a dataclass of `schema.key` fields from a YAML file of its own; `what`, `flag` and `example` are for its
    errors.
    """
    return filled(kind(), read_given(kind, path, what, flag, example))


def filled(base: Any, values: Mapping[str, Any]) -> Any:
    """Returns a dataclass with other values in the place of its own, section by section."""
    changed = {}
    for name, new in values.items():
        section = getattr(base, name)
        changed[name] = new
        if dataclasses.is_dataclass(section):
            changed[name] = filled(section, new)
    return dataclasses.replace(base, **changed)


def read_given(
    kind: type,
    path: str | Path,
    what: str,
    flag: str,
    example: str,
) -> Values:
    """Returns the checked values that a YAML file gives to a dataclass's keys, and nothing that it leaves out; a
    section is a dict.
    """
    node, source = _composed(path, what, flag, example)
    return _section(kind, node, "", source, what)


def _composed(
    path: str | Path, what: str, flag: str, example: str
) -> tuple[yaml.Node, str]:
    """Returns the root of a YAML file, and the file as sentences name it."""
    text = read_text(
        path, f"{what} file", f"{flag} takes a YAML file", (".yaml", ".yml"), MAX_BYTES
    )
    source = short(path)
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        line, reason = problem(error)
        raise ConfigError(
            f"{source}{f', line {line}' if line else ''} is not valid YAML: {reason}."
        ) from None
    if node is None:
        raise ConfigError(f"{source} is empty; {example}.")
    return node, source


def _section(kind: Any, node: yaml.Node, prefix: str, source: str, what: str) -> Values:
    if not isinstance(node, yaml.MappingNode):
        shown = f"section {prefix[:-1]!r}" if prefix else f"a {what}"
        raise ConfigError(
            f"{_locate(source, node)}: {shown} must be a mapping of keys to values, not {shape(node)}."
        )
    hints = typing.get_type_hints(kind)
    values = Values()
    for key_node, value_node in node.value:
        where = _locate(source, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"{where}: a key is {shape(key_node)}; keys are single words."
            )
        name = key_node.value
        if name not in hints:
            raise ConfigError(f"{where}: {_unknown(kind, prefix, name)}")
        if name in values:
            raise ConfigError(f"{where}: {prefix}{name} stands here twice.")
        hint: Any = hints[name]
        path = f"{prefix}{name}"
        if typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
        else:
            item = None
        if dataclasses.is_dataclass(hint):
            empty = value_node.tag == NULL
            if empty:
                values[name] = {}
            else:
                values[name] = _section(hint, value_node, f"{path}.", source, what)
        elif dataclasses.is_dataclass(item):
            values[name] = _sections(item, value_node, path, source, what)
        else:
            where = f"{_locate(source, value_node)}: {path}"
            values[name] = value(hint, keys(kind)[name], value_node, where)
    return values


def _sections(
    kind: Any,
    node: yaml.Node,
    name: str,
    source: str,
    what: str,
) -> tuple[Any, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise ConfigError(
            f"{_locate(source, node)}: {name} is {shape(node)}; it must be a list of mappings."
        )
    return tuple(
        filled(kind(), _section(kind, item, f"{name}[{i}].", source, what))
        for i, item in enumerate(node.value)
    )


def _override(config: Config, text: str) -> Config:
    path, equals, new = (part.strip() for part in text.partition("="))
    source = f"--set {short(text)}"
    *sections, name = path.split(".")
    if not (equals and sections and all(sections) and name):
        path_of = {key.rpartition(".")[2]: key for key in keys(Config)} | SYNONYMS
        example = "for example --set mesh.data=2."
        if path in path_of and new:
            example = f"did you mean --set {path_of[path]}={short(new)}?"
        raise ConfigError(f"{source}: write --set section.key=value, {example}")
    kind, prefix = _find_section(sections, source)
    hints = typing.get_type_hints(kind)
    if name not in hints:
        raise ConfigError(f"{source}: {_unknown(kind, prefix, name)}")
    if dataclasses.is_dataclass(hints[name]):
        inner = ", ".join(typing.get_type_hints(hints[name]))
        raise ConfigError(
            f"{source}: {path} is a section; give one of its keys, {inner}."
        )
    node = None
    # all other values are the text as it is, # and : included
    if new.startswith(("[", "{", "'", '"')):
        with contextlib.suppress(yaml.YAMLError):
            node = compose(new)
    return put(
        config,
        **nested(
            path,
            value(
                hints[name], keys(kind)[name], node or plain(new), f"{source}: {path}"
            ),
        ),
    )


def _find_section(sections: list[str], source: str) -> tuple[type, str]:
    """Returns the class of a section within sections, and the prefix of its keys."""
    kind: type = Config
    prefix = ""
    for section in sections:
        hint = typing.get_type_hints(kind).get(section)
        if hint is None:
            raise ConfigError(f"{source}: {_unknown(kind, prefix, section)}")
        if not dataclasses.is_dataclass(hint):
            raise ConfigError(
                f"{source}: {prefix}{section} is a key and has none of its own."
            )
        kind = typing.cast(type, hint)
        prefix = f"{prefix}{section}."
    return kind, prefix


def _unknown(kind: type, prefix: str, name: str) -> str:
    hints = typing.get_type_hints(kind)
    if names_secret(name):
        secret = (
            "put a secret into an environment variable, which no file of a run records"
        )
        return f"there is no key {prefix}{short(name)}; {secret}."
    if path := meant(name):
        return f"there is no key {prefix}{short(name)}; did you mean {path}?"
    what = "section" if all(map(dataclasses.is_dataclass, hints.values())) else "key"
    shown = short(name if name.isidentifier() else repr(name))
    return f"there is no {what} {prefix}{shown}" + (
        nearest(name, hints, prefix.__add__) or f"; legal are {', '.join(hints)}."
    )


def _locate(source: str, node: yaml.Node) -> str:
    if source == GIVEN:
        return source
    return f"{source}, line {node.start_mark.line + 1}"
