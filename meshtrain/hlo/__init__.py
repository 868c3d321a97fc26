"""Reads compiled XLA programs: what a step sends, over which mesh axis, how often, and from which line of the source.

    program.lower().compile() ──text──► module: computations, loops, lines ──► traffic: axis, kind, bytes, times

The HLO is read as XLA prints it, on CPUs and for GPUs that may only be described. Since forward and backward run inside
one fully manual `shard_map`, every collective of a step stands in our source, and this says which of them became what.

- `meshtrain.hlo.module`: the text, in all of XLA's spellings, with a drawing of how trips are counted.
- `meshtrain.hlo.traffic`: what is sent, by whom, and the bytes of live arrays.

Measured (`tests/test_traffic.py`): what is read here equals the formulas of the papers for every axis, ZeRO stage and
schedule.
"""

from meshtrain.hlo.module import (
    KINDS,
    HloLine,
    Module,
    byte_count,
    dtypes,
    replica_groups,
    short_path,
)
from meshtrain.hlo.traffic import (
    Collective,
    CompiledCollectives,
    collectives,
    live_bytes,
)

__all__ = [
    "KINDS",
    "Collective",
    "CompiledCollectives",
    "HloLine",
    "Module",
    "byte_count",
    "collectives",
    "dtypes",
    "live_bytes",
    "replica_groups",
    "short_path",
]
