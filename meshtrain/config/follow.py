"""Keys that follow from others, as their lines in `schema` say: filled in, and once more where the others change."""

from collections.abc import Mapping
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
    held = vars(config)
    changed = {name: type(held[name])(**(vars(held[name]) | values)) for name, values in sections.items()}
    return type(config)(**(held | changed))


def followed(config: Config, path: str) -> bool:
    """Whether the value of a key is the one that follows from the others."""
    key = keys(type(config))[path]
    try:
        return key.follows is not None and value_of(config, path) == key.follows(config)
    except ConfigError:
        return False


def value_of(config: Config, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _with(config: AnyConfig, path: str, value: Any) -> AnyConfig:
    section, _, name = path.partition(".")
    return put(config, **{section: {name: value}})
