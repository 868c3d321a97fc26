"""Pictures for a notebook, and the same as text for a terminal: what a mesh, a weight, a step, a schedule and a plan look like.

    show(thing) ──by its class──► Picture(html, text)

    thing                           shows                                                              file
    Config                          what differs from the defaults, with each key's meaning            config
    Mesh                            the devices, by stage, data rank and tensor rank                   mesh
    Program                         its mesh, its weights, what a device holds of the state            program
    Layout                          where each weight lies, and over which axes it is split            layout
    an array, State, any tree       the same of live arrays                                            arrays
    Collectives                     what a step sends, over which axis, from which line                collectives
    Table, Timeline                 who does what in which tick; when, and how long others wait        schedule
    Plan                            memory, time and traffic of a layout                               plan
    Probe                           how fast each pair of devices talks                                pairs

Everything of ours shows itself as the last line of a cell; `mt.show` is for what JAX made. HTML with inline styles and SVG: no script,
nothing fetched, right on white and on black. One colour an axis (data blue, tensor orange, pipeline green, islands purple), one hue a stage.
"""

import importlib
from typing import Any

from meshtrain.pictures.picture import Picture

__all__ = ["Picture", "show"]

# By class, the module of this package whose `picture` shows it: found by name, so that a schedule is drawn without loading JAX.
# Anything else is JAX's, or nothing that has a picture.
_BY_CLASS = {
    "meshtrain.config.schema.Config": "config",
    "meshtrain.step.Program": "program",
    "meshtrain.reader.Model": "program",
    "meshtrain.parallel.layout.Layout": "layout",
    "meshtrain.hlo.traffic.Collectives": "collectives",
    "meshtrain.schedule.table.Table": "schedule",
    "meshtrain.schedule.simulate.Timeline": "schedule",
    "meshtrain.plan.estimate.Plan": "plan",
    "meshtrain.probe.figures.Probe": "pairs",
}


def show(thing: Any) -> Picture:
    """The picture of anything of meshtrain's, of a mesh, and of an array or a tree of arrays.

    As the last line of a cell it is drawn; `print(mt.show(x))` writes it. ConfigError for what has no picture.
    """
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__)
    module = next((_BY_CLASS[name] for name in names if name in _BY_CLASS), "arrays")
    return importlib.import_module(f"meshtrain.pictures.{module}").picture(thing)
