"""Python files and modules that a config names, in which families, optimizers, schedules, sources and hooks are
registered or defined.

    run:   {imports: [FILE, team.optimizers]}      imported before anything else of the config is read, in every command
    train: {loss: "team.optimizers:capped"}        what a file (by its name without .py) or a module defines

An installed distribution brings its own without being named: an entry point of the group `meshtrain.plugins` is loaded
before a config is.

    [project.entry-points."meshtrain.plugins"]
    team = "team.plugin"                          a module, or a function in it that is called

A file is told from a module by its `.py`. An absolute path is that file. A relative one counts from the folder of the
config, else from the working directory; where both have one and they differ, it is refused. A run copies it into
the directory `imports` beside config.yaml. Whoever opens the run by its config.yaml or its checkpoints takes that copy:
a file that was edited or moved since does not change the run.

Code runs where it is the user's own: the file, the config that names it and the directories on the way belong to the
user, or to root, and others may not write to them. Elsewhere, and where a command only reads a run, it runs with
`--trust RUN` alone.
"""

import functools
import grp
import hashlib
import importlib
import importlib.util
import os
import pwd
import signal
import stat
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from meshtrain.errors import ConfigError, nearest, say, short
from meshtrain.files import read_text, write_atomically
from meshtrain.registry import PLUGINS, TRUST, NotImported, Unimported

COPIES = "imports"  # in the run directory
LARGEST = 2**20  # bytes
# Beside a config.yaml they show that it is a run's.
OF_A_RUN = ("metrics.jsonl", "checkpoints", "survive")


class _Taken(NamedTuple):
    module: ModuleType
    path: Path | None  # of a file
    text: str


_TAKEN: dict[str, _Taken] = {}  # by the name before `:`


@functools.cache
def plugins() -> tuple[str, ...]:
    """Loads the plug-ins of installed distributions, once, and returns each as its name and version.

    ConfigError for one that fails.
    """
    loaded = []
    for entry in metadata.entry_points(group=PLUGINS):
        of = (
            f"{entry.dist.name} {entry.dist.version}"
            if entry.dist
            else "an unknown distribution"
        )
        try:
            found = entry.load()
            if not isinstance(found, ModuleType):
                found()
        except BaseException as error:
            if _is_request_to_stop(error):
                raise
            what = f"{type(error).__name__}: {_message(error)}"
            raise ConfigError(
                f"the plug-in {entry.name} ({entry.value}) of {of} cannot be loaded: {what}; mend or uninstall it."
            ) from error
        _TAKEN.setdefault(entry.module, _Taken(sys.modules[entry.module], None, ""))
        loaded.append(f"{entry.name} of {of}")
    return tuple(loaded)


def take(
    entries: Sequence[str], named_by: Path | None, run: Path | None = None
) -> tuple[str, ...]:
    """Imports what is not imported yet, and returns the entries with files by their absolute paths.

    `named_by`: the file that lists them, which must be the user's own or trusted; None: the command line, or Python.
    `run`: the directory of the run that has written that file. ConfigError for what cannot be imported, with the line
    of the file.
    """
    for entry in entries:
        if isinstance(entry, Unimported):
            raise NotImported(entry)
    if named_by is not None:
        root = run or named_by.absolute().parent
        for path in dict.fromkeys(
            (named_by, root / "config.yaml" if run else named_by)
        ):
            _refuse_others(path, root)
    folder = Path.cwd() if named_by is None else named_by.absolute().parent
    return tuple(
        _take_file(entry, folder, run) if entry.endswith(".py") else _take_module(entry)
        for entry in entries
    )


def is_of_run(config: Path) -> bool:
    """Returns whether a file is the config.yaml of a run, beside which the run keeps its copies."""
    return config.name == "config.yaml" and any(
        os.path.lexists(config.parent / name) for name in OF_A_RUN
    )


