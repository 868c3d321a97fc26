"""A few traced steps read, and each second of them given a kind.

    traces/STEP/ ──read──► Trace ──join: op → instruction──► scopes: what for ──share: the wall──► Attribution

The kinds stand in `meshtrain.report.trace.attribution`, and how the wall is shared among them in `meshtrain.report.trace.share`.
"""

from meshtrain.report.trace.attribute import attribute
from meshtrain.report.trace.attribution import COLLECTIVES, KINDS, MEANING, PARTS, Attribution, Kind, planned
from meshtrain.report.trace.read import Trace, read_trace

__all__ = ["COLLECTIVES", "KINDS", "MEANING", "PARTS", "Attribution", "Kind", "Trace", "attribute", "planned", "read_trace"]  # fmt: skip
