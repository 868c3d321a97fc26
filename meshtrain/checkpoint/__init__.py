"""Checkpoints: asynchronous, atomic, verified; saved as global arrays, restored onto any mesh.

    state ──global arrays──► Orbax ──► 12.writing/ ──digests, manifest, COMMIT──► 12/ ──retention──► older ones removed
    12/ ──verify──► Orbax, straight into the target's shards ──live──► state

A step counts once it has its COMMIT and its name, and is restored only if every file has its digest. A damaged one is
set aside, and the run goes on from the step before. No mesh, schedule or ZeRO stage leaves a trace in what is saved.

Orbax reads and writes the arrays alone; the commit protocol around it is ours. Orbax has no digests: of 120 flipped
bits in array data it restored 120 silently. By default it takes any directory with a number for a committed step. It
writes every array of every step; here frozen weights are links to an earlier step's.

- `meshtrain.checkpoint.checkpointer`: all of it, as the training loop sees it.
- `meshtrain.checkpoint.steps`: the step directories. `meshtrain.checkpoint.manifest`, `meshtrain.checkpoint.digests`:
  two files of them.
- `meshtrain.checkpoint.global_arrays`: live to global arrays and back; `meshtrain.checkpoint.rearrangement`: where the
  two differ.
- `meshtrain.checkpoint.saving`, `meshtrain.checkpoint.arrays`: the thread that writes, and Orbax.
  `meshtrain.checkpoint.frozen`: weights
  that are not trained, linked from an earlier step.
- `meshtrain.checkpoint.finding`: where a run starts from, and which steps stay. `meshtrain.checkpoint.restoring`: what
  may change in
  between, and how a step is restored. `meshtrain.checkpoint.resharding`: state that depends on the mesh, onto another
  one.

`python -m meshtrain.checkpoint ls RUN` lists them; also `show`, `verify` and `diff`. Weights alone, for use:
`meshtrain.reader`.

Measured (`experiments/bench_checkpoint.py`): a save blocks a step for 0.6% to 1.6% of its duration. Verifying runs at
3.5 GB/s, and restoring needs 1.05 to 1.25 of the state's memory.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.checkpoint.checkpointer import Checkpointer as Checkpointer
    from meshtrain.checkpoint.saving import CheckpointError as CheckpointError

# With JAX and Orbax when they are first asked for: the command's --help waits for neither.
_HOMES = {"CheckpointError": "saving", "Checkpointer": "checkpointer"}
__all__ = list(_HOMES)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(
            importlib.import_module(f"{__name__}.{_HOMES[name]}"), name
        )
        return globals()[name]
