"""A config: the keys that are not as the defaults have them. Pointing at one tells what it means."""

import math
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
    for section, lines in _changed(config).items():
        html.append(f"<div>{section}:</div>")
        text.append(f"{section}:")
        for name, value, doc in lines:
            told = f'<span title="{escape(doc)}">{escape(name)}: <b>{escape(value)}</b></span>'
            html.append(f'<div style="padding-left:2em">{told}</div>')
            text.append(f"  {name}: {value}")
    if not text:
        return Picture(block(faint("the defaults")), "{}  # the defaults")
    return Picture(f'<div style="font:12px/1.5 ui-monospace,monospace">{"".join(html)}</div>', "\n".join(text))


def _changed(config: Config) -> dict[str, list[tuple[str, str, str]]]:
    """(key, value, meaning) by section, of what differs from the defaults and does not follow from other keys."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for path, key in keys(Config).items():
        section, _, name = path.partition(".")
        value = value_of(config, path)
        if value != key.default and not followed(config, path):
            found.setdefault(section, []).append((name, _yaml(value), key.doc))
    return found


def _yaml(value: Any) -> str:
    """As it stands in a line of YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip()
