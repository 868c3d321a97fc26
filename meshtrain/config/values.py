"""A value by the type and the bounds that its key declares, whatever YAML would take it for.

YAML readers disagree about 1e-3 (a text, or 0.001), 010 (8, or 10), 1:30 (90, or a text) and off (false, or a text). The declared type
decides where there is one way to read a value, and what has two is refused with both.
"""

import re
import types
import typing
import unicodedata
from typing import Any, Literal

import yaml

from meshtrain.config.key import LARGEST, TINIEST, Key
from meshtrain.config.tree import BOOL, NULL, shape
from meshtrain.errors import ConfigError, nearest, short

TRUE, FALSE = {"true", "yes", "on"}, {"false", "no", "off"}
NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
MOST_CHARACTERS = 1024  # of a text: what every system allows a path
MOST_DIGITS = 40  # of a whole number: more are too large for every key

_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FRACTION = re.compile(r"[-+]?(?=\.?[0-9])([0-9]+(_[0-9]+)*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0_?[0-9][0-9_]*")


def value(hint: Any, key: Key, node: yaml.Node, where: str) -> Any:
    """What a node holds, as a `hint` that fits the line of its `key`; ConfigError, which begins with `where`, otherwise."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if key.null and node.tag == NULL:
        return None
    if origin in (typing.Union, types.UnionType):
        if node.tag == NULL:
            return None
        return value(next(a for a in args if a is not type(None)), key, node, where)
    if origin is tuple:
        if not isinstance(node, yaml.SequenceNode):
            example = "qkv, mlp_out" if args[0] is str else "2, 3"
            raise ConfigError(f"{where} is {shape(node)}; it must be a list, such as [{example}].")
        return tuple(value(args[0], key, item, f"{where}[{i}]") for i, item in enumerate(node.value))
    legal, choices = _legal(hint, key), _choices(hint, key)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where} is {shape(node)}; it must be {legal}.")
    text = str(node.value)
    if node.tag == NULL or (text == "" and (choices or hint is not str)):
        raise ConfigError(f"{where} has no value; it must be {legal}.")
    wrong = f"{where} is {short(repr(text))}; it must be {legal}"
    if choices:
        if text in choices:
            return choices[text]
        raise ConfigError(wrong + (nearest(text, choices) or "."))
    if hint is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise ConfigError(f"{wrong}.")
    return _text(node, where, wrong) if hint is str else _number(hint, key, text, where, wrong)


def _text(node: yaml.ScalarNode, where: str, wrong: str) -> str:
    text = str(node.value)
    if text == "":
        raise ConfigError(f"{where} is empty; it must be a text.")
    if node.tag == BOOL and node.style is None:
        raise ConfigError(
            f"{where} is {text}, which YAML takes for true or false; if the text is meant, write '{text}' in quotes."
        )
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ConfigError(f"{wrong} in UTF-8, without control characters.")
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{wrong} of at most {MOST_CHARACTERS} characters.")
    return text


def _number(hint: type, key: Key, text: str, where: str, wrong: str) -> int | float:
    if _LEADING_ZERO.fullmatch(text) and len(text) <= MOST_DIGITS:
        raise ConfigError(
            f"{where} is '{text}', which some readers of YAML take for octal; write {_without_zeros(text)}."
        )
    if hint is int and not (_WHOLE.fullmatch(text) and len(text) <= MOST_DIGITS):
        raise ConfigError(wrong + _meant(text))
    number = hint(text) if _FRACTION.fullmatch(text) else float("nan")
    if not abs(number) < float("inf"):
        raise ConfigError(f"{wrong}.")
    if hint is float and 0 < abs(number) < TINIEST:
        raise ConfigError(f"{where} is {number:g}, which is 0 in float32; it must be {_range(hint, key)}.")
    least, above, most = key.least, key.above, _most(hint, key)
    if (least is not None and number < least) or (above is not None and number <= above) or number > most:
        raise ConfigError(f"{where} is {number}; it must be {_range(hint, key)}.")
    return number


def _without_zeros(text: str) -> str:
    """What 010 may stand for, in decimal: 10 or 8."""
    decimal = int(text)
    octal = decimal if re.search("[89]", text) else int(text, 8)
    return str(decimal) if octal == decimal else f"{decimal} or {octal}"


def _meant(text: str) -> str:
    """How a sentence on what is no whole number ends: 1e3 and 0x3e8 have one in mind."""
    try:
        number = int(text, 0) if re.fullmatch("[-+]?0[xXoObB].{1,8}", text) else float(text)
    except ValueError:
        return "."
    small = abs(number) <= LARGEST[int]
    return f"; did you mean {int(number)}?" if small and number == int(number) else "."


def _legal(hint: Any, key: Key) -> str:
    if hint in LARGEST:
        return f"{NAMES[hint]}, {_range(hint, key)}"
    choices = _choices(hint, key)
    return f"one of {', '.join(choices)}" if choices else NAMES[hint]


def _choices(hint: Any, key: Key) -> dict[str, Any]:
    """The legal values by what stands in the YAML, where they are counted out."""
    listed = typing.get_args(hint) if typing.get_origin(hint) is Literal else key.one_of or ()
    return {str(choice): choice for choice in listed}


def _range(hint: type, key: Key) -> str:
    said = {"at least": key.least, "above": key.above, "at most": _most(hint, key)}
    parts = [
        f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"
        for word, bound in said.items()
        if bound is not None
    ]
    return " and ".join(parts) + (f", in {key.unit}" if key.unit else "")


def _most(hint: type, key: Key) -> float:
    return LARGEST[hint] if key.most is None else key.most
