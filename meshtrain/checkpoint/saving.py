"""Writing steps while training goes on: one at a time, whole or not at all.

save()      blocked: the save before, if it still runs; device to host
a thread    Orbax writes ─► manifest ─► digests ─► COMMIT ─► 12.writing renamed to 12 ─► steps beyond retention removed
"""

import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from orbax.checkpoint import v1 as ocp

from meshtrain.checkpoint import arrays, digests, steps
from meshtrain.checkpoint.canonical import Canonical
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.processes import gathered, is_first
from meshtrain.checkpoint.retention import kept
from meshtrain.config import Config
from meshtrain.step import State


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, in one sentence; the ones before it are intact."""


class Saver:
    """Saves states under `root`. With several processes all of them call every method alike."""

    def __init__(self, config: Config, canonical: Canonical, root: Path, say: Callable[[str], None]) -> None:
        self.config, self.canonical, self.root, self.say = config, canonical, root, say
        self.newest: int | None = None  # the last step that is on disk
        self._failure: str | None = None  # why the last save is not
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str | None] | None = None
        self._finished: list[dict[str, float]] = []

    def save(self, step: int, state: State, loss: float, eval_loss: float | None) -> None:
        """Starts writing; returns once `state` may be donated. CheckpointError if the save before failed and that is to stop the run."""
        if step == self.newest:
            return
        began = time.perf_counter()
        if failure := self._settle():
            if self.config.checkpoint.on_failed_save == "stop":
                raise CheckpointError(failure)
            self.say(failure)
        directory = self.root / f"{step}{steps.WRITING}"
        response: ocp.AsyncResponse[None] | Exception
        try:
            if is_first():
                directory.mkdir()
            response = arrays.write(directory / steps.ARRAYS, self.canonical.arrays(state))
        except Exception as error:  # told, and counted as failed, when the save is settled
            response = error
        blocked = time.perf_counter() - began
        manifest = partial(Manifest.of, step, loss, eval_loss, self.config, self.canonical.entries)
        self._writing = self._pool.submit(self._finish, response, directory, step, manifest, began, blocked)

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
        finished, self._finished = self._finished, []
        return {name: sum(save[name] for save in finished) for name in finished[0]} if finished else {}

    def _settle(self) -> str | None:
        """Waits for the save under way; why it failed on any process, or None."""
        if self._writing is None:
            return None
        failures = gathered(self._writing.result())
        self._writing = None
        self._failure = next((f for f in failures if f), None)
        return self._failure

    # --- on the thread

    def _finish(
        self,
        response: ocp.AsyncResponse[None] | Exception,
        directory: Path,
        step: int,
        manifest: Callable[[], Manifest],
        began: float,
        blocked: float,
    ) -> str | None:
        """Waits for Orbax, then commits; why that failed, in a sentence, or None."""
        try:
            if isinstance(response, Exception):
                raise response
            response.result()
            if is_first():
                manifest().write(directory)
                written = digests.write(directory)
                steps.commit(directory)
                steps.publish(directory, self.root / str(step))
                self._finished.append(
                    {
                        "checkpoint_blocked_seconds": blocked,
                        "checkpoint_seconds": time.perf_counter() - began,
                        "checkpoint_bytes": written,
                    }
                )
                self._retain()
        except Exception as error:  # whatever it was, training need not end with it: on_failed_save says
            if is_first():
                shutil.rmtree(directory, ignore_errors=True)
            intact = "there is none before it" if self.newest is None else f"step {self.newest} is intact"
            return f"the checkpoint of step {step} could not be written: {_reason(error)}; {intact}."
        self.newest = step
        return None

    def _retain(self) -> None:
        found = {step: Manifest.read(self.root / str(step)).eval_loss for step in steps.committed_in(self.root)}
        for step in found.keys() - kept(found, self.config.checkpoint).keys():
            steps.remove(self.root / str(step))


def _reason(error: BaseException) -> str:
    """What the system said, under however many layers."""
    said = {
        number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
    }
    cause: BaseException | None = error
    while cause is not None:
        for sentence in said.values():
            if sentence.lower() in str(cause).lower():
                return sentence.lower()
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
