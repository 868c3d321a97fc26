"""A config: the keys that are not as the defaults have them. Pointing at one tells what it means."""

import math
from collections.abc import Iterator
from html import escape
from typing import Any

import yaml

from meshtrain.config.follow import followed, value_of
from meshtrain.config.key import keys
from meshtrain.config.schema import Config
from meshtrain.pictures.picture import Picture, block, faint


def picture(config: Config) -> Picture:
    """As YAML that `mt.load` reads back."""
    html, text = [], []
    above: list[str] = []
    for path, value, doc in _changed(config):
        *sections, name = path.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != above[: depth + 1]:
                html.append(_line(depth, f"{section}:"))
                text.append(f"{'  ' * depth}{section}:")
        above, depth = sections, len(sections)
        html.append(_line(depth, f'<span title="{escape(doc)}">{escape(name)}: <b>{escape(value)}</b></span>'))
        text.append(f"{'  ' * depth}{name}: {value}")
    if not text:
        return Picture(block(faint("the defaults")), "{}  # the defaults")
    return Picture(f'<div style="font:12px/1.5 ui-monospace,monospace">{"".join(html)}</div>', "\n".join(text))


def _line(depth: int, words: str) -> str:
    return f'<div style="padding-left:{2 * depth}em">{words}</div>'


def _changed(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key path, value, meaning) of what differs from the defaults and does not follow from other keys, section by section."""
    for path, key in keys(Config).items():
        value = value_of(config, path)
        if value != key.default and not followed(config, path):
            yield path, _yaml(value), key.doc


def _yaml(value: Any) -> str:
    """As it stands in a line of YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip()
