"""Keys that follow from others, as their lines in `schema` say: filled in, and once more where the others change."""

import json
import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from meshtrain.config.key import keys
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", bound=Config)


def resolve(config: AnyConfig) -> AnyConfig:
    """The config in which no key is left to follow from the others; ConfigError where one does not follow."""
    for path, key in keys(type(config)).items():
        if key.follows and value_of(config, path) == key.default:
            config = _with(config, path, key.follows(config))
    return config


def replaced(config: AnyConfig, **sections: Mapping[str, Any]) -> AnyConfig:
    """A resolved config with other values, by section: replaced(config, mesh={"data": 2}). What followed from the others follows again."""
    return resolve(put(unresolved(config), **sections))


def unresolved(config: AnyConfig) -> AnyConfig:
    """A resolved config before what follows was filled in."""
    for path in [path for path in keys(type(config)) if followed(config, path)]:
        config = _with(config, path, keys(type(config))[path].default)
    return config


def put(config: AnyConfig, **sections: Mapping[str, Any]) -> AnyConfig:
    """A config with other values, by section, and nothing else: whoever makes many of them fills in what follows.

    A few times as fast as `dataclasses.replace`, which searches notice.
    """
    return _with_values(config, sections)


def _with_values(section: Any, values: Mapping[str, Any]) -> Any:
    held = vars(section)
    # A mapping is for a section: no key takes one.
    inner = {n: _with_values(held[n], v) for n, v in values.items() if isinstance(v, Mapping)}
    return type(section)(**(held | values | inner))


def followed(config: Config, path: str) -> bool:
    """Whether the value of a key is the one that follows from the others."""
    key = keys(type(config))[path]
    try:
        return key.follows is not None and value_of(config, path) == key.follows(config)
    except ConfigError:
        return False


def value_of(config: Config, path: str) -> Any:
    return operator.attrgetter(path)(config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key path, old, new) of the keys that both configs have and that differ."""
    for name in (name for name in new if name in old):
        was, now = old[name], new[name]
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from ((f"{name}.{inner}", *values) for inner, *values in differences(was, now))
            continue
        # tuples and lists are the same
        was, now = (json.loads(json.dumps(value)) for value in (was, now))
        if was != now:
            yield name, was, now


def _with(config: AnyConfig, path: str, value: Any) -> AnyConfig:
    return put(config, **nested(path, value))


def nested(path: str, value: Any) -> dict[str, Any]:
    """`mesh.data`, 2 as {"mesh": {"data": 2}}"""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}
