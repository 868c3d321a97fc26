"""The hook of a training process that serves its supervisor; without one it keeps the heartbeat, and compares copies.

    heartbeat  which phase, which step, where the seconds went      health    devices that keep or compute wrong bits
    injector   faults on purpose                                    batches   which rows were read

The supervisor reads what it leaves in files; nothing here waits for an answer.
"""

from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from meshtrain.compat import keep_compiled
from meshtrain.config import Config
from meshtrain.errors import say, short
from meshtrain.inputs import inputs
from meshtrain.mesh import platform
from meshtrain.run.hooks import Batch, RunHook
from meshtrain.run.processes import SickDevice, end_at_once, kind_of
from meshtrain.survive import begun
from meshtrain.survive.heartbeat import CODES, Heartbeat

if TYPE_CHECKING:
    from meshtrain.config.inject import Moment
    from meshtrain.step import Program
    from meshtrain.survive.health import Health
    from meshtrain.survive.injector import Injector, StepInputs
    from meshtrain.survive.supervised import BatchLog

Tree = Any


class Supervision(RunHook):
    """Serves the supervisor of one training process, for as long as it lives."""

    _injector: "Injector | None" = None
    _batches: "BatchLog | None" = None
    _health: "Health"
    _program: "Program"
    _newest: Callable[[], int | None]

    def __init__(self, config: Config) -> None:
        self.heartbeat = begun() or Heartbeat()
        self.supervised = self.heartbeat.supervised
        self._batches = self.heartbeat.log_batches() if config.log.batches else None
        self._compiled: jax.stages.Compiled | None = None  # the newest step's program
        if self.supervised is not None:
            from meshtrain.survive.injector import Injector

            self._injector = Injector(self.heartbeat, config.survive.inject)
        elif config.survive.inject:
            say(
                "survive.inject is left out: faults are injected into runs of meshtrain survive."
            )

    def enter(self, moment: "Moment", taken: int | None = None) -> None:
        """Goes on to the phase of this name, at whose begin faults may be injected. `taken`: steps so far."""
        self.heartbeat.phase(moment)
        self.at(moment, taken)

    def at(
        self,
        moment: "Moment",
        taken: int | None = None,
        step_inputs: "StepInputs" = (None, None),
    ) -> "StepInputs":
        """Injects the faults of a moment; returns the state and batch that the step is to take."""
        if self._injector is None:
            return step_inputs
        return self._injector.at(moment, taken, step_inputs)

    # --- before the first step

    def watch(self, program: "Program") -> None:
        """Begins to look after the devices, which are there; nothing is compiled yet."""
        from meshtrain.survive.health import Health

        self._program = program
        self._health = Health(program.mesh, program.state_shapes, self.heartbeat)
        if self.supervised is None:
            return
        keep_compiled()
        self.heartbeat.cache = counts = {"hits": 0, "misses": 0}

        def count(event: str, **_: object) -> None:
            if event == "/jax/compilation_cache/compile_requests_use_cache":
                counts["misses"] += 1
            elif event == "/jax/compilation_cache/cache_hits":
                counts["hits"] += 1
                counts["misses"] -= 1

        jax.monitoring.register_event_listener(count)

    def start(self, state: Tree, step: int, newest: Callable[[], int | None]) -> None:
        """Notes that `step` steps are taken, to this state; SickDevice under a supervisor if it is not the same
        wherever it must be.

        `newest` returns the newest step on disk.
        """
        self._newest = newest
        self.heartbeat.start = step
        self.heartbeat.step = step
        self.heartbeat.saved = newest()
        if self.supervised is not None:
            self._health.check_copies(state)
        self._health.check_product(state)

    def read(self, batch: dict[str, np.ndarray]) -> None:
        """Notes this process's rows of the next batch, on the thread that reads."""
        if self._injector is not None:
            self._injector.in_loader()
        if self._batches is not None:
            self._batches.add(batch)

    # --- moments

    def before_batch(self, step: int) -> None:
        self.heartbeat.phase("data")
        self.heartbeat.saved = self._newest()
        self.at("data", step - 1)

    def before_step(
        self,
        step: int,
        compiled: jax.stages.Compiled,
        state: Tree,
        batch: Batch,
    ) -> tuple[Tree, Batch]:
        if self._batches is not None:
            self._batches.write(step, self._program.part(inputs(batch).shape)[0].start)
        if (
            self.supervised is not None
            and compiled is not self._compiled
            and jax.process_index() == 0
        ):
            self._compiled = compiled
            # A large program's text takes seconds to read.
            Thread(target=self._name_collectives, args=(compiled,), daemon=True).start()
        self.heartbeat.phase("dispatch")
        self._health.check_product(state)
        state, batch = self.at("dispatch", step - 1, (state, batch))
        if platform(self._program.mesh) == "cpu":
            self.heartbeat.phase("wait")  # such devices may compute within the call
        return state, batch

    def before_save(self, step: int, state: Tree) -> None:
        self._health.check_copies(state)
        self.at("save", step)

    def _name_collectives(self, compiled: jax.stages.Compiled) -> None:
        self.heartbeat.collectives = self._program.read_collectives(compiled).summary

    # --- the end

    def fail(self, failure: Exception, plain: tuple[type[Exception], ...]) -> NoReturn:
        """Ends a supervised process, whose supervisor is told why, without waiting for the others.

        `plain`: errors that are one sentence.
        """
        kind = kind_of(failure)
        ranks = failure.ranks if isinstance(failure, SickDevice) else None
        sentence = str(failure)
        if not isinstance(failure, plain):
            # Nobody foresaw it, and it may have many lines.
            sentence = short(
                f"{type(failure).__name__}: {(sentence.splitlines() or ['no reason given'])[0]}"
            )
        self.heartbeat.note(kind, sentence, ranks)
        end_at_once(failure, CODES[kind], plain)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


def note(kind: str, sentence: str) -> None:
    """Leaves word of why this process fails, if there is a supervisor to read it."""
    if (heartbeat := begun()) is not None:
        heartbeat.note(kind, sentence)
