"""The checkpoints of one run, as the training loop sees them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from meshtrain.checkpoint import steps
from meshtrain.checkpoint.arrays import freed_blocks_returned
from meshtrain.checkpoint.finding import Start, find, set_aside_earlier
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.saving import Saver
from meshtrain.config import Config
from meshtrain.errors import ConfigError, say
from meshtrain.run.directory import CHECKPOINTS
from meshtrain.run.lock import RunLock
from meshtrain.run.processes import first_decides, gathered, is_first
from meshtrain.run.versions import versions
from meshtrain.step import Program, State


class Checkpointer:
    """Restores and saves the states of `program`; holds its run directory's lock until `close`.

    `say` takes what a person should know, on the first process; by default it goes to stderr. ConfigError if another run is in
    the directory. With several processes all of them call every method alike. `read` holds the digests of what the data are read
    from, `digest` and `validation_digest`: every checkpoint keeps them, and one that was trained on other data is refused.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        say: Callable[[str], None] = say,
        read: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.program, self._data_digests = config, program, dict(read or {})
        self._converter = GlobalArrays(program)
        self._root = Path(config.run.directory).absolute() / CHECKPOINTS
        self._say = lambda sentence: say(sentence) if is_first() else None
        self._saver = Saver(config, self._converter, self._root, self._say, self._data_digests)
        self.lock: RunLock | None = None  # on the first process
        if config.checkpoint.allow or config.checkpoint.weights_only:
            from meshtrain.checkpoint.restoring import check_keys

            check_keys(config)
        try:
            first_decides(self._enter)
        except BaseException:
            self._release_lock()
            raise

    def restore_or_init(self) -> tuple[State, int]:
        """Returns the state to go on from, on the program's shardings, and the steps taken.

        The files of an earlier run, from which this one does not go on, are set aside. ConfigError if the config or the data do not fit
        the checkpoint, or if all there is is damaged, lost or of a newer format.
        """
        if any(digests != self._data_digests for digests in gathered(self._data_digests)):
            raise ConfigError(
                "the processes of this run read different data; on every machine the same must be under data.source."
            )
        start = find(self.config, self._root, self._say)
        state, step = (self._init(), 0) if start is None else self._restore(start)
        if start is None or not start.own:
            first_decides(partial(set_aside_earlier, self._root, self.config.checkpoint.resume, self._say))
        self._converter.compile()
        return state, step

    def _init(self) -> State:
        """Returns the state before the first step, with the weights of model.weights if there are any."""
        weights, state = self.config.model.weights, self.program.init()
        if weights is None:
            return state
        from meshtrain.hf import loading

        layout = self.program.layout
        initial = layout.map(lambda weight, x: x if weight.adapter else x.delete(), state.params)
        with freed_blocks_returned():
            params = loading.read(layout, Path(weights).expanduser(), initial)
        self._say(f"started from the weights in {weights}.")
        return self.program.from_weights(state, params)

    def _restore(self, start: Start) -> tuple[State, int]:
        from meshtrain.checkpoint.restoring import restore, start_from_weights

        weights_only = start.manifest.weights_alone or (self.config.checkpoint.weights_only and not start.own)
        for sentence in first_decides(partial(self._changes, start, weights_only)):
            self._say(sentence)
        with freed_blocks_returned():
            if weights_only:
                return start_from_weights(self._converter, start, self._say), 0
            state = restore(self._converter, start, self._say)
        if start.own:
            self._saver.go_on_from(start)
        return state, start.manifest.step

    def _changes(self, start: Start, weights_only: bool) -> list[str]:
        """Returns a sentence on each thing that changed since and may; ConfigError with what may not."""
        from meshtrain.checkpoint import restoring

        manifest, where = start.manifest, f"checkpoint {start.directory}"
        # weights that no run of ours has trained: its data and their tokenizer are nobody's
        left_out = ("data",) if manifest.weights_alone else ()
        old = {section: keys for section, keys in manifest.config.items() if section not in left_out}
        notes = restoring.compare(old, self.config, where, weights_only)
        notes += restoring.compare_hooks(manifest.hooks, self.program.hooks.names, where, weights_only)
        if not weights_only:
            notes += restoring.compare_versions(manifest.versions, versions())
            notes += restoring.compare_data(manifest, self.config, self._data_digests, where)
            if self.program.islands is not None or any(record.get("islands") for record in manifest.leaves.values()):
                from meshtrain.checkpoint import resharding

                resharding.check_sync_start(manifest.config, manifest.step, self.config.parallel.sync, where)
                notes += filter(None, [resharding.regrouping_note(self._converter.entries, manifest.leaves)])
        return notes

    def due(self, step: int) -> bool:
        """Whether checkpoint.every asks for a save after `step`."""
        return bool(self.config.checkpoint.every) and step % self.config.checkpoint.every == 0

    def save(self, step: int, state: State, loss: float, eval_loss: float | None = None) -> None:
        """Starts writing the state after `step` steps; returns once `state` may be donated. Waits for a save that still runs.

        CheckpointError if that one failed and checkpoint.on_failed_save is stop. A step that is on disk already is not saved again.
        """
        self._saver.save(step, state, loss, eval_loss)

    def metrics(self) -> dict[str, float]:
        """Returns checkpoint_blocked_seconds, checkpoint_seconds and checkpoint_bytes of the saves finished since the last call, else {}."""
        return self._saver.metrics()

    @property
    def newest(self) -> int | None:
        """The newest step on disk, as far as this process knows."""
        return self._saver.on_disk

    def wait(self) -> None:
        """Returns when every save is on disk; CheckpointError if the last one failed."""
        self._saver.wait()

    def close(self) -> None:
        """Waits for a save that still runs, then lets go of the run directory."""
        self._saver.close()
        self._release_lock()

    def _enter(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self.lock = RunLock(self._root.parent)
        for sentence in steps.remove_leftovers(self._root):
            self._say(sentence)

    def _release_lock(self) -> None:
        if self.lock is not None:
            self.lock.release()
