"""Python files and modules that a config names, in which families, optimizers, schedules, sources and hooks are registered or defined.

    run:   {imports: [FILE, team.optimizers]}      imported before anything else of the config is read, in every command
    train: {loss: "team.optimizers:capped"}        what a file (by its name without .py) or a module defines

An installed distribution brings its own without being named: an entry point of the group `meshtrain.plugins` is loaded before a config is.

    [project.entry-points."meshtrain.plugins"]
    team = "team.plugin"                          a module, or a function in it that is called

A file is told from a module by its `.py`. Of a run it is copied into the directory `imports` beside config.yaml: whoever opens the run later
takes that copy, so that a file that was edited or moved since does not change what the run is.
"""

import functools
import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from meshtrain.errors import ConfigError, nearest, say, short
from meshtrain.files import read_text, write_atomically
from meshtrain.registry import PLUGINS

COPIES = "imports"  # in the run directory
LARGEST = 2**20  # bytes


class _Taken(NamedTuple):
    module: ModuleType
    path: Path | None  # of a file
    text: str


_TAKEN: dict[str, _Taken] = {}  # by the name before `:`


@functools.cache
def plugins() -> tuple[str, ...]:
    """Loads the plug-ins of installed distributions, once, and returns each as its name and version. ConfigError for one that fails."""
    loaded = []
    for entry in metadata.entry_points(group=PLUGINS):
        of = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        try:
            found = entry.load()
            if not isinstance(found, ModuleType):
                found()
        except Exception as error:
            what = f"{type(error).__name__}: {short(str(error))}"
            raise ConfigError(f"the plug-in {entry.name} ({entry.value}) of {of} cannot be loaded: {what}; mend or uninstall it.") from error  # fmt: skip
        _TAKEN.setdefault(entry.module, _Taken(sys.modules[entry.module], None, ""))
        loaded.append(f"{entry.name} of {of}")
    return tuple(loaded)


def take(entries: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Imports what is not imported yet, and returns the entries with files by their absolute paths.

    A file is looked for where the copies of a run lie in `directory`, that of the config, then from there, from here, and beside the config.
    ConfigError for what cannot be imported, with the line of the file.
    """
    return tuple(_take_file(entry, directory) if entry.endswith(".py") else _take_module(entry) for entry in entries)


def _take_module(name: str) -> str:
    if name not in _TAKEN:
        _TAKEN[name] = _Taken(_guarded(name, "", lambda: importlib.import_module(name)), None, "")
    return name


def _take_file(entry: str, directory: Path) -> str:
    given = Path(entry).expanduser()
    places = directory / COPIES / given.name, directory / given, Path.cwd() / given, directory / given.name
    path = next((place for place in places if place.is_file()), places[1]).absolute()
    text, name = read_text(path, "Python file", "run.imports takes Python files", (".py",), LARGEST), path.stem
    if (taken := _TAKEN.get(name)) is not None:
        if taken.text != text:
            there = taken.path or "a module"
            raise ConfigError(f"run.imports: {short(path)} is not the {name} that was imported from {there}; give it another name, or start anew.")  # fmt: skip
        return str(path)
    # Under a name that hides no module of anyone's; of the text that was read, and without bytecode beside it.
    module = ModuleType(f"meshtrain_imports_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    _guarded(entry, str(path), lambda: exec(compile(text, str(path), "exec"), vars(module)))
    _TAKEN[name] = _Taken(module, path, text)
    return str(path)


def _guarded(entry: str, file: str, run: Callable[[], Any]) -> Any:
    """Returns what `run` does; what it raises becomes a sentence, with the last line of the file that led there."""
    try:
        return run()
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"run.imports: {short(entry)}{where}: {type(error).__name__}: {what}.") from error


def named(key: str, text: str) -> Any:
    """Returns the function that MODULE:FUNCTION means, the value of a key; ConfigError if there is none."""
    name, colon, attribute = text.partition(":")
    if not colon or name not in _TAKEN:
        known = ", ".join(_TAKEN) or "nothing"
        raise ConfigError(
            f"{key} is {short(repr(text))}; write MODULE:FUNCTION, of what run.imports and plug-ins bring ({known})."
        )
    module = _TAKEN[name].module
    if not callable(found := getattr(module, attribute, None)):
        functions = [n for n, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
        raise ConfigError(f"{key}: {name} has no function {short(attribute)}{nearest(attribute, functions) or '.'}")
    return found


def files(entries: Sequence[str]) -> dict[str, str]:
    """Returns the text of each imported file by its name."""
    return {Path(entry).name: _TAKEN[Path(entry).stem].text for entry in entries if entry.endswith(".py")}


def keep(entries: Sequence[str], run_directory: Path) -> None:
    """Copies imported files into a run directory, and says so where the run had others."""
    for name, text in files(entries).items():
        copy = run_directory / COPIES / name
        if copy.exists() and copy.read_bytes() != text.encode():
            say(f"{name} has changed since this run was last started; it goes on with the new one.")
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, text.encode())


def digest(entries: Sequence[str]) -> str:
    """Returns a digest of all imported files and the names of plug-ins: what nodes must agree on."""
    return hashlib.sha256(repr((sorted(files(entries).items()), sorted(plugins()))).encode()).hexdigest()
