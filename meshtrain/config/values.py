"""YAML text to nodes whose types nobody has guessed, and a node to a value by the type and bounds that its key
declares.

YAML readers disagree about 1e-3 (a text, or 0.001), 010 (8, or 10), 1:30 (90, or a text) and off (false, or a text).
The declared type decides where there is one way to read a value, and what has two is refused with both.
"""

import contextlib
import re
import types
import typing
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import yaml

from meshtrain.config.key import LARGEST, TINIEST, Key
from meshtrain.errors import ConfigError, nearest, short
from meshtrain.registry import Unimported

NULL = "tag:yaml.org,2002:null"
BOOL = "tag:yaml.org,2002:bool"
MAX_DEPTH = 8  # a config is 4 deep: section, key, list, entry
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
# what the parser says of a tab, and what a person would
TAB = (
    "found character '\\t' that cannot start any token",
    "a tab cannot indent YAML; use spaces",
)
TRUE = {"true", "yes", "on"}
FALSE = {"false", "no", "off"}
NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
}
MAX_CHARACTERS = 1024  # of a text: what every system allows a path
MAX_DIGITS = 40  # of a whole number: more are too large for every key

# What would have to be trusted for names that are registered nowhere to be (`names_accepted`).
_UNIMPORTED: ContextVar[str | None] = ContextVar("_UNIMPORTED", default=None)

_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FRACTION = re.compile(
    r"[-+]?(?=\.?[0-9])([0-9]+(_[0-9]+)*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?"
)
_LEADING_ZERO = re.compile(r"[-+]?0_?[0-9][0-9_]*")


class _Composer(yaml.SafeLoader):
    """Refuses tags and deep nesting.

    An alias stands for the node it names, without a copy: a short text cannot grow.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, f"there is a tag, {event.tag}", event.start_mark
            )
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@contextlib.contextmanager
def names_accepted(run: str) -> Iterator[None]:
    """Has names that somebody may have registered read as they are, since the imports of a run are left out."""
    token = _UNIMPORTED.set(run)
    try:
        yield
    finally:
        _UNIMPORTED.reset(token)


def compose(text: str) -> yaml.Node | None:
    """Returns the root of a YAML text, None if it holds nothing. Raises yaml.YAMLError; see `problem`."""
    return yaml.compose(text, Loader=_Composer)


def problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    """Returns the line, where it is known, and the reason for which a text is not valid YAML."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    return mark.line + 1 if mark else None, short(reason.replace(*TAB))


def plain(text: str) -> yaml.ScalarNode:
    """Returns the scalar node of a text without quotes, whatever is in it."""
    return yaml.ScalarNode(
        yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False)), text
    )


def shape(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return f"the single value {short(repr(node.value))}"


def as_text(value: object) -> str:
    """Returns a value as `--set` takes it: `true`, `null`, `[qkv,mlp_out]`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_text, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def value(
    hint: Any,
    key: Key,
    node: yaml.Node,
    where: str,
    words: Sequence[str] = (),
) -> Any:
    """Returns the value of a node, as a `hint` within the bounds of its `key` or one of the `words` that may stand for
    one. Raises ConfigError, which begins with `where`.
    """
    if key.null and node.tag == NULL:
        return None
    return _value(hint, key, node, where, words)


def _value(
    hint: Any,
    key: Key,
    node: yaml.Node,
    where: str,
    words: Sequence[str] = (),
) -> Any:
    """Returns the value of a node, or of a list's item, of which none is null."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if node.tag == NULL and type(None) in args:
            return None
        words = [
            word
            for a in args
            if typing.get_origin(a) is Literal
            for word in typing.get_args(a)
        ]
        return _value(
            next(a for a in args if a is not type(None)), key, node, where, words
        )
    if origin is tuple:
        return _list(args[0], key, node, where)
    return _scalar(hint, key, node, where, words)


def _list(item: Any, key: Key, node: yaml.Node, where: str) -> tuple:
    """Returns the values of a list's node."""
    if not isinstance(node, yaml.SequenceNode):
        given = "qkv, mlp_out"
        if isinstance(node, yaml.ScalarNode) and node.value:
            given = node.value
        example = short(given) if item is str else "2, 3"
        raise ConfigError(
            f"{where} is {shape(node)}; it must be a list, such as [{example}]."
        )
    return tuple(
        _value(item, key, inner, f"{where}[{i}]") for i, inner in enumerate(node.value)
    )


def _scalar(
    hint: Any,
    key: Key,
    node: yaml.Node,
    where: str,
    words: Sequence[str],
) -> Any:
    """Returns the value of a node that is neither a list nor a mapping."""
    # the legal values by their text, where they are counted out
    listed: Iterable[Any] = key.one_of or ()
    if typing.get_origin(hint) is Literal:
        listed = typing.get_args(hint)
    choices = {str(choice): choice for choice in listed}
    legal = " or ".join(
        (*words, takes(hint, key, _range(hint, key) if hint in LARGEST else ""))
    )
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where} is {shape(node)}; it must be {legal}.")
    text = str(node.value)
    if node.tag == NULL or (text == "" and (choices or hint is not str)):
        raise ConfigError(f"{where} has no value; it must be {legal}.")
    wrong = f"{where} is {short(repr(text))}; it must be {legal}"
    if text in words:
        return text
    if near := nearest(text, words):
        raise ConfigError(wrong + near)
    if choices:
        if text in choices:
            return choices[text]
        if key.one_of is not None and (run := _UNIMPORTED.get()) and text:
            return Unimported(text, where.rpartition(": ")[2], run)
        raise ConfigError(wrong + (nearest(text, choices) or "."))
    if hint is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise ConfigError(f"{wrong}.")
    if hint is str:
        return _text(node, where, wrong)
    return _number(hint, key, text, where, wrong)


