"""Writing steps while training goes on: one at a time, whole or not at all.

    save()      blocked: the save before, if it still runs; device to host
    a thread    Orbax writes ─► manifest ─► digests ─► COMMIT ─► 12.writing renamed to 12 ─► retention removes steps
    another     digests of the blocks that are written already

Frozen weights are linked from an earlier step before Orbax begins, where that can be (`checkpoint.frozen`). The thread
begins by rearranging the arrays (`checkpoint.rearrangement`) where one process has them in another layout than the
global one.
"""

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax

from meshtrain.checkpoint import arrays, digests, steps
from meshtrain.checkpoint.finding import retained
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.manifest import Start, StepManifest
from meshtrain.config import Config
from meshtrain.errors import Unreadable, refusal
from meshtrain.files import ABSENT, RequestRefused, is_full, retried
from meshtrain.run.directory import note_checkpoint
from meshtrain.run.processes import gathered, is_first
from meshtrain.step import State

if TYPE_CHECKING:
    from meshtrain.checkpoint.frozen import FrozenCopies
    from meshtrain.checkpoint.stored import StoredSteps


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, in one sentence; the ones before it are intact."""


class _FailedElsewhere(OSError):
    """Another process could not write its part."""


class _NoDirectory(OSError):
    """A save's directory could not be made, so that nothing there is ours to remove."""


class Response(Protocol):
    """Orbax's answer to a write that has begun."""

    def result(self, timeout: float | None = None) -> None: ...


Values = Mapping[str, jax.Array]
# Seconds between two looks whether another process has given a save up
POLL_EVERY = 1.0
ELSEWHERE = "another process could not write its part"


