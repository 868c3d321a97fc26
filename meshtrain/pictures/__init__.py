"""Pictures for a notebook, and the same as text for a terminal: what a mesh, a weight, a step, a schedule and a plan
look like.

    show(thing) ──by its class──► Picture(html, text)

    thing                           shows                                                              module
    Config                          what differs from the defaults, with each key's meaning            here
    Mesh                            the devices, by stage, data rank and tensor rank                   pictures.devices
    Layout                          where each weight lies, and over which axes it is split            pictures.devices
    an array, State, any tree       the same of live arrays                                            pictures.devices
    Program                         its mesh, its weights, what a device holds of the state            pictures.program
    CompiledCollectives             what a step sends, over which axis, from which line                pictures.program
    Table, Timeline                 who does what at which clock; when, and how long others wait       schedule.draw
    Plan                            memory, time and traffic of a layout                               plan.page
    Probe                           how fast each pair of devices talks                                probe.page

Everything of ours shows itself as the last line of a cell; `mt.show` is for what JAX made. HTML with inline styles and
SVG: no script, nothing fetched, right on white and on black. One colour an axis (data blue, tensor orange, pipeline
green, islands purple), one hue a stage.
"""

import importlib
import math
from html import escape
from typing import Any

import yaml

from meshtrain.config.follow import followed, value_of
from meshtrain.config.key import keys
from meshtrain.config.schema import Config
from meshtrain.draw.picture import Picture, block, faint

__all__ = ["Picture", "show"]

# By class, the module whose `picture` shows it: found by name, so that a schedule is drawn without loading JAX.
_BY_CLASS = {
    "meshtrain.config.schema.Config": "pictures",
    "meshtrain.step.Program": "pictures.program",
    "meshtrain.reader.Model": "pictures.program",
    "meshtrain.hlo.traffic.CompiledCollectives": "pictures.program",
    "meshtrain.schedule.table.Table": "schedule.draw",
    "meshtrain.schedule.simulation.Timeline": "schedule.draw",
    "meshtrain.plan.estimate.Plan": "plan.page",
    "meshtrain.probe.figures.Probe": "probe.page",
}


def show(thing: Any) -> Picture:
    """Returns the picture of anything of meshtrain's, of a mesh, and of an array or a tree of arrays.

    As the last line of a cell it is drawn; `print(mt.show(x))` writes it. ConfigError for what has no picture.
    """
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__)
    module = next(
        (_BY_CLASS[name] for name in names if name in _BY_CLASS), "pictures.devices"
    )
    return importlib.import_module(f"meshtrain.{module}").picture(thing)


def picture(config: Config) -> Picture:
    """Returns the keys that are neither at their default nor follow from others, as YAML that `mt.load` reads back.

    Pointing at a key shows its meaning.
    """
    html = []
    text = []
    above: list[str] = []
    for path, key in keys(Config).items():
        value = value_of(config, path)
        if value == key.default or followed(config, path):
            continue
        *sections, name = path.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != above[: depth + 1]:
                html.append(_line(depth, f"{section}:"))
                text.append(f"{'  ' * depth}{section}:")
        above = sections
        depth = len(sections)
        plain = list(value) if isinstance(value, tuple) else value
        words = (
            yaml.safe_dump(plain, default_flow_style=True, width=math.inf)
            .removesuffix("...\n")
            .rstrip()
        )
        html.append(
            _line(
                depth,
                f'<span title="{escape(key.doc)}">{escape(name)}: <b>{escape(words)}</b></span>',
            )
        )
        text.append(f"{'  ' * depth}{name}: {words}")
    if not text:
        return Picture(block(faint("the defaults")), "{}  # the defaults")
    return Picture(
        f'<div style="font:12px/1.5 ui-monospace,monospace">{"".join(html)}</div>',
        "\n".join(text),
    )


def _line(depth: int, words: str) -> str:
    return f'<div style="padding-left:{2 * depth}em">{words}</div>'
