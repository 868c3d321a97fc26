"""A row of a table says what one key of theirs becomes here; a table has a row a key.

Facts: what the files have said so far.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshtrain.errors import ConfigError, names_secret, short

DIFFERS = "differs"
# How an optimizer differs from theirs. transformers makes Adafactor with scale_parameter False.
OTHERWISE = {
    "adafactor": "an update is scaled by the size of its weight here, theirs is not, so that another learning rate is "
    "the right one",
    "muon": "how large Muon's updates are follows another rule here, and Adam's first moment has the momentum too",
}


@dataclass(frozen=True)
class GivenKey:
    """One key as a file has it; of a mapping in a mapping the names are joined by dots."""

    key: str
    value: Any
    file: str  # as the user named it
    line: int

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.line}"

    @property
    def text(self) -> str:
        value = as_written(self.value)
        return f"{self.key} {'…' if names_secret(self.key) and len(value) >= LEAST_SECRET else value}"

    def refused(self, rest: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {self.key} is {as_written(self.value)}; {rest}."
        )


LEAST_SECRET = 8  # characters: a shorter one would not be hard to guess


class RefusedValue(Exception):
    """A row's answer to a value that cannot be taken over: the rest of a sentence that begins with key and value."""


class LeftOut(Exception):
    """A row's answer to a value that has no place here: the reason, and whether another thing is learned without it."""

    def __init__(self, why: str, matters: bool = False) -> None:
        super().__init__(why)
        self.matters = matters


@dataclass(frozen=True)
class KeyRow:
    """Says which of our keys one key of theirs becomes.

    `becomes(value)` returns values by our key's path (optimizer.learning_rate), or by the word of a fact from which
    several of ours follow (`following`); it raises `LeftOut` or `RefusedValue`. Without it the key is left out, for the
    reason `why`. `default`: theirs, where a file has no such key and ours is another. A difference here
    stands in `differs`, or beside the values as DIFFERS.
    """

    becomes: Callable[[Any], Mapping[str, Any]] | None = None
    why: str = ""
    default: Any = None
    differs: str = ""


# A name that ends in a dot stands for all keys that begin with it
Table = Mapping[str, KeyRow]


def to(path: str, read: Callable[[Any], Any], default: Any = None) -> KeyRow:
    """Returns a row for a key that is one of ours; null is as if it were not there."""
    return KeyRow(
        lambda value: {} if value is None else {path: read(value)}, default=default
    )


def where_on(path: str, value: Any = True, differs: str = "") -> KeyRow:
    """Returns a row for a switch that, where it is on, gives one of ours a value."""
    return KeyRow(lambda given: {path: value} if switch(given) else {}, differs=differs)


def left(names_by_reason: Mapping[str, str], within: str = "") -> dict[str, KeyRow]:
    """Returns rows of keys that are left out, by the reason; `within` a mapping of theirs."""
    return {
        within + name: KeyRow(why=why)
        for why, names in names_by_reason.items()
        for name in names.split()
    }


def lost(why: str, *same: Any) -> KeyRow:
    """Returns a row for a method that is not here.

    Off, or with one of the `same` values, nothing is lost; else another thing is learned.
    """

    def becomes(value: Any) -> dict[str, Any]:
        if value not in (same or (None, False, 0, "")):
            raise LeftOut(why, matters=True)
        return {}

    return KeyRow(becomes, why=why)


def all_lost(names_by_reason: Mapping[str, str]) -> dict[str, KeyRow]:
    return {
        name: lost(why)
        for why, names in names_by_reason.items()
        for name in names.split()
    }


def only(legal: Any, why: str) -> KeyRow:
    """Returns a row for a key of which one value alone is computed here."""

    def becomes(value: Any) -> dict[str, Any]:
        if value not in (legal, None):
            raise RefusedValue(why)
        return {}

    return KeyRow(becomes)


def row_of(table: Table, key: str) -> KeyRow | None:
    """Returns the row of a key: its own, or that of the longest beginning."""
    beginnings = [name for name in table if name.endswith(".") and key.startswith(name)]
    return table.get(key) or (table[max(beginnings, key=len)] if beginnings else None)


# --- their values


def one_of(*words: str) -> Callable[[Any], str]:
    """Returns a function that refuses other words than these."""

    def read(value: Any) -> str:
        if str(value) not in words:
            raise RefusedValue(f"it must be one of {', '.join(words)}")
        return str(value)

    return read


def number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise RefusedValue("it must be a number") from None


def integer(value: Any) -> int:
    if number(value) != int(number(value)):
        raise RefusedValue("it must be a whole number")
    return int(number(value))


def switch(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise RefusedValue("it must be true or false")
    return str(value).lower() == "true"


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RefusedValue("it must be a text")
    return value


def words(value: Any) -> list[str]:
    """Returns a list, or the parts between commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Iterable) or isinstance(parts, Mapping):
        raise RefusedValue("it must be a list")
    return [str(word).strip() for word in parts if str(word).strip()]


def as_written(value: Any) -> str:
    """Returns a value as it stands in their file."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else short(value)


# --- what the files have said so far


class FactValue(NamedTuple):
    """A value for a path, and the key that stated it; None: their default."""

    value: Any
    given: GivenKey | None = None


@dataclass
class KeyFacts:
    """The values that the files state so far, by our keys' paths and the words of facts; and what is to be reported of
    their keys.
    """

    values: dict[str, FactValue] = field(default_factory=dict)
    lost: list[tuple[GivenKey, str]] = field(
        default_factory=list
    )  # left out, and something else is learned
    differs: list[tuple[GivenKey, str]] = field(default_factory=list)
    left: list[tuple[GivenKey, str]] = field(default_factory=list)
    # What whoever starts the run has to see to
    notes: list[str] = field(default_factory=list)
    keys: dict[str, GivenKey] = field(default_factory=dict)  # all that their files have

    def add(self, path: str, value: Any, given: GivenKey) -> None:
        """ConfigError where another key states otherwise."""
        before = self.values.setdefault(path, FactValue(value, given))
        if before.given is not None and before.value != value:
            raise contradiction(before.given, given, path)

    def get(self, path: str) -> Any:
        return self.values.get(path, FactValue(None)).value

    def given(self, path: str) -> GivenKey | None:
        """Returns the key that stated it, where a file did."""
        return self.values.get(path, FactValue(None)).given

    def stated(self, path: str) -> Any:
        """Returns the value that a file states; None where it is a default."""
        return self.get(path) if self.given(path) else None

    def source(self, path: str) -> str:
        """Returns the key that stated it with its value and place, for a sentence."""
        given = self.given(path)
        return f"{given.text} ({given.where})" if given else path

    def take(self, path: str) -> Any:
        """Removes and returns a fact that has no key here; its last reader calls it."""
        return self.values.pop(path, FactValue(None)).value

    def put(self, path: str, value: Any) -> None:
        self.values[path] = FactValue(value, self.given(path))

    def drop(self, path: str, why: str) -> None:
        """Leaves out what a file states of a path."""
        if given := self.values.pop(path, FactValue(None)).given:
            self.left.append((given, why))


def contradiction(first: GivenKey, second: GivenKey, path: str) -> ConfigError:
    both = f" (both are {path} here)" if "." in path and first.key != second.key else ""
    one, other = (
        f"{given.key} is {as_written(given.value)} ({given.where})"
        for given in (first, second)
    )
    return ConfigError(f"{one}, but {other}{both}; let them agree, or leave one out.")