class Saver:
    """Saves states under `root`. With several processes all of them call every method alike."""

    _copies: "FrozenCopies | None" = None  # on the first process

    def __init__(
        self,
        config: Config,
        converter: GlobalArrays,
        root: Path,
        say: Callable[[str], None],
        data_digests: Mapping[str, str],
    ) -> None:
        self.config = config
        self.converter = converter
        self.root = root
        self.say = say
        self.data_digests = data_digests
        self._frozen = steps.frozen(converter.records)
        self.stored: StoredSteps | None = None
        if (address := config.checkpoint.directory) is not None:
            self.stored = digests.object_stores().StoredSteps(address, root)
        if self._frozen and self.stored is None and is_first():
            from meshtrain.checkpoint.frozen import FrozenCopies

            self._copies = FrozenCopies(config.checkpoint.keep, say)
        # The last step whose save is known to be on disk
        self._settled: int | None = None
        self._failure: str | None = None  # why the last save failed
        self._failed = False  # whether a save has failed, and may have left something
        # Steps that retention cannot judge, each reported once
        self._left_alone: set[Path] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[str | None]] | None = (
            None  # the step under way; why it failed, or None
        )
        # The thread puts in, the loop takes out
        self._finished: deque[dict[str, float]] = deque()

    def go_on_from(self, start: Start) -> None:
        """Takes a step of the run's own, verified and restored, as the one that is on disk."""
        self._settled = start.manifest.step
        before = steps.frozen(start.manifest.leaves)
        if before == self._frozen:
            self._add_copy(start.directory)
        elif other := [
            name for name, record in before.items() if record != self._frozen.get(name)
        ]:
            was, now = (
                records.get(other[0], {}).get("dtype")
                for records in (before, self._frozen)
            )
            self.say(
                f"{other[0]} is frozen as {was} in {start.directory} and held as {now} from here on: "
                "what is frozen is written again."
            )

    def save(
        self,
        step: int,
        state: State,
        loss: float,
        eval_loss: float | None = None,
    ) -> None:
        """Starts writing the state after `step` steps; returns once it may be donated.

        Waits for a save that still runs.

        CheckpointError if that one failed and checkpoint.on_failed_save is stop. A step that is on disk already is not
        saved again.
        """
        began = time.perf_counter()
        if failure := self._settle():
            if self.config.checkpoint.on_failed_save == "stop":
                raise CheckpointError(failure)
            self.say(failure)
        if step == self._settled:
            return
        save = StepSave(
            step, self.root / f"{step}{steps.WRITING}", self._frozen.keys(), began
        )
        refused, save.linked = self._make_directory(save.directory)
        try:
            # all have the reason, or they would wait for the first one; and write the same
            reason, is_linked = gathered([refused, save.linked is not None])[0]
            if reason:
                raise _NoDirectory(reason)
            save.begin(self.converter.prepare(state, frozen=not is_linked))
        # reported, and counted as failed, when the save is settled
        except Exception as error:
            save.written.append(error)
        save.blocked = time.perf_counter() - began
        manifest = partial(
            StepManifest.make,
            step,
            loss,
            eval_loss,
            self.config,
            self.converter.records,
            self.converter.program.hooks.names,
            self.data_digests,
        )
        self._writing = step, self._pool.submit(self._finish, save, manifest)

    @property
    def newest(self) -> int | None:
        """The newest step on disk; the first process knows of a save as soon as it is, the others when the next one
        begins.
        """
        if self._writing is not None and is_first():
            step, finish = self._writing
            if finish.done() and finish.result() is None:
                return step
        return self._settled

    def wait(self) -> None:
        """Returns when every save is on disk; CheckpointError if the last one failed."""
        self._settle()
        if self._failure:
            raise CheckpointError(self._failure)

    def close(self) -> None:
        """Waits for the save under way."""
        if failure := self._settle():
            self.say(failure)
        self._pool.shutdown()
        if self._failed and is_first():
            self._remove_unfinished()

    def metrics(self) -> dict[str, float]:
        """Returns checkpoint_blocked_seconds, checkpoint_seconds and checkpoint_bytes of the saves finished since the
        last call, else {}.
        """
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        if not finished:
            return {}
        return {name: sum(save[name] for save in finished) for name in finished[0]}

    def _settle(self) -> str | None:
        """Waits for the save under way; returns why it failed on any process, or None."""
        if self._writing is None:
            return None
        step, finish = self._writing
        failures = gathered(finish.result())
        self._writing = None
        # a process's own reason comes first
        self._failure = min(
            (f for f in failures if f), key=lambda f: ELSEWHERE in f, default=None
        )
        self._failed |= self._failure is not None
        if self._failure is None:
            self._settled = step
            self._add_copy(self.root / str(step))
        elif self._copies is not None:
            self._copies.keep_one()
        return self._failure

    def _add_copy(self, step: Path) -> None:
        if self._copies is not None:
            self._copies.add(step)

    def _make_directory(
        self, directory: Path
    ) -> tuple[str | None, digests.Files | None]:
        """Makes the directory, on the first process; returns why it cannot be made, or None, and the files that are
        linked into it.
        """
        if not is_first():
            return None, None
        try:
            if self._failed:
                self._remove_unfinished()
            self._make_room(directory)
            directory.mkdir(parents=True)
            return None, None if self._copies is None else self._copies.link(directory)
        except OSError as error:
            return str(error), None

    def _remove_unfinished(self) -> None:
        """Removes what failed saves have left: no save is under way, and the run's lock keeps others away."""
        # What cannot be removed now is said at the next start.
        steps.remove_leftovers(self.root)

    # --- on the thread

    def _finish(
        self, save: "StepSave", manifest: Callable[[], StepManifest]
    ) -> str | None:
        """Has Orbax write, then commits; returns why that failed, in a sentence, or None."""
        final = self.root / str(save.step)
        try:
            if is_first():
                with digests.HashedAhead(save.directory, arrays.own_files()) as ahead:
                    save.finish(final)
                self._commit(save, manifest(), ahead)
            else:
                save.finish(final)
        # whatever it was, training need not end with it: on_failed_save says
        except Exception as error:
            return self._give_up(save, error)
        if is_first():
            self._note_and_retain(save.step)
        return None

    def _commit(
        self, save: "StepSave", manifest: StepManifest, ahead: digests.HashedAhead
    ) -> None:
        """Vouches for what is written and gives it the step's name."""
        final = self.root / str(save.step)
        manifest.write(save.directory)
        written = digests.write(save.directory, save.linked, ahead)
        steps.commit(save.directory)
        if self.stored is not None:
            self.stored.publish(save.directory, save.step)
        self._make_room(final)
        steps.publish(save.directory, final)
        spent = {
            "checkpoint_blocked_seconds": save.blocked,
            "checkpoint_seconds": time.perf_counter() - save.began,
        }
        self._finished.append(spent | {"checkpoint_bytes": written})

    def _give_up(self, save: "StepSave", error: Exception) -> str:
        """Removes what a failed save has written; returns why it failed, in a sentence."""
        # asked before what was written is removed, which makes room
        reason = _reason(error, self.root)
        # The other processes see by this that there is nothing to wait for. What could not be made is not ours to
        # remove.
        if not isinstance(error, _NoDirectory):
            with contextlib.suppress(OSError):
                steps.remove(save.directory)
        before = self._settled is not None and not steps.never_committed(
            self.root / str(self._settled)
        )
        intact = (
            f"step {self._settled} is intact" if before else "there is none before it"
        )
        return f"the checkpoint of step {save.step} could not be written: {reason}; {intact}."

    def _note_and_retain(self, step: int) -> None:
        """Notes in the run that a step is saved, and removes the steps that need not stay."""
        try:
            note_checkpoint(self.root.parent, step)
        except OSError as error:
            self.say(
                f"that step {step} is saved cannot be noted in {self.root.parent}: {_reason(error)}."
            )
        try:
            self.retain()
        except (OSError, Unreadable) as error:
            self.say(
                f"{self.root} cannot be looked through for steps that need not stay: {_reason(error)}."
            )

    def _make_room(self, path: Path) -> None:
        """Sets aside whatever stands at a name that a save needs: it is somebody's, neither overwritten nor removed."""
        if aside := steps.make_room(path):
            self.say(
                f"{path} stood where a checkpoint belongs; it is set aside as {aside.name}."
            )

    def _leave(self, directory: Path, why: str) -> None:
        if directory not in self._left_alone:
            self._left_alone.add(directory)
            self.say(f"checkpoint {directory} is left alone: {why}.")

    def retain(self) -> None:
        """Removes the steps that need not stay; reports and leaves what cannot be read or removed."""
        eval_losses: dict[int, float | None] = {}
        # A link is somebody's, and what was never committed is reported at the next start.
        for directory in steps.numbered(self.root):
            if directory.is_symlink() or steps.never_committed(directory):
                continue
            try:
                manifest = StepManifest.read(directory)
                eval_losses[manifest.step] = manifest.eval_loss
            except Unreadable as problem:
                self._leave(directory, problem.what)
            except (steps.Damaged, steps.NewerFormat) as problem:
                # One that has gone meanwhile needs no word.
                if directory.exists():
                    self._leave(directory, str(problem))
        for step in eval_losses.keys() - retained(eval_losses, self.config.checkpoint):
            try:
                if self.stored is not None:
                    self.stored.remove(step)
                steps.remove(self.root / str(step))
            except OSError as error:
                self.say(
                    f"checkpoint {self.root / str(step)} need not stay but cannot be removed: {_reason(error)}."
                )


