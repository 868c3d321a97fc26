"""Checkpoints: asynchronous, atomic, verified; saved in one canonical layout, restored onto any mesh.

state ──canonical──► Orbax ──► 12.writing/ ──digests, manifest, COMMIT──► 12/ ──retention──► older ones removed
12/ ──verify──► Orbax, straight into the target's shards ──live──► state
"""

from meshtrain.checkpoint.checkpointer import Checkpointer
from meshtrain.checkpoint.quiet import without_tracebacks
from meshtrain.checkpoint.saving import CheckpointError

without_tracebacks()

__all__ = ["CheckpointError", "Checkpointer"]