def lies_in_run(config: Path) -> bool:
    """Returns whether a file may be a part of a run directory: a command that reads takes it for one."""
    path = config.absolute()
    return path.name == "config.yaml" or any(
        os.path.lexists(folder / "config.yaml")
        and any(os.path.lexists(folder / name) for name in (COPIES, *OF_A_RUN))
        for folder in path.parents
    )


def left_out(named_by: Path) -> str | None:
    """Returns what would have to be trusted for a command that only reads to import what a file names; None if it
    may.
    """
    folder = named_by.absolute().parent
    if is_trusted(named_by) or (
        not lies_in_run(named_by) and not any(map(_fault, _walk_to(named_by)))
    ):
        return None
    return str(folder)


def is_trusted(path: Path) -> bool:
    """Returns whether a path lies in a trusted directory, where links lead to too."""
    trusted = [
        Path(folder).resolve()
        for folder in os.environ.get(TRUST, "").split(os.pathsep)
        if folder
    ]
    return any(path.resolve().is_relative_to(folder) for folder in trusted)


def _refuse_others(path: Path, folder: Path) -> None:
    """ConfigError for a file that others may have written, unless it is trusted."""
    if is_trusted(path):
        return
    if fault := next(filter(None, map(_fault, _walk_to(path))), None):
        raise ConfigError(
            f"run.imports: {fault}, so that code of others could run; --trust {short(folder)} runs it all the same."
        )


def _walk_to(path: Path) -> Iterator[Path]:
    """Yields a file and the directories that lead to it, as they are written and as links lead on."""
    for start in dict.fromkeys((path.absolute(), path.resolve())):
        yield from (start, *start.parents)


def _fault(path: Path) -> str | None:
    """Returns by what others decide about a file or an entry of a directory; None if they do not."""
    try:
        info = path.lstat()
    except OSError:
        return None  # whoever reads it reports what is wrong
    if info.st_uid not in (os.geteuid(), 0):
        return f"{short(path)} belongs to another user"
    if stat.S_ISLNK(info.st_mode) or (
        stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
    ):
        return None  # in a sticky directory each entry is its owner's
    if info.st_mode & stat.S_IWOTH:
        return f"{short(path)} can be written by everyone"
    if info.st_mode & stat.S_IWGRP and not _is_private(info):
        return f"{short(path)} can be written by its group"
    return None


def _is_private(info: os.stat_result) -> bool:
    """Returns whether the group of a file has its owner alone in it, as many systems give each user one."""
    try:
        owner = pwd.getpwuid(info.st_uid).pw_name
        group = grp.getgrgid(info.st_gid)
    except KeyError:
        return info.st_uid == info.st_gid
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _take_module(name: str) -> str:
    if name not in _TAKEN:
        first = name.partition(".")[0]
        if first not in sys.modules:
            _refuse_others_module(first)
        _TAKEN[name] = _Taken(
            _guarded(name, "", lambda: importlib.import_module(name)), None, ""
        )
    return name


def _refuse_others_module(name: str) -> None:
    """ConfigError for a module that others may have written, as one in the working directory; installed ones are as
    Python itself.
    """
    spec = _guarded(name, "", lambda: importlib.util.find_spec(name))
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    installed = [
        Path(folder).resolve()
        for folder in {*sysconfig.get_paths().values(), sys.base_prefix, sys.prefix}
    ]
    for place in filter(os.path.exists, filter(None, places)):
        if not any(
            Path(place).resolve().is_relative_to(folder) for folder in installed
        ):
            _refuse_others(Path(place), Path(place).absolute().parent)


def _take_file(entry: str, folder: Path, run: Path | None) -> str:
    path = _found(entry, folder, run).absolute()
    text = read_text(
        path, "Python file", "run.imports takes Python files", (".py",), LARGEST
    )
    name = path.stem
    if (taken := _TAKEN.get(name)) is not None:
        if taken.text != text:
            there = taken.path or "a module"
            raise ConfigError(
                f"run.imports: {short(path)} is not the {name} that was imported from {there}; give it another name, "
                "or start anew."
            )
        return str(path)
    _refuse_others(path, run or path.parent)
    # Under a name that hides no module of anyone's; of the text that was read, and without bytecode beside it.
    module = ModuleType(f"meshtrain_imports_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    _guarded(
        entry, str(path), lambda: exec(compile(text, str(path), "exec"), vars(module))
    )
    _TAKEN[name] = _Taken(module, path, text)
    return str(path)


