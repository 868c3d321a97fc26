"""Steps in an object store, which has no rename: a step is whole once its COMMIT is there, which is written last.

    s3://bucket/run/OWNER               the run directory whose steps these are, written if there was none
    s3://bucket/run/12/arrays/...       the files of a step, as in a directory (`checkpoint.steps`)
    s3://bucket/run/12/COMMIT           written last, if there is none; removed first

    RUN/checkpoints/12/                 COMMIT, manifest.json, digests.json, and STORED: the address of the rest

A run knows its steps by this mirror, on the file system that its nodes share. A save is written there,
uploaded, committed, and its arrays removed again; a restore fetches them block by block, each compared with its digest
(`digests.problems`). Objects without a COMMIT are of a save or a removal that was killed; the next start removes them.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from meshtrain import hub, stores
from meshtrain.checkpoint import steps
from meshtrain.checkpoint.steps import COMMIT, DIGESTS, MANIFEST, STORED
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import (
    RequestRefused,
    is_address,
    locked,
    refuse_passing,
    unreadable,
    write_atomically,
)
from meshtrain.run.directory import CHECKPOINTS

OWNER = "OWNER"
DESCRIBING = (MANIFEST, DIGESTS, COMMIT)


class StoredSteps:
    """The steps under an address, and their mirror in the directory `root`."""

    def __init__(self, address: str, root: Path) -> None:
        self.address = address.rstrip("/")
        self.root = root

    def claim(self) -> None:
        """Takes the address for the run that `root` is in; ConfigError if it is another run's."""
        owner = str(self.root.parent).encode()
        name = f"{self.address}/{OWNER}"
        if not stores.write_new(name, owner):
            other = short(stores.read(name).decode(errors="replace"))
            raise ConfigError(
                f"checkpoint.directory {short(self.address)} has the checkpoints of the run in {other}; give another "
                f"address, or remove the object {short(name)} if that run is over."
            )

    def pull(self) -> set[str]:
        """Makes the mirror what the store has; returns the numbers there that have no COMMIT."""
        names: dict[str, set[str]] = {}
        for name in stores.listing(self.address):
            step, _, rest = name.partition("/")
            if steps.is_number(step) and rest:
                names.setdefault(step, set()).add(rest)
        self.root.mkdir(parents=True, exist_ok=True)
        whole = {step for step, inner in names.items() if COMMIT in inner}
        for directory in steps.numbered(self.root):
            if directory.name not in whole and (directory / STORED).is_file():
                steps.remove(directory)
        for step in sorted(whole, key=int):
            self._pull(step, names[step])
        return names.keys() - whole

    def _pull(self, step: str, names: set[str]) -> None:
        directory = self.root / step
        address = f"{self.address}/{step}"
        try:
            marker = stores.read(f"{address}/{COMMIT}")
            if os.path.lexists(directory):
                is_mirror = (directory / STORED).is_file()
                if not is_mirror or (directory / COMMIT).read_bytes() == marker:
                    return
                steps.remove(directory)
            writing = directory.with_name(step + steps.WRITING)
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            write_atomically(writing / STORED, f"{address}\n".encode())
            for name in DESCRIBING[:-1]:
                if name in names:
                    write_atomically(writing / name, stores.read(f"{address}/{name}"))
            write_atomically(writing / COMMIT, marker)
        except FileNotFoundError:
            return  # removed meanwhile
        steps.publish(writing, directory)

    def publish(self, writing: Path, step: int) -> None:
        """Uploads a committed directory, its COMMIT last, and leaves of it what a mirror has."""
        address = f"{self.address}/{step}"
        self.remove(step)
        files = [str(p.relative_to(writing)) for p in writing.rglob("*") if p.is_file()]
        stores.each(
            lambda name: stores.upload(writing / name, f"{address}/{name}"),
            [name for name in files if name != COMMIT],
        )
        if not stores.write_new(f"{address}/{COMMIT}", (writing / COMMIT).read_bytes()):
            raise RequestRefused(
                errno.EEXIST, "another run has written this step", address
            )
        write_atomically(writing / STORED, f"{address}\n".encode())
        for place in steps.PLACES:
            shutil.rmtree(writing / place, ignore_errors=True)

    def remove(self, step: int | str) -> None:
        """Removes what the store has of a step, its COMMIT first."""
        address = f"{self.address}/{step}"
        names = stores.listing(f"{address}/")
        if COMMIT in names:
            stores.remove([f"{address}/{COMMIT}"])
        stores.remove(f"{address}/{name}" for name in names if name != COMMIT)

    def remove_leftovers(self, unfinished: set[str]) -> list[str]:
        """Removes steps that have no COMMIT; returns a sentence on each. Nobody may be saving."""
        for step in unfinished:
            self.remove(step)
        return [
            f"removed {self.address}/{step}, which a save or a removal left unfinished."
            for step in sorted(unfinished, key=int)
        ]


