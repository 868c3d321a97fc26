"""All that a training process does for its supervisor, in one object for the loop; without a supervisor it only counts seconds.

    beat       which phase, which step, where the seconds went      health    devices that keep or compute wrong bits
    injector   faults on purpose                                    batches   which rows were read

The supervisor reads what it leaves in files; nothing here waits for an answer.
"""

from threading import Thread
from typing import Any, NoReturn

import jax
import numpy as np

from meshtrain import hlo
from meshtrain.compat import keep_compiled
from meshtrain.config import Config
from meshtrain.errors import say, short
from meshtrain.run.failures import SickDevice, end_at_once, kind_of
from meshtrain.survive.batches import BatchLog
from meshtrain.survive.beat import CODES, Beat, begun, in_a_line
from meshtrain.survive.health import Health
from meshtrain.survive.inject import Moment
from meshtrain.survive.injector import Given, Injector

Tree = Any


def note(kind: str, sentence: str) -> None:
    """Leaves word of why this process fails, if there is a supervisor to read it."""
    (begun() or Beat()).note(kind, sentence)


class Tended:
    """Of one training process, for as long as it lives. `phase`, `took`, `begin_save` and `note` are the beat's."""

    def __init__(self, config: Config) -> None:
        self.beat = begun() or Beat()
        self.supervised = self.beat.supervised
        self.phase, self.took, self.begin_save, self.note = (
            self.beat.phase, self.beat.took, self.beat.begin_save, self.beat.note
        )  # fmt: skip
        self._injector = Injector(self.beat, config.survive.inject)
        self._health: Health | None = None
        self._batches = BatchLog(self.supervised) if config.log.batches and self.supervised else None
        if config.survive.inject and self.supervised is None:
            say("survive.inject is left out: faults are injected into runs of python -m meshtrain.survive.")

    def at(self, moment: Moment, step: int | None = None, given: Given = (None, None)) -> Given:
        """A moment at which faults may be injected; what the step is to be given."""
        return self._injector.at(moment, step, given)

    # --- from here to there

    def build(self, mesh: jax.sharding.Mesh, params: Tree) -> None:
        """The devices are there, and nothing is compiled yet. `params`: the parameters' shapes."""
        if self.supervised is None:
            return
        keep_compiled()
        self.beat.cache = found = {"hits": 0, "misses": 0}

        def count(event: str, **_: object) -> None:
            if event == "/jax/compilation_cache/compile_requests_use_cache":
                found["misses"] += 1
            elif event == "/jax/compilation_cache/cache_hits":
                found["hits"] += 1
                found["misses"] -= 1

        jax.monitoring.register_event_listener(count)
        self._health = Health(mesh, params, self.beat)

    def start(self, params: Tree, step: int, saved: int | None) -> None:
        """`step` steps are taken, with these parameters; SickDevice if they are not the same wherever they must be."""
        self.beat.start, self.beat.step, self.beat.saved = step, step, saved
        self.check_copies(params)
        self.check_product(params)

    def begin_step(self, step: int, saved: int | None) -> None:
        """The phase `data` of the step after `step`."""
        self.phase("data")
        self.beat.saved = saved
        self.at("data", step)

    def see_compiled(self, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, busy: Any) -> None:
        """For who asks in what a step hangs: its collectives."""

        def tell() -> None:
            self.beat.collectives = in_a_line(hlo.collectives(compiled, mesh, busy))

        if self.supervised is not None and jax.process_index() == 0:
            # A large program's text takes seconds to read.
            Thread(target=tell, daemon=True).start()

    # --- rows

    def read(self, batch: dict[str, np.ndarray]) -> None:
        """This process's rows of the next batch, on the thread that reads."""
        self._injector.in_loader()
        if self._batches is not None:
            self._batches.add(batch)

    def take(self, step: int, first: int) -> None:
        """Step `step` takes the batch whose rows from `first` on this process has."""
        if self._batches is not None:
            self._batches.write(step, first)

    # --- devices

    def check_copies(self, params: Tree) -> None:
        if self._health is not None:
            self._health.check_copies(params)

    def check_product(self, busy_with: Tree) -> None:
        if self._health is not None:
            self._health.check_product(busy_with)

    # --- the end

    def fail(self, failure: Exception, plain: tuple[type[Exception], ...]) -> NoReturn:
        """Ends a supervised process, whose supervisor is told why, without waiting for the others. `plain`: errors that are one sentence."""
        kind, ranks = kind_of(failure), failure.ranks if isinstance(failure, SickDevice) else None
        sentence = str(failure)
        if not isinstance(failure, plain):
            # Nobody foresaw it, and it may have many lines.
            sentence = short(f"{type(failure).__name__}: {(sentence.splitlines() or ['no reason given'])[0]}")
        self.note(kind, sentence, ranks)
        end_at_once(failure, CODES[kind], plain)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
