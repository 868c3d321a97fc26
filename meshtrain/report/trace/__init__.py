"""Reads a few traced steps, and gives each second of them a kind.

    traces/STEP/ ──read──► Trace ──instructions: what each op is for──► attribute: sharing the wall ──► Attribution

The kinds stand in `meshtrain.report.trace.attribution`.
"""

from meshtrain.report.trace.attribute import attribute
from meshtrain.report.trace.attribution import (
    COLLECTIVES,
    KINDS,
    MEANING,
    PARTS,
    Attribution,
    Kind,
    planned,
)
from meshtrain.report.trace.read import Trace, read_trace

__all__ = [
    "COLLECTIVES",
    "KINDS",
    "MEANING",
    "PARTS",
    "Attribution",
    "Kind",
    "Trace",
    "attribute",
    "planned",
    "read_trace",
]
