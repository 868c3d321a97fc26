"""Writing steps while training goes on: one at a time, whole or not at all.

    save()      blocked: the save before, if it still runs; device to host
    a thread    Orbax writes ─► manifest ─► digests ─► COMMIT ─► 12.writing renamed to 12 ─► steps beyond retention removed

What is frozen is linked from an earlier step before Orbax begins, where that can be (`checkpoint.frozen`).

The thread begins by putting the arrays together (`checkpoint.assembling`) where one process has them in another layout than the canonical.
"""

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import jax

from meshtrain.checkpoint import arrays, digests, frozen, steps
from meshtrain.checkpoint.canonical import Canonical
from meshtrain.checkpoint.finding import Start
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.retention import kept
from meshtrain.config import Config
from meshtrain.run.directory import note_checkpoint
from meshtrain.run.processes import gathered, is_first
from meshtrain.step import State


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, in one sentence; the ones before it are intact."""


class _Elsewhere(OSError):
    """Another process could not write its part."""


class _NothingMade(OSError):
    """A save's directory could not be made, so that nothing there is ours to remove."""


class Response(Protocol):
    """Of Orbax: what is being written."""

    def result(self, timeout: float | None = None) -> None: ...


class _Refused:
    """The response where writing could not even begin."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self, timeout: float | None = None) -> None:
        raise self.error


LOOK_EVERY = 1.0  # seconds between two looks whether another process has given a save up
ELSEWHERE = "another process could not write its part"


class Saver:
    """Saves states under `root`. With several processes all of them call every method alike."""

    def __init__(
        self,
        config: Config,
        canonical: Canonical,
        root: Path,
        say: Callable[[str], None],
        read: Mapping[str, str],
    ) -> None:
        self.config, self.canonical, self.root, self.say, self.read = config, canonical, root, say, read
        self.newest: int | None = None  # the last step whose save is settled
        self._frozen = frozen.records({e.name: e.record for e in canonical.entries})
        self._copies = frozen.Copies(config.checkpoint.keep, say)
        self._failure: str | None = None  # why the last save is not
        self._left_alone: set[Path] = set()  # steps that retention cannot judge, each reported once
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[str | None]] | None = None  # the step under way; why it failed, or None
        self._finished: deque[dict[str, float]] = deque()  # the thread puts in, the loop takes out

    def go_on_from(self, start: Start) -> None:
        """The run goes on from a step of its own, verified and restored."""
        self.newest = start.manifest.step
        theirs = frozen.records(start.manifest.leaves)
        if theirs == self._frozen:
            self._note_copy(start.directory)
        elif other := [name for name, record in theirs.items() if record != self._frozen.get(name)]:
            was, now = (found.get(other[0], {}).get("dtype") for found in (theirs, self._frozen))
            self.say(
                f"{other[0]} is frozen as {was} in {start.directory} and held as {now} from here on: what is frozen is written again."
            )

    def save(self, step: int, state: State, loss: float, eval_loss: float | None) -> None:
        """Starts writing; returns once `state` may be donated. CheckpointError if the save before failed and that is to stop the run."""
        began = time.perf_counter()
        if failure := self._settle():
            if self.config.checkpoint.on_failed_save == "stop":
                raise CheckpointError(failure)
            self.say(failure)
        if step == self.newest:
            return
        directory = self.root / f"{step}{steps.WRITING}"
        write: Callable[[], list[Response]] | Exception
        refused, linked = self._make(directory)
        try:
            # all have the reason, or they would wait for the first one; and write the same
            reason, is_linked = gathered([refused, linked is not None])[0]
            if reason:
                raise _NothingMade(reason)
            write = self._write(directory, state, is_linked)
        # reported, and counted as failed, when the save is settled
        except Exception as error:
            write = error
        blocked = time.perf_counter() - began
        manifest = partial(Manifest.of, step, loss, eval_loss, self.config, self.canonical, self.read)
        finish = self._pool.submit(self._finish, write, directory, linked, step, manifest, began, blocked)
        self._writing = step, finish

    @property
    def on_disk(self) -> int | None:
        """The last step that is on disk; the first process knows of a save as soon as it is, the others when the next one begins."""
        if self._writing is not None and is_first():
            step, finish = self._writing
            if finish.done() and finish.result() is None:
                return step
        return self.newest

    def wait(self) -> None:
        """Waits for the save under way; CheckpointError if the last one failed."""
        self._settle()
        if self._failure:
            raise CheckpointError(self._failure)

    def close(self) -> None:
        """Waits for the save under way."""
        if failure := self._settle():
            self.say(failure)
        self._pool.shutdown()

    def metrics(self) -> dict[str, float]:
        """Sums over the saves finished since the last call, {} if there is none."""
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        return {name: sum(save[name] for save in finished) for name in finished[0]} if finished else {}

    def _settle(self) -> str | None:
        """Waits for the save under way; why it failed on any process, or None."""
        if self._writing is None:
            return None
        step, finish = self._writing
        failures = gathered(finish.result())
        self._writing = None
        # Whose own reason it is first.
        self._failure = min((f for f in failures if f), key=lambda f: ELSEWHERE in f, default=None)
        if self._failure is None:
            self.newest = step
            self._note_copy(self.root / str(step))
        else:
            self._copies.be_content_with_one()
        return self._failure

    def _note_copy(self, step: Path) -> None:
        if self._frozen and is_first():
            self._copies.add(step)

    def _make(self, directory: Path) -> tuple[str | None, digests.Files | None]:
        """Makes the directory, on the first process; why it cannot be made, or None, and the files that are linked into it."""
        try:
            if is_first():
                self._make_room(directory)
                directory.mkdir(parents=True)
                return None, self._copies.link(directory) if self._frozen else None
        except OSError as error:
            return str(error), None
        return None, None

    def _write(self, directory: Path, state: State, linked: bool) -> Callable[[], list[Response]]:
        """Takes what is to be written from the state; the rest of the work is for the thread."""
        found = self.canonical.to_write(state, frozen=not linked)
        if callable(found):
            return lambda: self._begin(directory, found())
        responses = self._begin(directory, found)
        return lambda: responses

    def _begin(self, directory: Path, found: Mapping[str, jax.Array]) -> list[Response]:
        """Orbax begins to write each place's arrays."""
        responses: list[Response] = []
        for place in steps.PLACES:
            there = {name: x for name, x in found.items() if (name in self._frozen) == (place == steps.FROZEN)}
            try:
                responses += [arrays.write(directory / place, there)] if there else []
            # what is being written elsewhere has to end before anything is removed
            except Exception as error:
                responses.append(_Refused(error))
        return responses

    # --- on the thread

    def _finish(
        self,
        write: Callable[[], list[Response]] | Exception,
        directory: Path,
        linked: digests.Files | None,
        step: int,
        manifest: Callable[[], Manifest],
        began: float,
        blocked: float,
    ) -> str | None:
        """Has Orbax write, then commits; why that failed, in a sentence, or None."""
        try:
            if isinstance(write, Exception):
                raise write
            failures = [_failure(response, directory, self.root / str(step)) for response in write()]
            for failure in filter(None, failures):
                raise failure
            if is_first():
                manifest().write(directory)
                written = digests.write(directory, linked)
                steps.commit(directory)
                self._make_room(self.root / str(step))
                steps.publish(directory, self.root / str(step))
                spent = {"checkpoint_blocked_seconds": blocked, "checkpoint_seconds": time.perf_counter() - began}
                self._finished.append(spent | {"checkpoint_bytes": written})
        # whatever it was, training need not end with it: on_failed_save says
        except Exception as error:
            # The others see by this that there is nothing to wait for.
            if not isinstance(error, _NothingMade):
                # Under this name it is gone at once, though not all may go while others still write there.
                with contextlib.suppress(OSError):
                    steps.remove(directory)
            before = self.newest is not None and (self.root / str(self.newest) / steps.COMMIT).exists()
            intact = f"step {self.newest} is intact" if before else "there is none before it"
            return f"the checkpoint of step {step} could not be written: {_reason(error)}; {intact}."
        if is_first():
            self._note(step)
            try:
                self.retain()
            except OSError as error:
                self.say(f"{self.root} cannot be looked through for steps that need not stay: {_reason(error)}.")
        return None

    def _make_room(self, path: Path) -> None:
        """Whatever stands at a name that a save needs is somebody's: neither overwritten nor removed."""
        if aside := steps.make_room(path):
            self.say(f"{path} stood where a checkpoint belongs; it is set aside as {aside.name}.")

    def _note(self, step: int) -> None:
        """The save is done whether or not there is room for the note."""
        try:
            note_checkpoint(self.root.parent, step)
        except OSError as error:
            self.say(f"that step {step} is saved cannot be noted in {self.root.parent}: {_reason(error)}.")

    def retain(self) -> None:
        """Removes the steps that need not stay. The save is done: what cannot be read or removed is reported, and stays."""
        found: dict[int, float | None] = {}
        # A link is somebody's, and what was never committed is reported at the next start.
        for directory in steps.numbered(self.root):
            if directory.is_symlink() or steps.never_committed(directory):
                continue
            try:
                manifest = Manifest.read(directory)
                found[manifest.step] = manifest.eval_loss
            except (steps.Damaged, steps.NewerFormat) as problem:
                # One that has gone meanwhile needs no word.
                if directory.exists() and directory not in self._left_alone:
                    self._left_alone.add(directory)
                    self.say(f"checkpoint {directory} is left alone: {problem}.")
        for step in found.keys() - kept(found, self.config.checkpoint).keys():
            try:
                steps.remove(self.root / str(step))
            except OSError as error:
                self.say(f"checkpoint {self.root / str(step)} need not stay but cannot be removed: {_reason(error)}.")


