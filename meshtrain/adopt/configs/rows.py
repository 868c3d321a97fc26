"""What a row of a table says of one key of theirs; a table has a row a key."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshtrain.errors import ConfigError, short

AUTO = "auto"  # DeepSpeed: as the trainer's arguments have it


@dataclass(frozen=True)
class Given:
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
        return f"{self.key} {shown(self.value)}"


class Refused(Exception):
    """Said by a row of a value that cannot be taken over: the rest of a sentence that begins with key and value."""


class Left(Exception):
    """Said by a row of a value that has no place here: the reason, and whether another thing is learned without it."""

    def __init__(self, why: str, matters: bool = False) -> None:
        super().__init__(why)
        self.matters = matters


@dataclass(frozen=True)
class Row:
    """What one key of theirs becomes.

    `becomes(value)`: values by our key's path (optimizer.learning_rate), or by the word of a fact from which several of ours
    follow (`following`); it raises `Left` or `Refused`. Without it the key is left out, for the reason `why`.
    `default`: theirs, where a file has no such key and ours is another. `differs`: what is not quite the same here.
    """

    becomes: Callable[[Any], Mapping[str, Any]] | None = None
    why: str = ""
    default: Any = None
    differs: str = ""


Table = Mapping[str, Row]


def to(path: str, read: Callable[[Any], Any], default: Any = None, differs: str = "") -> Row:
    """One of theirs that is one of ours; null is as if it were not there."""
    return Row(lambda value: {} if value is None else {path: read(value)}, default=default, differs=differs)


def left(why: str, *keys: str) -> dict[str, Row]:
    """Keys that are left out for one reason. One that ends in a dot stands for all that begin with it."""
    return dict.fromkeys(keys, Row(why=why))


def lost(why: str) -> Row:
    """A method that is not here: off is as here, on is left out, and another thing is learned."""

    def becomes(value: Any) -> dict[str, Any]:
        if value not in (None, False, 0, ""):
            raise Left(why, matters=True)
        return {}

    return Row(becomes)


def row_of(table: Table, key: str) -> Row | None:
    """The row of a key: its own, or that of the mapping it stands in."""
    if key in table:
        return table[key]
    parts = key.split(".")
    return next((table[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n]) + ".") in table), None)


def one_of(**values: Any) -> Callable[[Any], Any]:
    """Their words by ours; others are refused."""

    def read(value: Any) -> Any:
        if str(value) not in values:
            raise Refused(f"it must be one of {', '.join(values)}")
        return values[str(value)]

    return read


def number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise Refused("it must be a number") from None


def whole(value: Any) -> int:
    found = number(value)
    if found != int(found):
        raise Refused("it must be a whole number")
    return int(found)


def switch(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise Refused("it must be true or false")
    return str(value).lower() == "true"


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Refused("it must be a text")
    return value


def words(value: Any) -> list[str]:
    """A list, or what commas divide."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, Iterable) or isinstance(found, Mapping):
        raise Refused("it must be a list")
    return [str(word).strip() for word in found if str(word).strip()]


def shown(value: Any) -> str:
    """As it stands in their file."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else short(value)


def refusal(given: Given, rest: str) -> ConfigError:
    return ConfigError(f"{given.where}: {given.key} is {shown(given.value)}; {rest}.")
