"""Python's garbage collection, at the same steps on every process: one that collects alone keeps all others waiting.

    step        1 ... 99   100        101 ...
    process 0   ──────────╴collects╶──────────
    process 1   ──────────╴collects╶──────────

Objects that exist when training begins (modules, the compiled program) are never looked through again, so that a
collection takes little time.
"""

import gc
from typing import Any

import jax

from meshtrain.run.hooks import RunHook


class GarbageCollection(RunHook):
    """Collects after every `every`-th step is dispatched, while the devices compute, and at no other moment until
    `close`.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._is_begun = False
        self._was_enabled = gc.isenabled()

    def after_step(
        self, step: int, compiled: jax.stages.Compiled, metrics: dict[str, Any]
    ) -> None:
        if not self._is_begun:
            self._is_begun = True
            gc.collect()
            gc.freeze()
            gc.disable()
        elif step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Leaves the collector as it was."""
        if self._is_begun:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