class StepSave:
    """The writing of one step: it begins on the loop's thread, and finishes on the saver's own.

    `frozen`: the names of the arrays that go to frozen/. `linked`: the files that an earlier step has there already.
    """

    linked: digests.Files | None = None
    blocked = 0.0  # seconds that the loop has waited
    _make: Callable[[], Values] | None = None  # rearranges the arrays

    def __init__(
        self,
        step: int,
        directory: Path,
        frozen: Collection[str],
        began: float,
    ) -> None:
        self.step = step
        self.directory = directory
        self.frozen = frozen
        self.began = began
        # An exception where writing could not even begin.
        self.written: list[Response | Exception] = []

    def begin(self, values: Values | Callable[[], Values]) -> None:
        """Has Orbax begin; arrays that a function has yet to rearrange are left to `finish`."""
        if callable(values):
            self._make = values
        else:
            self._write(values)

    def finish(self, final: Path) -> None:
        """Returns when all is written; raises what kept it from it. `final`: where the step will be."""
        if self._make is not None:
            self._write(self._make())
        failures = [
            _failure(response, self.directory, final) for response in self.written
        ]
        for failure in filter(None, failures):
            raise failure

    def _write(self, values: Values) -> None:
        for place in steps.PLACES:
            here = {
                name: x
                for name, x in values.items()
                if (name in self.frozen) == (place == steps.FROZEN)
            }
            try:
                self.written += (
                    [arrays.write(self.directory / place, here)] if here else []
                )
            # what is being written elsewhere has to end before anything is removed
            except Exception as error:
                self.written.append(error)


def _failure(
    response: Response | Exception, directory: Path, final: Path
) -> Exception | None:
    """Waits until Orbax has written; returns what kept it from it. _FailedElsewhere once another process has removed
    the directory: Orbax itself would wait for five minutes.
    """
    if isinstance(response, Exception):
        return response
    opened: int | None = None
    try:
        while True:
            began = time.monotonic()
            if opened is None:
                # as long as it is open, no other directory is given its number; it cannot always be seen yet
                with contextlib.suppress(OSError):
                    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                response.result(POLL_EVERY)
                return None
            except TimeoutError:
                if time.monotonic() - began < POLL_EVERY / 2:
                    raise  # Orbax's own, and not that of this look
            if not _is_there(directory, opened) and not final.exists():
                raise _FailedElsewhere(ELSEWHERE)
    except Exception as error:
        return error
    finally:
        if opened is not None:
            os.close(opened)


def _is_there(directory: Path, opened: int | None) -> bool:
    """Returns whether it is the one that was opened: one of its name may be what this process's own Orbax made, writing
    on.
    """
    try:
        there = retried(lambda: os.stat(directory))
        return opened is None or os.path.samestat(
            retried(lambda: os.fstat(opened)), there
        )
    except OSError as error:
        return error.errno not in (*ABSENT, errno.ESTALE)


def _reason(error: BaseException, root: Path | None = None) -> str:
    """Returns the system's reason, under however many layers; `root`: where something could not be written."""
    if isinstance(error, _FailedElsewhere):
        return str(error)
    if isinstance(error, RequestRefused):
        return f"{error.filename}: {refusal(error)}"
    reasons = [
        os.strerror(number).lower()
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
    ]
    cause: BaseException | None = error
    while cause is not None:
        for sentence in reasons:
            if sentence in str(cause).lower():
                return sentence
        cause = cause.__cause__ or cause.__context__
    # What Orbax could not write it does not find afterwards.
    if isinstance(error, OSError) and root is not None and is_full(root):
        return reasons[0]
    return (
        f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
    )
