"""The state of a run between two steps, a compiled step, and which steps follow one another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from meshtrain.errors import ConfigError
from meshtrain.parallel.forward import Batch
from meshtrain.precision import LossScale, is_finite

Tree = Any


class State(NamedTuple):
    """The state of a run between two steps; params and optimizer in the live layout of `parallel.layout`."""

    step: Any  # int32: steps taken, which is also the position in the data
    params: Tree  # fp32 master weights; what is frozen, in the dtype that computes
    optimizer: Tree
    scale: LossScale | None  # float16 only
    reduce: Tree = None  # what compression keeps from step to step (parallel.reduce)
    islands: Tree = None  # what islands have moved by themselves (parallel.sync)

    def __repr__(self) -> str:
        return f"State(step={self.step}, {len(jax.tree.leaves(self))} arrays, which mt.show draws)"


class TrainStep:
    """A jitted train step.

    A state that an earlier call has used up is refused, since JAX's CPU devices end the process on it.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self.lower: Callable[..., jax.stages.Lowered] = step.lower

    def __call__(
        self, state: State, batch: Batch
    ) -> tuple[State, dict[str, jax.Array]]:
        count = state.step
        if (
            isinstance(count, jax.Array)
            and not isinstance(count, jax.core.Tracer)
            and count.is_deleted()
        ):
            raise ConfigError(
                "this state was used up by an earlier train_step; go on with the state that it returned."
            )
        return self._step(state, batch)


class Steps:
    """The steps of a program: here all are one. Islands that step by themselves have others (`parallel.sync.steps`)."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def shapes(self, state: State) -> State:
        """Returns ShapeDtypeStructs of the state, from those of one without islands."""
        return state

    def begin(self, state: State) -> State:
        """Returns the state before the first step, inside jit."""
        return state

    def begin_from(self, state: State) -> State:
        """Returns a state whose weights are new, with everything that follows from them."""
        return state

    def every_island(self, tree: Tree) -> Tree:
        """Returns the same for each island, inside jit."""
        return tree

    def any_step(self, step: TrainStep) -> TrainStep:
        """Returns a step that is right after any number of steps; `step` is the program's own."""
        return step

    def step_after(self, taken: int) -> TrainStep:
        """Returns the step after `taken` steps, to be followed by `finish`."""
        return self.program.train_step

    def finish(
        self, state: State, metrics: dict[str, Any], taken: int
    ) -> tuple[State, dict[str, Any]]:
        """Does what is due between two steps, after `taken` of them."""
        return state, metrics

    def prepare(self) -> None:
        """Compiles what `finish` runs."""

    def fetch(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Waits for the metrics of a step."""
        return {name: float(x) for name, x in jax.device_get(metrics).items()}

    def is_finite(self, state: State) -> jax.Array:
        """Returns whether training can go on from a state: all of it is finite."""
        optimizer = self.program.on_device(state.optimizer)
        precision = self.program.config.precision
        return is_finite(state.params, (optimizer, state.reduce), precision)
