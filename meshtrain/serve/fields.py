"""The fields of a JSON object that somebody else wrote: each is read by its type and bounds, and refused by a sentence.

null is as good as a field that is left out, as OpenAI has it.
"""

import json
import math
from collections.abc import Collection, Iterable
from typing import Any

from meshtrain.errors import nearest, short
from meshtrain.serve.errors import Refused


def parsed(body: bytes) -> "Fields":
    """The JSON object that a body holds."""
    try:
        content = json.loads(body, parse_constant=_no_number)
    # of numbers with thousands of digits and texts that are no UTF-8 too
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {short(error)}.", code="invalid_json") from None
    except RecursionError:
        raise Refused(400, "the body is no JSON that can be read: it nests too deep.", code="invalid_json") from None
    return Fields(content, "the body")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number there")


def shown(value: object) -> str:
    """A value as a sentence repeats it."""
    return short(json.dumps(value, ensure_ascii=False))


class Fields:
    """One object. `name`: where it stands, as sentences have it; `prefix`: what goes before its fields' names."""

    def __init__(self, values: Any, name: str, prefix: str = "") -> None:
        if not isinstance(values, dict):
            raise Refused(400, f"{name} is {shown(values)}, but it must be an object.", prefix.rstrip(".") or None, "invalid_type")  # fmt: skip
        self.values, self.prefix = {key: value for key, value in values.items() if value is not None}, prefix
        self.name = name

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def only(self, known: Collection[str]) -> None:
        """Refuses the fields that are not known."""
        for key in self.values:
            if key not in known:
                ending = nearest(key, known) or "."
                raise Refused(400, f"{self.name} has a field {short(key)}, which is not known here{ending}", self.prefix + short(key), "unknown_parameter")  # fmt: skip

    def wrong(self, name: str, legal: str, code: str = "invalid_value") -> Refused:
        where = self.prefix + name
        return Refused(400, f"{where} is {shown(self.values[name])}, but it must be {legal}.", where, code)

    def needed(self, name: str) -> Any:
        if name not in self.values:
            where = self.prefix + name
            raise Refused(400, f"{where} is missing.", where, "missing_required_parameter")
        return self.values[name]

    def whole(self, name: str, least: int, most: int, default: Any = None) -> Any:
        """A whole number in bounds."""
        if name not in self.values:
            return default
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, "a whole number", "invalid_type")
        if not least <= value <= most:
            raise self.wrong(name, f"at least {least} and at most {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float, above: bool = False) -> float:
        """A number in bounds; `above`: more than the least."""
        if name not in self.values:
            return default
        value = self.values[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number", "invalid_type")
        # 1e999 is read as infinite
        if not least <= value <= most or (above and value == least) or not math.isfinite(value):
            raise self.wrong(name, f"{'above' if above else 'at least'} {least:g} and at most {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", "invalid_type")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", "invalid_type")
        return encodable(value, self.prefix + name)

    def object(self, name: str) -> "Fields":
        where = self.prefix + name
        return Fields(self.values.get(name, {}), where, f"{where}.")

    def choice(self, name: str, legal: Iterable[str], default: str) -> str:
        value, words = self.text(name, default), list(legal)
        if value not in words:
            raise self.wrong(name, " or ".join(map(shown, words)))
        return value


def encodable(text: str, where: str) -> str:
    """Half a surrogate pair, which JSON can spell, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(400, f"{where} is no text: it holds half a surrogate pair.", where, "invalid_value") from None
    return text
