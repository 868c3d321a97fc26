"""Frozen weights, such as the base of LoRA, are written once or twice, and linked by every later step.

    step     1          2          3          4
    arrays/  written    written    written    written      what is trained, its optimizer state
    frozen/  written    written    links: 1   links: 2     hard links: the files stay as long as any step has them

Each step still has all its files under its own name: it is copied, renamed, retained, removed and verified as any
other.

Two copies and not one, because a bit that flips in a file flips in every step that links to it: with one copy it would
cost the whole run. Since neighbours never share a file, a damaged step is followed by the one before, as everywhere. A
run that keeps one step alone (checkpoint.keep: 1) has one copy: a second would protect nothing. So has one of which a
save has failed, since there may be no room for
two: a step that can be saved is worth more.

Links are made to what this process itself has written, or verified and restored from: an earlier one of the run may
have held other numbers, rounded to another dtype. Digests are carried over: one taken anew would call a file intact
that was damaged in between.
"""

import contextlib
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from meshtrain.checkpoint import digests, steps
from meshtrain.errors import Unreadable, refusal
from meshtrain.files import sync

COPIES = 2


class FrozenCopies:
    """The newest steps of this process that have the frozen weights; `keep` as in the config."""

    def __init__(self, keep: int, say: Callable[[str], None]) -> None:
        self._wanted = min(COPIES, keep)
        self._say = say
        self._steps: deque[tuple[Path, digests.Files]] = deque(maxlen=COPIES)
        self._refused: set[str] = set()  # why links could not be made, each said once

    def add(self, step: Path) -> None:
        """Adds a committed step, which this process has written or verified."""
        # one that has gone meanwhile, or cannot be read now, is no copy
        with contextlib.suppress(steps.Damaged, Unreadable):
            self._steps.append((step, digests.files_in(step, steps.FROZEN)))

    def keep_one(self) -> None:
        """Writes no second copy from here on: a save has failed, perhaps for want of room."""
        self._wanted = 1

    def link(self, directory: Path) -> digests.Files | None:
        """Makes frozen/ of a step that is being written, of links; returns their digests, None where it has to be
        written.
        """
        copies = [(step, files) for step, files in self._steps if step.is_dir()]
        if len(copies) < self._wanted:
            return None
        step, files = copies[0]
        try:
            _link(step, directory, files)
            return files
        except OSError as error:
            if (reason := refusal(error)) not in self._refused:
                self._refused.add(reason)
                again = (
                    "they are written again, as at each later save that meets the same."
                )
                self._say(
                    f"the frozen weights in {step} cannot be linked to ({reason}); {again}"
                )
        if (directory / steps.FROZEN).exists():
            shutil.rmtree(directory / steps.FROZEN)
        return None


def _link(step: Path, directory: Path, files: digests.Files) -> None:
    """Raises OSError if one of the files is not what was written, or the file system refuses."""
    parents = set()
    for name, (size, _) in files.items():
        source = step / name
        target = directory / name
        status = source.lstat()
        # what a person has put somewhere else would be missing in a copy of the step
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise OSError("a file there is not as it was written")
        target.parent.mkdir(parents=True, exist_ok=True)
        parents |= {
            target.parent,
            *(p for p in target.parent.parents if directory in p.parents),
        }
        os.link(source, target)
    for parent in parents:
        sync(parent)
