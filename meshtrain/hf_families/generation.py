"""Fields of a generation_config.json that are read here, and what is legal in them. It may come from anybody."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from meshtrain.errors import short
from meshtrain.hf_families.json_fields import Json

GENERATION = "generation_config.json"
MOST = 1 << 31  # of ids, and of numbers that end up as float32 or int32


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < MOST and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _are_ids(value: Any) -> bool:
    return all(map(_is_whole, value if isinstance(value, list) else [value]))


# For each field whether a value is legal, and what is.
SAMPLING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": (_is_number, "a number from 0"),
    "top_k": (_is_whole, "a whole number from 0"),
    "top_p": (
        lambda value: _is_number(value) and 0 < value <= 1,
        "a number above 0, and at most 1",
    ),
}
IDS = dict.fromkeys(
    ("bos_token_id", "eos_token_id"),
    (_are_ids, "a whole number from 0, or a list of them"),
)


def problems(
    generation: Json, fields: dict[str, tuple[Callable[[Any], bool], str]]
) -> Iterator[str]:
    """Yields a sentence on each field that is not legal; null asks for nothing."""
    for name, (legal, words) in fields.items():
        value = generation.get(name)
        if value is not None and not legal(value):
            yield f"{GENERATION}: {name} is {short(repr(value))}; it must be {words}."
