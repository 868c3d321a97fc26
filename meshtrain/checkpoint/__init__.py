"""Checkpoints: asynchronous, atomic, verified; saved in one canonical layout, restored onto any mesh.

    state ──canonical──► Orbax ──► 12.writing/ ──digests, manifest, COMMIT──► 12/ ──retention──► older ones removed
    12/ ──verify──► Orbax, straight into the target's shards ──live──► state

A step counts once it has its COMMIT and its name, and is restored only if every file has its digest. What is damaged is set aside, and
the run goes on from the step before. No mesh, schedule or ZeRO stage leaves a trace in what is saved.

- `meshtrain.checkpoint.checkpointer`: all of it, as the training loop sees it.
- `meshtrain.checkpoint.steps`: what lies on disk. `meshtrain.checkpoint.manifest`, `meshtrain.checkpoint.digests`: two files of it.
- `meshtrain.checkpoint.canonical`: live to canonical and back; in host memory `meshtrain.checkpoint.assembling`, else on the devices
  `meshtrain.checkpoint.rearrange`.
- `meshtrain.checkpoint.saving`, `meshtrain.checkpoint.arrays`: the thread that writes, and Orbax. `meshtrain.checkpoint.frozen`: what is
  not trained, linked from an earlier step.
- `meshtrain.checkpoint.finding`, `meshtrain.checkpoint.restoring`: where a run starts from, and how.
- `meshtrain.checkpoint.compatible`, `meshtrain.checkpoint.anew`: what may change in between; starting over.
- `meshtrain.checkpoint.retention`: which ones stay.

`python -m meshtrain.checkpoint ls RUN` lists them; also `show`, `verify` and `diff`. Weights alone, for use: `meshtrain.reader`.

Measured (`experiments/bench_checkpoint.py`): a step is blocked for 0.6% to 1.6% of a save, verifying runs at 3.5 GB/s, and restoring
needs 1.05 to 1.25 of the state's memory. Of 113 faults injected by `python -m experiments.faults` none is lost silently.
"""

from meshtrain.checkpoint.checkpointer import Checkpointer
from meshtrain.checkpoint.quiet import without_tracebacks
from meshtrain.checkpoint.saving import CheckpointError

without_tracebacks()

__all__ = ["CheckpointError", "Checkpointer"]