def _failure(response: Response, directory: Path, published: Path) -> Exception | None:
    """What kept Orbax from writing, once it is at an end."""
    try:
        _written(response, directory, published)
    except Exception as error:
        return error
    return None


def _written(response: Response, directory: Path, published: Path) -> None:
    """Waits until Orbax has written. _Elsewhere once another process has removed the directory: Orbax itself would wait for five minutes."""
    with contextlib.ExitStack() as stack:
        ours: int | None = None
        while True:
            began = time.monotonic()
            if ours is None:
                ours = _held(directory, stack)
            try:
                return response.result(LOOK_EVERY)
            except TimeoutError:
                # One of Orbax's own, which comes whenever it is asked.
                if time.monotonic() - began < LOOK_EVERY / 2:
                    raise
            if not _is_there(directory, ours) and not published.exists():
                raise _Elsewhere(ELSEWHERE)


def _held(directory: Path, stack: contextlib.ExitStack) -> int | None:
    """The directory, open: as long as it is, no other one is given its number. None where it cannot be seen yet."""
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    stack.callback(os.close, opened)
    return opened


def _is_there(directory: Path, ours: int | None) -> bool:
    """Whether it is the one that was opened: another of its name is what this process's own Orbax made, writing on into what was removed."""
    try:
        return directory.exists() if ours is None else os.path.samestat(os.fstat(ours), os.stat(directory))
    except OSError:
        return False


def _reason(error: BaseException) -> str:
    """What the system said, under however many layers."""
    if isinstance(error, _Elsewhere):
        return str(error)
    said = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)]
    cause: BaseException | None = error
    while cause is not None:
        for sentence in said:
            if sentence.lower() in str(cause).lower():
                return sentence.lower()
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
