"""Things of one kind that a key of the config names: those of the package, and those that somebody registers from outside.

    FAMILIES.register(Family("mine", ...))

From then on `model.family: mine` is legal; schedules, optimizers and sources of data are registered likewise.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

PLUGINS = (
    "meshtrain.plugins"  # the entry points of installed distributions that register some (`config.imports.plugins`)
)


class Named(Protocol):
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


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
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def late(function: str) -> Callable[..., Any]:
    """Returns `module:function`, imported when it is first called: for what stands above the config that asks for it by a name."""
    return lambda *arguments: pkgutil.resolve_name(function)(*arguments)
