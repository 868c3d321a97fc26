"""Of several files one value for each of our keys, or a sentence with both; and what becomes of every key of theirs on the way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshtrain.adopt.configs.reading import LLAMA_FACTORY, TABLES, unknown
from meshtrain.adopt.configs.rows import AUTO, Given, Left, Refused, refusal, row_of, shown
from meshtrain.errors import ConfigError


@dataclass(frozen=True)
class Found:
    """A value for a path, and the key that said it; None: their default."""

    value: Any
    given: Given | None = None


@dataclass
class Facts:
    """What the files say so far, by our keys' paths and the words of facts; and what is to be told of it."""

    found: dict[str, Found] = field(default_factory=dict)
    lost: list[tuple[Given, str]] = field(default_factory=list)  # left out, and something else is learned
    differs: list[tuple[Given, str]] = field(default_factory=list)
    left: list[tuple[Given, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # what whoever starts the run has to see to

    def add(self, path: str, value: Any, given: Given) -> None:
        """ConfigError where another key has said otherwise."""
        before = self.found.get(path)
        if before is not None and before.given is not None and before.value != value:
            raise contradiction(before.given, given, path)
        self.found.setdefault(path, Found(value, given))

    def get(self, path: str) -> Any:
        return self.found[path].value if path in self.found else None

    def given(self, path: str) -> Given | None:
        """The key that said it, where a file did."""
        return self.found[path].given if path in self.found else None

    def stated(self, path: str) -> Any:
        """The value that a file states; None where it is a default."""
        return self.get(path) if self.given(path) else None

    def take(self, path: str) -> Any:
        """A fact, which is no key of ours: its last reader takes it away."""
        return self.found.pop(path).value if path in self.found else None

    def put(self, path: str, value: Any) -> None:
        self.found[path] = Found(value, self.given(path))

    def drop(self, path: str, why: str) -> None:
        """What a file says of a path is left out."""
        before = self.found.pop(path, None)
        if before is not None and before.given is not None:
            self.left.append((before.given, why))


def contradiction(one: Given, other: Given, path: str) -> ConfigError:
    both = f" (both are {path} here)" if "." in path and one.key != other.key else ""
    return ConfigError(
        f"{one.key} is {shown(one.value)} ({one.where}), but {other.key} is {shown(other.value)} ({other.where}){both}; "
        "let them agree, or leave one out."
    )


def merged(files: Sequence[tuple[str, Sequence[Given]]]) -> Facts:
    """What all files say together: (program, its keys) each. What none says is as their program has it."""
    facts = Facts()
    for kind, keys in files:
        for given in keys:
            _add(facts, kind, given, {kind for kind, _ in files})
    # DeepSpeed leaves to the trainer what it does not say itself.
    kinds = {kind for kind, _ in files}
    kind = LLAMA_FACTORY if LLAMA_FACTORY in kinds else next(iter(kinds))
    _add_defaults(facts, kind, [given.key for program, keys in files if program == kind for given in keys])
    return facts


def _add(facts: Facts, kind: str, given: Given, kinds: set[str]) -> None:
    row = row_of(TABLES[kind], given.key)
    if row is None:
        facts.left.append((given, unknown(kind, given)))
    elif given.value == AUTO and kind != LLAMA_FACTORY:
        there = LLAMA_FACTORY in kinds
        facts.left.append(
            (given, "as the trainer's file has it" if there else "the trainer's file, which is not here, would say it")
        )
    elif row.becomes is None:
        facts.left.append((given, row.why))
    else:
        try:
            values = row.becomes(given.value)
        except Left as left:
            (facts.lost if left.matters else facts.left).append((given, str(left)))
            return
        except Refused as refused:
            raise refusal(given, str(refused)) from None
        for path, value in values.items():
            facts.add(path, value, given)
        if row.differs and values:
            facts.differs.append((given, row.differs))


def _add_defaults(facts: Facts, kind: str, keys: Iterable[str]) -> None:
    """Of a key in a mapping only where a file has that mapping."""
    keys = list(keys)
    for key, row in TABLES[kind].items():
        parent = key.partition(".")[0] if "." in key else ""
        asked = not parent or any(given.startswith(f"{parent}.") for given in keys)
        if row.default is not None and row.becomes is not None and key not in keys and asked:
            for path, value in row.becomes(row.default).items():
                facts.found.setdefault(path, Found(value))
