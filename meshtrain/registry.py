"""Things of one kind that a key of the config names: those of the package, and those that somebody registers from
outside.

    FAMILIES.register(Family("mine", ...))

From then on `model.family: mine` is legal; schedules, optimizers and sources of data are registered likewise.

A function that stands above whoever asks for it is found by name, too (`late`), as is the picture of a `Shown`.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from meshtrain.errors import ConfigError, short

# The entry points of installed distributions that register some (`config.imports.plugins`).
PLUGINS = "meshtrain.plugins"
# Directories whose code may run, as --trust names them and as PATH has them: in the environment, so that processes that
# a command starts trust them too.
TRUST = "MESHTRAIN_TRUST"


class Named(Protocol):
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


class Unimported(str):
    """A name in a config that was only read: code that was not run would register or define it.

    `key`: where it stands; `run`: what to trust.
    """

    key: str
    run: str

    def __new__(cls, name: str, key: str = "", run: str = "") -> "Unimported":
        text = super().__new__(cls, name)
        text.key = key
        text.run = run
        return text


class NotImported(ConfigError, KeyError):
    """Something needs the code behind an `Unimported` name."""

    __str__ = ConfigError.__str__

    def __init__(self, name: Unimported) -> None:
        super().__init__(
            f"{name.key} has {short(repr(str(name)))}, which comes from code of the run; a command that reads a run "
            "imports none "
            f"without --trust {short(name.run)}."
        )


class Registry(Mapping[str, Entry]):
    """Entries by name, in the order in which they were registered."""

    def __init__(self, *entries: Entry) -> None:
        self._entries = {entry.name: entry for entry in entries}

    def register(self, entry: Entry) -> Entry:
        """Adds an entry; ValueError if another one has its name."""
        if self._entries.setdefault(entry.name, entry) is not entry:
            raise ValueError(f"{entry.name} is registered already")
        return entry

    def forget(self, name: str) -> None:
        """Takes an entry out again: for a notebook's cell that is run twice, and for tests."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        if isinstance(name, Unimported) and name not in self._entries:
            raise NotImported(name)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def late(function: str) -> Callable[..., Any]:
    """Returns `module:function`, imported when it is first called: for what stands above the config that asks for it by
    a name.
    """
    return lambda *arguments: pkgutil.resolve_name(function)(*arguments)


_picture = late("meshtrain.pictures:show")


class Shown:
    """A class whose instances show themselves: a picture in a notebook, a few lines of text elsewhere."""

    def _repr_html_(self) -> str:
        return _picture(self).html

    def __repr__(self) -> str:
        return _picture(self).text
