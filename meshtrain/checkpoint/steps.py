"""The step directories of a run: their names, their commit marker, and what a killed process leaves.

    checkpoints/
      12/               committed: written whole, then renamed; COMMIT was written last
        arrays/         Orbax: parameters, optimizer state, loss scale, step
        frozen/         Orbax: the parameters that are not trained, where there are any (`checkpoint.frozen`)
        manifest.json   step, losses, config, versions, the tree of leaves
        digests.json    SHA-256 of every file above, in blocks
        COMMIT          format version and the digest of digests.json
      18.writing/       a save under way, or killed: removed at the next start
      9.removing/       likewise
      15.damaged/       failed verification, or stood where a step belongs: set aside, for a person to look at

A number is a claim: a directory, or a link to one, is the step of its name only if its manifest says the same number.
Any other name is a person's own, such as best/: never gone on from by itself, and as good as a number where a person
gives its path.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.errors import Unreadable, refusal
from meshtrain.files import (
    ABSENT,
    entries,
    retried,
    status,
    sync,
    unreadable,
    write_atomically,
)
from meshtrain.run.directory import CHECKPOINTS

# Formats: all in arrays/; frozen weights in frozen/, where the versions before would not look.
WHOLE = 1
PARTED = 2
FORMAT = PARTED  # the newest that is read
ARRAYS = "arrays"
FROZEN = "frozen"
MANIFEST = "manifest.json"
DIGESTS = "digests.json"
COMMIT = "COMMIT"
# In the mirror of a step in an object store: its address (`checkpoint.stored`)
STORED = "STORED"
PLACES = (ARRAYS, FROZEN)
WRITING = ".writing"
REMOVING = ".removing"
DAMAGED = ".damaged"


class NewerFormat(Exception):
    """A checkpoint of a later version of meshtrain; holds its format number."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"it has format {number}, of a later meshtrain (this one reads up to {FORMAT})"
        )
        self.number = number


class Damaged(Exception):
    """A directory is not the step that its name says; the text follows "it is damaged: ".

    Only what was read, or is certainly not there, is damaged; what the system does not let us read is Unreadable.
    """


class Renamed(Damaged):
    """A step under the number of another; holds its own."""

    def __init__(self, step: int) -> None:
        super().__init__(f"it is step {step}, renamed")
        self.step = step


def is_number(name: str) -> bool:
    """Returns whether a name says that it is a step, rightly or not; any other is a person's own."""
    return name.isascii() and name.isdigit()


def numbered(root: Path) -> list[Path]:
    """Returns whatever has a number for its name, in order of step (never of dates: clocks are set back)."""
    return sorted(
        (p for p in entries(root) if is_number(p.name)),
        key=lambda p: (int(p.name), p.name),
    )


def committed_in(root: Path) -> list[int]:
    """Returns the numbers of those that have a commit marker, in order."""
    return [int(d.name) for d in numbered(root) if not never_committed(d)]


def directories(path: Path) -> list[Path]:
    """Returns the steps that a path names, oldest first: all of a run directory or of its checkpoints/, or one step."""
    root = path / CHECKPOINTS if _is_directory(path / CHECKPOINTS) else path
    if numbers := numbered(root):
        return numbers
    own = (COMMIT, DIGESTS, MANIFEST)
    if all(status(path / name, follow=False) is None for name in own):
        return []
    return [path]


def _is_directory(path: Path) -> bool:
    there = status(path)
    return there is not None and stat.S_ISDIR(there.st_mode)


def never_committed(directory: Path) -> bool:
    """Returns whether there is certainly no commit marker; one that cannot be looked for may be there."""
    try:
        if status(directory) is None and os.path.islink(directory):
            return False
        return status(directory / COMMIT, follow=False) is None
    except Unreadable:
        return False


def content(path: Path) -> bytes:
    """Returns the bytes of one of a step's own files; Damaged if there are none, Unreadable if they cannot be read
    now.
    """
    there = status(path)
    # Reading a pipe would wait for ever.
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise Damaged(f"{path.name} is not a file")
    try:
        return retried(path.read_bytes)
    except OSError as error:
        if error.errno in ABSENT:
            raise Damaged(f"{path.name} is missing") from None
        raise unreadable(path, error) from None


