"""The checkpoints of one run, as the training loop sees them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

import jax

from meshtrain.checkpoint import steps
from meshtrain.checkpoint.arrays import freed_blocks_returned
from meshtrain.checkpoint.finding import find, set_aside_earlier
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.manifest import Start
from meshtrain.checkpoint.saving import Saver
from meshtrain.config import Config
from meshtrain.config.inject import Moment
from meshtrain.config.places import local
from meshtrain.errors import ConfigError, refusal, say, short
from meshtrain.files import refuse_passing, retried
from meshtrain.run.directory import CHECKPOINTS
from meshtrain.run.lock import RunLock
from meshtrain.run.processes import first_decides, gathered, is_first
from meshtrain.step import Program, State


class Checkpointer(Saver):
    """Restores and saves the states of `program`; holds its run directory's lock until `close`.

    `say` takes what a person should know, on the first process; by default it goes to stderr. ConfigError if another
    run is in the directory. With several processes all of them call every method alike. `read` holds the digests of
    what the data are read
    from, `digest` and `validation_digest`: every checkpoint keeps them, and one that was trained on other data is
    refused.
    """

    lock: RunLock | None = None  # on the first process

    def __init__(
        self,
        config: Config,
        program: Program,
        say: Callable[[str], None] = say,
        read: Mapping[str, str] | None = None,
    ) -> None:
        root = Path(config.run.directory).absolute() / CHECKPOINTS
        on_first = lambda sentence: say(sentence) if is_first() else None
        super().__init__(
            config, GlobalArrays(program), root, on_first, dict(read or {})
        )
        self.program = program
        if config.checkpoint.allow or config.checkpoint.weights_only:
            _restoring().check_keys(config)
        try:
            first_decides(self._enter)
        except BaseException:
            self._release_lock()
            raise

    def restore_or_init(
        self, enter: Callable[[Moment], object] = lambda phase: None
    ) -> tuple[State, int]:
        """Returns the state to go on from, on the program's shardings, and the steps taken.

        `enter` is called with "restore" before a checkpoint is looked for, and then with "init" if there is none.

        The files of an earlier run, from which this one does not go on, are set aside. ConfigError if the config or the
        data do not fit the checkpoint, or if all there is is damaged, lost or of a newer format.
        """
        if any(digests != self.data_digests for digests in gathered(self.data_digests)):
            raise ConfigError(
                "the processes of this run read different data; on every machine the same must be under data.source."
            )
        # Finding one reads all of it.
        enter("restore")
        start = find(self.config, self.root, self.say)
        if start is None:
            enter("init")
        state, step = (self._init(), 0) if start is None else self._restore(start)
        if start is None or not start.own:
            first_decides(
                partial(
                    set_aside_earlier,
                    self.root,
                    self.config.checkpoint.resume,
                    self.say,
                )
            )
        self.converter.compile()
        return state, step

    def due(self, step: int) -> bool:
        """Returns whether checkpoint.every asks for a save after `step`."""
        return (
            bool(self.config.checkpoint.every)
            and step % self.config.checkpoint.every == 0
        )

    def close(self) -> None:
        """Waits for a save that still runs, then lets go of the run directory."""
        super().close()
        self._release_lock()

    def _enter(self) -> None:
        retried(lambda: self.root.mkdir(parents=True, exist_ok=True))
        self.lock = RunLock(self.root.parent)
        for sentence in [*steps.remove_leftovers(self.root), *self._enter_store()]:
            self.say(sentence)

    def _enter_store(self) -> list[str]:
        """Takes checkpoint.directory for this run, and has its steps in the mirror; returns what was cleared away."""
        if self.stored is None:
            return []
        address = self.stored.address
        try:
            self.stored.claim()
            unfinished = self.stored.pull()
            sentences = self.stored.remove_leftovers(unfinished)
        except OSError as error:
            refuse_passing(address, error)
            raise ConfigError(
                f"checkpoint.directory {short(address)} cannot be used: {refusal(error)}."
            ) from None
        if self.config.checkpoint.resume == "never" and steps.committed_in(self.root):
            raise ConfigError(
                f"checkpoint.resume is never, but {short(address)} has checkpoints, which a store cannot set aside; "
                "give another checkpoint.directory."
            )
        return sentences

    def _release_lock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _init(self) -> State:
        """Returns the state before the first step, with the weights of model.weights if there are any."""
        weights = self.config.model.weights
        state = self.program.init()
        if weights is None:
            return state
        from meshtrain.hf import loading

        layout = self.program.layout
        initial = layout.map(
            lambda weight, x: (
                x if weight.adapter else jax.tree.map(lambda y: y.delete(), x)
            ),
            state.params,
        )
        with freed_blocks_returned():
            params = loading.read(
                layout, local(weights, self.config.data.cache_gib), initial
            )
        self.say(f"started from the weights in {weights}.")
        return self.program.from_weights(state, params)

    def _restore(self, start: Start) -> tuple[State, int]:
        restoring = _restoring()
        weights_only = start.manifest.weights_alone or (
            self.config.checkpoint.weights_only and not start.own
        )
        changes = partial(
            restoring.find_changes,
            self.config,
            self.converter,
            start,
            weights_only,
            self.data_digests,
        )
        for sentence in first_decides(changes):
            self.say(sentence)
        with freed_blocks_returned():
            if weights_only:
                return restoring.start_from_weights(self.converter, start, self.say), 0
            state = restoring.restore(self.converter, start, self.say)
        if start.own:
            self.go_on_from(start)
        return state, start.manifest.step


def _restoring() -> ModuleType:
    """Returns the module of restoring, which a new run does not import."""
    from meshtrain.checkpoint import restoring

    return restoring
