"""Run hooks: what happens around the steps of a run, through one protocol of five moments.

    before_batch ─► the batch ─► before_step ─► the step is dispatched ─► after_step
                                                       its metrics have come ─► after_metrics      due ─► before_save

`meshtrain.train` calls each hook at each moment, in their order: rows, what watches the run, the check of the numbers,
tracing, the offload check, supervision; then those of `run.callbacks` and of `mt.train(config,
callbacks=[...])`. Steps are counted from 1.
The metrics of a step come while the next one is under way already.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from meshtrain.config import Config
from meshtrain.config.check import callbacks
from meshtrain.errors import ConfigError, short

Row = dict[str, Any]
RowSource = Literal["step", "process"]
Batch = dict[str, jax.Array]


def as_hooks(functions: Iterable[Any]) -> list["RunHook"]:
    """Returns callbacks as hooks: a RunHook is one, a function is called with the metrics of each step.

    ConfigError for what is neither.
    """
    hooks = []
    for callback in functions:
        if not isinstance(callback, RunHook) and (
            isinstance(callback, type) or not callable(callback)
        ):
            what = (
                f"a callback is {short(repr(callback))}; it must be a RunHook (meshtrain.run.hooks) or a function "
                "of a step's metrics"
            )
            raise ConfigError(f"{what}.")
        hooks.append(
            callback if isinstance(callback, RunHook) else _OfMetrics(callback)
        )
    return hooks


def callbacks_of(config: Config) -> list["RunHook"]:
    """Returns the hooks of run.callbacks; ConfigError for a function that does not take a row."""
    functions = callbacks(config)
    if not functions:
        return []
    from meshtrain.model.hook_checks import misfit

    for text, function in zip(config.run.callbacks, functions, strict=True):
        if taken := misfit(function, ["row"]):
            raise ConfigError(
                f"run.callbacks: {text} takes {short(taken)}; it is called with (row)."
            )
    return as_hooks(functions)


class RunHook:
    """Base of the hooks: each moment does nothing."""

    def before_batch(self, step: int) -> None:
        """Ahead of everything that the step needs, its batch too."""

    def before_step(
        self,
        step: int,
        compiled: jax.stages.Compiled,
        state: Any,
        batch: Batch,
    ) -> tuple[Any, Batch]:
        """Ahead of the step's dispatch; returns the state and the batch that it takes."""
        return state, batch

    def after_step(
        self, step: int, compiled: jax.stages.Compiled, metrics: dict[str, jax.Array]
    ) -> None:
        """The step is dispatched; its metrics are not there yet."""

    def after_metrics(self, row: Row, due: bool) -> None:
        """A step's metrics are on the host. `due`: the row is to be logged."""

    def before_save(self, step: int, state: Any) -> None:
        """Ahead of a save of the state after `step` steps."""


class Listener:
    """Base of what watches a run on the hub's thread (`meshtrain.telemetry.hub`): each moment does nothing."""

    name = "a listener"

    def on_row(self, row: Row, source: RowSource) -> None:
        """Takes a row of metrics.jsonl (step) or of resources/ (process)."""

    def on_tick(self, now: float) -> None:
        """Hears that time has passed, row or none; `now` in seconds since 1970."""

    def on_failure(self) -> None:
        """An error ends the run, which says so on stderr itself; called first of all."""

    def close(self) -> None:
        """The last row has come."""


class _OfMetrics(RunHook):
    def __init__(self, function: Callable[[Row], Any]) -> None:
        self.function = function

    def after_metrics(self, row: Row, due: bool) -> None:
        self.function(row)


@dataclass(frozen=True)
class RunResult:
    """The end of a run. `exit_code` is the command's: 0 done, 75 stopped on request, 1 failed."""

    directory: Path
    exit_code: int
    steps: int  # that the run has taken in all
    # Of the steps that this call has taken, of which the last is `steps`
    losses: tuple[float, ...]