def parsed(path: Path) -> Any:
    """Returns the JSON of one of a step's own files; Damaged if it is none."""
    try:
        return json.loads(content(path))
    except (ValueError, RecursionError):
        raise Damaged(f"{path.name} is not JSON") from None


def place(leaf: Mapping[str, Any]) -> str:
    """Returns the folder in which a step has an array, from its record in the manifest."""
    return FROZEN if leaf.get("frozen") else ARRAYS


def frozen(leaves: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns those of a manifest's leaves that are frozen."""
    return {name: leaf for name, leaf in leaves.items() if place(leaf) == FROZEN}


def commit(directory: Path) -> None:
    """Writes the commit marker of a directory whose digests are written; nothing in it may change afterwards."""
    form = PARTED if (directory / FROZEN).is_dir() else WHOLE
    lines = f"meshtrain checkpoint, format {form}\n{DIGESTS} sha256 {_sha256((directory / DIGESTS).read_bytes())}\n"
    write_atomically(
        directory / COMMIT,
        f"{lines}the lines above sha256 {_sha256(lines.encode())}\n".encode(),
    )


def commit_problem(directory: Path) -> str | None:
    """Returns what is wrong with the commit marker or with the digests it vouches for; NewerFormat, Unreadable if it
    cannot be judged.
    """
    if not _is_directory(directory):
        if os.path.islink(directory):
            return "it is a link to nothing"
        return "it is not a directory"
    if never_committed(directory):
        return (
            f"it has no {COMMIT} file, so it was never finished or is not a checkpoint"
        )
    try:
        marker = content(directory / COMMIT)
    except Damaged as damage:
        return str(damage)
    head, _, own = marker.rpartition(b"the lines above sha256 ")
    lines = re.match(rb"meshtrain checkpoint, format ([1-9][0-9]{0,8})\n", head)
    if lines is None or own.strip().decode("ascii", "replace") != _sha256(head):
        return f"{COMMIT} is damaged"
    if (number := int(lines[1])) > FORMAT:
        raise NewerFormat(number)
    try:
        expected = (
            f"{DIGESTS} sha256 {_sha256(content(directory / DIGESTS))}\n".encode()
        )
    except Damaged as damage:
        return str(damage)
    return None if head[lines.end() :] == expected else f"{DIGESTS} is damaged"


def publish(writing: Path, final: Path) -> None:
    """Gives a committed directory its final name."""
    os.rename(writing, final)
    sync(final.parent)


def remove(directory: Path) -> None:
    """Removes a step so that a process killed halfway leaves a name that says so."""
    doomed = directory.with_name(directory.name + REMOVING)
    if is_left_over(doomed):
        shutil.rmtree(doomed)
    make_room(doomed)
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> list[str]:
    """Removes what killed processes, and disks that refused, left half written or half removed; returns a sentence on
    each.
    """
    sentences = []
    unfinished = "which a save or a removal left unfinished"
    for path in filter(is_left_over, entries(root)):
        try:
            shutil.rmtree(path)
            sentences.append(f"removed {path}, {unfinished}.")
        except OSError as error:
            sentences.append(
                f"{path}, {unfinished}, cannot be removed: {refusal(error)}."
            )
    return sentences


def is_left_over(path: Path) -> bool:
    """Returns whether a save or a removal made it; a file or a link of such a name is somebody's."""
    # A save that failed is removed under both names.
    step = path.name.removesuffix(REMOVING).removesuffix(WRITING)
    return (
        step != path.name
        and is_number(step)
        and os.path.isdir(path)
        and not path.is_symlink()
    )


def make_room(path: Path) -> Path | None:
    """Sets aside what stands at a name that is needed, if anything does; returns its new path."""
    return set_aside(path) if os.path.lexists(path) else None


def set_aside(path: Path) -> Path:
    """Renames a path that is not a step, so that nothing takes it for one; returns its new path."""
    target = path.with_name(path.name + DAMAGED)
    k = 2
    while os.path.lexists(target):
        target = path.with_name(f"{path.name}{DAMAGED}-{k}")
        k = k + 1
    os.rename(path, target)
    sync(target.parent)
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
