"""Where files of a config lie: configs that come along by name, and paths that a file names.

A relative path in a file counts from that file's folder where something of that name lies there, else from the working
directory. One that is given with --set counts from the working directory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.config.key import Key
from meshtrain.errors import ConfigError, nearest, refusal, short
from meshtrain.files import is_address, refuse_passing
from meshtrain.sources import DATASET, MIXTURE, SOURCES, is_dataset

# In a checkout a link to those of the repository
CONFIGS = Path(__file__).parents[1] / "configs"
WORDS = ("", "auto", "never", "byte", MIXTURE)  # that keys of paths take besides
BOTH = "neither beside the config that names it nor in the working directory"


def config_file(source: str | os.PathLike[str]) -> str | Path:
    """Returns the path of a config: itself, or of the one that comes along under a plain name such as quickstart.

    ConfigError for a plain name of none, and for a path that is not there and ends in the name of one.
    """
    if not isinstance(source, str):
        return Path(source)
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    is_plain = source.replace("_", "").replace("-", "").isalnum()
    stem = Path(source).stem
    if os.path.lexists(source) or not (is_plain or stem in names):
        return source
    if source in names:
        return CONFIGS / f"{source}.yaml"
    if not is_plain:
        raise ConfigError(
            f"there is no config file {short(source)}; did you mean {stem}, which ships with meshtrain?"
        )
    ending = (
        nearest(source, names) or f"; give a YAML file, or one of {', '.join(names)}."
    )
    raise ConfigError(f"there is no config {short(source)}{ending}")


def from_file(path: str, folder: Path) -> str:
    """Returns a path that a file in `folder` names as it counts from the working directory."""
    if is_dataset(path):
        name, colon, rest = path.removeprefix(DATASET).partition(":")
        return f"{DATASET}{from_file(name, folder)}{colon}{rest}"
    beside = folder / path
    if (
        path in WORDS
        or path in SOURCES
        or path.startswith(("~", "/"))
        or not os.path.lexists(beside)
    ):
        return path
    # as it is written, where both are the same
    if os.path.exists(path) and os.path.realpath(path) == os.path.realpath(beside):
        return path
    return str(beside)


def placed(
    values: Mapping[str, Any], rules: Mapping[str, Key], folder: Path, prefix: str = ""
) -> dict[str, Any]:
    """Returns the values of a config's file with the paths in it as they count from the working directory.

    `rules`: keys by path.
    """
    entries: dict[str, Any] = {}
    for name, value in values.items():
        key = rules.get(f"{prefix}{name}")
        if isinstance(value, Mapping):
            value = placed(value, rules, folder, f"{prefix}{name}.")
        elif key and key.path and isinstance(value, str):
            value = from_file(value, folder)
        elif key and key.path and isinstance(value, tuple):
            value = tuple(from_file(one, folder) for one in value)
        entries[name] = value
    return entries


def local(name: str, limit: float, only: str | None = None) -> Path:
    """Returns the directory that a path names, or a copy of what an address or a hub's name does; of copies `limit` GiB
    are kept. `only`: the one file that is wanted of a hub's.
    """
    from meshtrain import hub, stores

    if not is_address(name):
        return hub.directory(name, only)
    try:
        return stores.local_copy(name, limit)
    except OSError as error:
        refuse_passing(name, error)
        raise ConfigError(f"{short(name)} cannot be read: {refusal(error)}.") from None
