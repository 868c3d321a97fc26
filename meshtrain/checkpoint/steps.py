"""The step directories of a run: their names, their commit marker, and what a killed process leaves.

checkpoints/
  12/               committed: written whole, then renamed; COMMIT was written last
    arrays/         Orbax: parameters, optimizer state, loss scale, step
    manifest.json   step, losses, config, versions, the tree of leaves
    digests.json    SHA-256 of every file above, in blocks
    COMMIT          format version and the digest of digests.json
  18.writing/       a save under way, or killed: removed at the next start
  9.removing/       likewise
  15.damaged/       failed verification: set aside, for a person to look at
"""

import hashlib
import os
import shutil
from pathlib import Path

from meshtrain.files import sync, write_atomically

FORMAT = 1
ARRAYS, MANIFEST, DIGESTS, COMMIT = "arrays", "manifest.json", "digests.json", "COMMIT"
WRITING, REMOVING, DAMAGED = ".writing", ".removing", ".damaged"


class NewerFormat(Exception):
    """A checkpoint of a later version of meshtrain; holds its format number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def steps_in(root: Path) -> list[int]:
    """The steps that have a directory, in order of step (never of dates: clocks are set back)."""
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.name.isascii() and p.name.isdigit() and p.is_dir())


def committed_in(root: Path) -> list[int]:
    """The steps that have a commit marker, in order of step."""
    return [step for step in steps_in(root) if (root / str(step) / COMMIT).is_file()]


def directories(path: Path) -> list[Path]:
    """The steps that a path names, oldest first: one step, or all of a run directory or of its checkpoints/."""
    if any((path / name).is_file() for name in (COMMIT, DIGESTS, MANIFEST)):
        return [path]
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return [root / str(step) for step in steps_in(root)]


def commit(directory: Path) -> None:
    """Writes the commit marker of a directory whose digests are written; nothing in it may change afterwards."""
    lines = f"meshtrain checkpoint, format {FORMAT}\n{DIGESTS} sha256 {_sha256((directory / DIGESTS).read_bytes())}\n"
    write_atomically(directory / COMMIT, f"{lines}the lines above sha256 {_sha256(lines.encode())}\n".encode())


def commit_problem(directory: Path) -> str | None:
    """What is wrong with the commit marker or with the digests it vouches for; NewerFormat if it cannot be judged."""
    try:
        text = (directory / COMMIT).read_bytes()
    except FileNotFoundError:
        return f"it has no {COMMIT} file, so it was never finished or is no checkpoint"
    head, _, own = text.rpartition(b"the lines above sha256 ")
    if own.strip().decode("ascii", "replace") != _sha256(head):
        return f"{COMMIT} is damaged"
    first, _, rest = head.decode().partition("\n")
    number = int(first.rsplit(" ", 1)[1])
    if number > FORMAT:
        raise NewerFormat(number)
    try:
        found = _sha256((directory / DIGESTS).read_bytes())
    except FileNotFoundError:
        return f"{DIGESTS} is missing"
    return None if rest.split()[2] == found else f"{DIGESTS} is damaged"


def publish(writing: Path, final: Path) -> None:
    """Gives a committed directory its final name."""
    os.rename(writing, final)
    sync(final.parent)


def remove(directory: Path) -> None:
    """Removes a step so that a process killed halfway leaves a name that says so."""
    doomed = directory.with_name(directory.name.removesuffix(WRITING) + REMOVING)
    if directory != doomed:
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(directory, doomed)
    shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> list[str]:
    """Removes what killed processes left half written or half removed; its names."""
    if not root.is_dir():
        return []
    found = sorted(p for p in root.iterdir() if p.name.endswith((WRITING, REMOVING)))
    for path in found:
        shutil.rmtree(path)
    return [p.name for p in found]


def set_aside(directory: Path) -> Path:
    """Renames a damaged step so that nothing takes it for a checkpoint; its new path."""
    target, k = directory.with_name(directory.name + DAMAGED), 2
    while target.exists():
        target, k = directory.with_name(f"{directory.name}{DAMAGED}-{k}"), k + 1
    os.rename(directory, target)
    sync(target.parent)
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