def _found(entry: str, folder: Path, run: Path | None) -> Path:
    """Returns the one file that an entry means: of a run its copy."""
    given = Path(entry).expanduser()
    if run is not None and (copy := run / COPIES / given.name).is_file():
        return copy
    beside = folder / given
    here = Path.cwd() / given
    if not here.is_file() or beside == here:
        return beside
    if beside.is_file() and beside.read_bytes() != here.read_bytes():
        raise ConfigError(
            f"run.imports: {short(entry)} is {short(beside)} or {short(here)}, which differ; give the path of the one "
            "that is meant."
        )
    return beside if beside.is_file() else here


def _guarded(entry: str, file: str, run: Callable[[], Any]) -> Any:
    """Returns what `run` does; what it raises becomes a sentence, with the last line of the file that led there."""
    try:
        return run()
    except BaseException as error:
        if _is_request_to_stop(error):
            raise
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        what = error.msg if isinstance(error, SyntaxError) else _message(error)
        raise ConfigError(
            f"run.imports: {short(entry)}{where}: {type(error).__name__}: {what}."
        ) from error


def _is_request_to_stop(error: BaseException) -> bool:
    """Returns whether an exception is the user's Ctrl-C, and not raised by the code: a command's is a class of its
    own.
    """
    by_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and (
        by_default or type(error).__module__.startswith("meshtrain.")
    )


def _message(error: BaseException) -> str:
    try:
        return short(str(error)) or "without a word"
    except Exception:
        return "a message that cannot be printed"


def named(key: str, text: str) -> Any:
    """Returns the function that MODULE:FUNCTION means, the value of a key; ConfigError if there is none."""
    name, colon, attribute = text.partition(":")
    if isinstance(text, Unimported) and name not in _TAKEN:
        raise NotImported(text)
    if not colon or name not in _TAKEN:
        known = ", ".join(_TAKEN) or "nothing"
        raise ConfigError(
            f"{key} is {short(repr(text))}; write MODULE:FUNCTION, of what run.imports and plug-ins bring ({known})."
        )
    module = _TAKEN[name].module
    if not callable(found := getattr(module, attribute, None)):
        functions = [
            n
            for n, value in vars(module).items()
            if callable(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{key}: {name} has no function {short(attribute)}{nearest(attribute, functions) or '.'}"
        )
    return found


def definition(key: str, text: str) -> tuple[str, str, str, str]:
    """Returns what another process needs to have the function that MODULE:FUNCTION means: the module's name, the path
    and the text of its file (of an installed module ""), and the function's name.
    """
    named(key, text)
    name, _, attribute = text.partition(":")
    taken = _TAKEN[name]
    return taken.module.__name__, str(taken.path or ""), taken.text, attribute


def files(entries: Sequence[str]) -> dict[str, str]:
    """Returns the text of each imported file by its name."""
    return {
        Path(entry).name: _TAKEN[Path(entry).stem].text
        for entry in entries
        if entry.endswith(".py")
    }


def keep(entries: Sequence[str], run_directory: Path) -> None:
    """Copies imported files into a run directory, and says so where the run had others."""
    for name, text in files(entries).items():
        copy = run_directory / COPIES / name
        if copy.exists() and copy.read_bytes() != text.encode():
            say(
                f"{name} has changed since this run was last started; it goes on with the new one."
            )
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, text.encode())


def digest(entries: Sequence[str]) -> str:
    """Returns a digest of all imported files and the names of plug-ins: what nodes must agree on."""
    return hashlib.sha256(
        repr((sorted(files(entries).items()), sorted(plugins()))).encode()
    ).hexdigest()