def mirrored(path: Path | str) -> Path:
    """Returns the directory that a path or a hub's name names, of steps in a store a mirror in the cache of this
    machine.

    ConfigError where an address has no steps, or a name cannot be had.
    """
    address = str(path)
    if not is_address(address):
        root = hub.directory(path)
        inner = root / CHECKPOINTS if (root / CHECKPOINTS).is_dir() else root
        one = [inner] if (inner / STORED).is_file() else steps.numbered(inner)
        if not (one and (one[-1] / STORED).is_file()):
            return root
        address = (one[-1] / STORED).read_text().strip()
        if inner != one[-1]:
            address = address.rpartition("/")[0]
    return mirror(address, stores.cache())


def mirror(address: str, under: Path) -> Path:
    """Returns the mirror of the steps, or of the one, at an address; it is made in `under`.

    ConfigError where there are none.
    """
    address = address.rstrip("/")
    parent, _, last = address.rpartition("/")
    is_step = steps.is_number(last)
    of = parent if is_step else address
    root = under / f"steps-{hashlib.sha256(of.encode()).hexdigest()[:24]}" / CHECKPOINTS
    root.mkdir(parents=True, exist_ok=True)
    try:
        with locked(root.parent):
            StoredSteps(of, root).pull()
    except OSError as error:
        refuse_passing(of, error)
        raise ConfigError(f"{short(of)} cannot be read: {refusal(error)}.") from None
    if is_step:
        return root / last
    if steps.numbered(root):
        return root
    raise ConfigError(f"there is no checkpoint in {short(address)}.")


class StoredBlocks:
    """The blocks of a stored step's files, `sizes` in bytes; `keep`: those that are right stay in its directory.

    Unreadable if the store does not answer.
    """

    def __init__(self, directory: Path, sizes: Mapping[str, int], keep: bool) -> None:
        self.directory = directory
        self.sizes = sizes
        self.keep = keep
        self.address = (directory / STORED).read_text().strip()
        try:
            self.there = stores.listing(f"{self.address}/")
        except OSError as error:
            raise unreadable(self.address, error) from None

    def problem(self, name: str, start: int, expected: str, block: int) -> str | None:
        """Returns what is wrong with a block, in words; None if nothing is."""
        size = self.sizes[name]
        entry = self.there.get(name)
        # A name that leads out of the directory is nobody's.
        if entry is None or ".." in PurePosixPath(name).parts or name.startswith("/"):
            return f"{name} is missing"
        if entry.size != size:
            return f"{name} has {entry.size:,} bytes instead of {size:,}"
        if self.keep and _is_kept(self.directory / name, size, start, expected, block):
            return None
        try:
            content = stores.read(
                f"{self.address}/{name}", start, min(block, size - start)
            )
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            raise unreadable(f"{self.address}/{name}", error) from None
        if hashlib.sha256(content).hexdigest() != expected:
            return f"{name} is damaged between bytes {start:,} and {start + block:,}"
        if self.keep:
            _write(self.directory / name, size, start, content)
        return None


def _is_kept(path: Path, size: int, start: int, expected: str, block: int) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(block)).hexdigest() == expected


def _write(path: Path, size: int, start: int, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(number).st_size != size:
            os.ftruncate(number, size)
        os.pwrite(number, content, start)
    finally:
        os.close(number)
