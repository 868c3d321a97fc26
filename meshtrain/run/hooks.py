"""Run hooks: what happens around the steps of a run, through one protocol of five moments.

    before_batch ─► the batch ─► before_step ─► the step is dispatched ─► after_step
                                                       its metrics have come ─► after_metrics      due ─► before_save

`meshtrain.train` calls each hook at each moment, in their order: supervision, tracing, the offload check, rows, what watches the run,
the check of the numbers. Steps are counted from 1. The metrics of a step come while the next one is under way already.
"""

from typing import Any

import jax

Row = dict[str, Any]
Batch = dict[str, jax.Array]


class RunHook:
    """Base of the hooks: each moment does nothing."""

    def before_batch(self, step: int) -> None:
        """Ahead of everything that the step needs, its batch too."""

    def before_step(self, step: int, compiled: jax.stages.Compiled, state: Any, batch: Batch) -> tuple[Any, Batch]:
        """Ahead of the step's dispatch; returns the state and the batch that it takes."""
        return state, batch

    def after_step(self, step: int, compiled: jax.stages.Compiled, metrics: dict[str, jax.Array]) -> None:
        """The step is dispatched; its metrics are not there yet."""

    def after_metrics(self, row: Row, due: bool) -> None:
        """A step's metrics are on the host. `due`: the row is to be logged."""

    def before_save(self, step: int, state: Any) -> None:
        """Ahead of a save of the state after `step` steps."""
