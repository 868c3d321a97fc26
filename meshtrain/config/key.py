"""The line of a key: its meaning and bounds, what it follows from, what a resume does with a change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

# Numbers end up as int32 or float32: what these cannot hold is refused, and so is what float32 takes for zero.
LARGEST: dict[type, float] = {int: 2**31 - 1, float: 3.4028234663852886e38}
TINIEST = 2.0**-126


class Resume(Enum):
    """How a resume takes a key that has another value than in the checkpoint."""

    FREE = "nothing: the key is of the command, not of the run"
    REPORTED = "it goes on, and says so"
    REFUSED = "it is refused, unless checkpoint.allow names the key"
    FUNCTION = (
        "another function goes on, and says so; back to the built-in part it is refused, unless "
        "checkpoint.allow names the key"
    )
    ADAPTERS = "it is refused; weights alone are taken from where there are no adapters yet"
    CONTENT = "it is refused, unless checkpoint.allow names the key; the digest of the data follows from it"
    TOKENS = (
        "it is refused, unless checkpoint.allow names the key; and with the weights alone too, which mean "
        "nothing for other tokens"
    )
    SHAPE = "it is refused, with the weights alone too: what they are, and what the model computes with them"
    SIZE = "it is refused; but the weights alone are taken as far as they fit, if checkpoint.allow names the key"


class Followed(str):
    """A text that follows from other keys and was named by nobody: who runs the config may choose again
    (`follow.as_run_on`).
    """


@dataclass(frozen=True)
class Key:
    """The line of a key, besides its type."""

    default: Any
    doc: str
    # Bounds of a number, or of each number of a list; without `most` it is that of LARGEST.
    least: float | None = None
    most: float | None = None
    above: float | None = None
    # What a number counts, for the sentence that refuses one: in seconds (3 µs are 3e-06).
    unit: str = ""
    # It may name a file: see `meshtrain.config.places`.
    path: bool = False
    # The legal texts, looked at when a value is read: more of them may be registered from outside.
    one_of: Mapping[str, Any] | None = None
    # Where the default stands, the value follows from the config; ConfigError if it does not.
    follows: Callable[[Any], Any] | None = None
    resume: Resume = Resume.REPORTED
    # Whether anything depends on the key, in a config.
    counts: Callable[[Any], bool] = lambda config: True

    @property
    def null(self) -> bool:
        """Says whether null may stand for a value that follows from other keys; a resolved config has none."""
        return self.default is None and self.follows is not None


def key(default: Any, doc: str, **rules: Any) -> Any:
    """Declares a key, with `rules` as in `Key`. A type with None has null as a value of its own."""
    return field(default=default, metadata={"key": Key(default, doc, **rules)})


def keys(kind: type) -> dict[str, Key]:
    """Returns the keys of a section by name; of sections in a config by path, as in model.layers."""
    entries: dict[str, Key] = {}
    for declared in fields(kind):
        if isinstance(declared.type, type) and is_dataclass(declared.type):
            entries |= {
                f"{declared.name}.{name}": rules for name, rules in keys(declared.type).items()
            }
        elif "key" in declared.metadata:
            entries[declared.name] = declared.metadata["key"]
    return entries


def known(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns the values of a config of another version, by section, whose keys this one's `kind` has too."""
    entries: dict[str, Any] = {}
    for declared in fields(kind):
        if declared.name in values:
            value = values[declared.name]
            of_section = isinstance(declared.type, type) and is_dataclass(declared.type)
            entries[declared.name] = known(value, declared.type) if of_section else value  # type: ignore[arg-type]
    return entries