def takes(hint: Any, key: Key, bounds: str | None = None) -> str:
    """Returns in words what a `hint` takes within the bounds of its `key`, those that are its own unless `bounds` are
    given.
    """
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            "null" if a is type(None) else takes(a, key, bounds) for a in args
        )
    if origin is tuple:
        return f"a list, of which each is {takes(args[0], key, bounds)}"
    if choices := [
        str(choice) for choice in (args if origin is Literal else key.one_of or ())
    ]:
        if len(choices) > 1:
            return f"one of {', '.join(choices)}"
        return choices[0]
    if bounds is None and hint in LARGEST:
        form = "g" if hint is float else ""
        bounds = _range(hint, key).removesuffix(f"at most {LARGEST[hint]:{form}}")
        bounds = bounds.removesuffix(" and ")
    if bounds:
        return f"{NAMES[hint]}, {bounds}"
    return NAMES[hint]


def _text(node: yaml.ScalarNode, where: str, wrong: str) -> str:
    text = str(node.value)
    if text == "":
        raise ConfigError(f"{where} is empty; it must be a text.")
    if node.tag == BOOL and node.style is None:
        quoted = f"if the text is meant, write '{text}' in quotes"
        raise ConfigError(
            f"{where} is {text}, which YAML takes for true or false; {quoted}."
        )
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise ConfigError(f"{wrong} in UTF-8, without control characters.")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{wrong} of at most {MAX_CHARACTERS} characters.")
    return text


def _number(hint: type, key: Key, text: str, where: str, wrong: str) -> int | float:
    if _LEADING_ZERO.fullmatch(text) and len(text) <= MAX_DIGITS:
        decimal = int(text)
        octal = decimal if re.search("[89]", text) else int(text, 8)
        meant = str(decimal) if octal == decimal else f"{decimal} or {octal}"
        raise ConfigError(
            f"{where} is '{text}', which some readers of YAML take for octal; write {meant}."
        )
    if hint is int and not (_WHOLE.fullmatch(text) and len(text) <= MAX_DIGITS):
        raise ConfigError(wrong + _nearest_integer(text))
    number = hint(text) if _FRACTION.fullmatch(text) else float("nan")
    if not abs(number) < float("inf"):
        raise ConfigError(f"{wrong}.")
    if hint is float and 0 < abs(number) < TINIEST:
        raise ConfigError(
            f"{where} is {number:g}, which is 0 in float32; it must be {_range(hint, key)}."
        )
    least = key.least
    above = key.above
    most = _most(hint, key)
    if (
        (least is not None and number < least)
        or (above is not None and number <= above)
        or number > most
    ):
        raise ConfigError(f"{where} is {number}; it must be {_range(hint, key)}.")
    return number


def _nearest_integer(text: str) -> str:
    """Returns the ending of the sentence that asks for a whole number: 1e3 and 0x3e8 mean one."""
    try:
        number = (
            int(text, 0) if re.fullmatch("[-+]?0[xXoObB].{1,8}", text) else float(text)
        )
    except ValueError:
        return "."
    small = abs(number) <= LARGEST[int]
    if small and number == int(number):
        return f"; did you mean {int(number)}?"
    return "."


def _range(hint: type, key: Key) -> str:
    bounds = {"at least": key.least, "above": key.above, "at most": _most(hint, key)}
    text = lambda bound: f"{bound:g}" if isinstance(bound, float) else str(bound)
    legal = " and ".join(
        f"{word} {text(bound)}" for word, bound in bounds.items() if bound is not None
    )
    if key.unit:
        return f"{legal}, in {key.unit}"
    return legal


def _most(hint: type, key: Key) -> float:
    if key.most is None:
        return LARGEST[hint]
    return key.most
