"""Digests of every file of a step: Orbax has none on array data, so that flipped bits would restore silently.

Files are hashed in blocks, on as many threads as there are cores, since `hashlib` lets go of the interpreter. So one
large file is as quick as many small ones. SHA-256 runs at 1 to 2 GB/s a core where the processor has instructions for
it. Most blocks of a save are hashed while Orbax writes the next ones and while it waits for the disk (`HashedAhead`).
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import ModuleType

from meshtrain.checkpoint.steps import COMMIT, DIGESTS, STORED, Damaged, parsed
from meshtrain.errors import Unreadable
from meshtrain.files import ABSENT, retried, status, unreadable, write_atomically

# Path within the step -> bytes, digests of its blocks
Files = dict[str, tuple[int, list[str]]]
# bytes a digest stands for; bytes read at a time, so that they stay in the cache
BLOCK = 16 << 20
READ = 1 << 20
THREADS = min(16, os.cpu_count() or 1)
LOOK_EVERY = 0.01  # seconds between two looks at files that grow


class HashedAhead:
    """Hashes the blocks of files that still grow, on a thread, while entered.

    `pattern` matches paths within `directory`. Only a writer on this machine that appends may be followed: a block that
    another one holds may not be here yet.
    """

    def __init__(self, directory: Path, pattern: str) -> None:
        self.directory = directory
        self.pattern = pattern
        # Number of a file -> digests of its first blocks
        self._hashed: dict[int, list[str]] = {}
        self._ended = Event()
        self._thread = Thread(target=self._follow, name="digests", daemon=True)

    def __enter__(self) -> "HashedAhead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def known(self, path: Path) -> list[str]:
        """Returns the digests of the first blocks of a file, of as many as there are; not while entered."""
        there = path.stat()
        return self._hashed.get(there.st_ino, [])[: there.st_size // BLOCK]

    def _follow(self) -> None:
        # A file that is renamed or refused meanwhile is hashed at the end.
        while not self._ended.wait(LOOK_EVERY):
            with suppress(OSError):
                for path in self.directory.glob(self.pattern):
                    self._hash(path)

    def _hash(self, path: Path) -> None:
        there = path.stat()
        hashed = self._hashed.setdefault(there.st_ino, [])
        whole = there.st_size // BLOCK
        while len(hashed) < whole and not self._ended.is_set():
            hashed.append(digest_of(path, len(hashed) * BLOCK, BLOCK))


def write(
    directory: Path, known: Files | None = None, ahead: HashedAhead | None = None
) -> int:
    """Writes the digests of all files under `directory` beside them; returns the bytes of those that were not
    `known`. `ahead` has those of blocks that were hashed while they were written.
    """
    known = known or {}
    paths = sorted(
        p
        for p in directory.rglob("*")
        if p.is_file() and p.name not in (COMMIT, DIGESTS)
    )
    sizes = {str(p.relative_to(directory)): p.stat().st_size for p in paths}
    files: Files = {
        name: (size, ahead.known(directory / name) if ahead else [])
        for name, size in sizes.items()
    } | known
    blocks = []
    for name, size in sizes.items():
        if name not in known:
            starts = range(len(files[name][1]) * BLOCK, max(size, 1), BLOCK)
            blocks += [(name, start) for start in starts]
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda b: digest_of(directory / b[0], b[1], BLOCK), blocks)
        for (name, _), digest in zip(blocks, digests, strict=True):
            files[name][1].append(digest)
    entries = {
        name: {"bytes": size, "sha256": sums} for name, (size, sums) in files.items()
    }
    text = json.dumps({"block": BLOCK, "files": entries}, indent=1)
    write_atomically(directory / DIGESTS, text.encode())
    return sum(size for name, size in sizes.items() if name not in known)


def problems(
    directory: Path,
    part: int = 0,
    parts: int = 1,
    only: Collection[str] | None = None,
    keep: bool = True,
) -> list[str]:
    """Returns a sentence on each difference from the digests; one of `parts` processes looks at every `parts`-th block.

    `only` names the files to look at, None all of them. The arrays of a step in a store are fetched, and stay in the
    directory with `keep`. The digests themselves must have been checked
    (`steps.commit_problem`). Unreadable for a file that cannot be read now, which does not count as a difference.
    """
    try:
        block, files = _record(directory)
    except Damaged as damage:
        return [str(damage)]
    sentences = [
        f"{DIGESTS} has nothing on {name}" for name in only or () if name not in files
    ]
    problem_of: Callable[..., str | None] = partial(_problem, directory)
    stored = False
    if only is None and (directory / STORED).is_file():
        stored = True
        sizes = {name: size for name, (size, _) in files.items()}
        problem_of = object_stores().StoredBlocks(directory, sizes, keep).problem
    blocks = []
    for name, (size, expected) in files.items():
        if only is not None and name not in only:
            continue
        if not stored and (problem := _size_problem(directory / name, size)):
            sentences.append(f"{name} {problem}{_shared(directory / name)}")
        else:
            blocks += [
                (name, k * block, digest, block) for k, digest in enumerate(expected)
            ]
    with ThreadPoolExecutor(THREADS) as pool:
        own = blocks[part::parts]
        in_blocks = pool.map(lambda b: problem_of(*b), own)
        try:
            return sentences + [
                sentence for sentence in in_blocks if sentence is not None
            ]
        except Unreadable:
            # The blocks after it would each be tried as long.
            pool.shutdown(cancel_futures=True)
            raise


def files_in(directory: Path, part: str) -> Files:
    """Returns the digests of a part of a step.

    Damaged if they are not all there, or are of blocks of another size than are written now.
    """
    block, files = _record(directory)
    if block != BLOCK:
        raise Damaged(f"{DIGESTS} is of blocks of {block:,} bytes")
    return {name: file for name, file in files.items() if name.startswith(f"{part}/")}


def total_bytes(directory: Path) -> int:
    """Returns the bytes of a step's files, as its digests say."""
    return sum(size for size, _ in _record(directory)[1].values())


def _record(directory: Path) -> tuple[int, Files]:
    """Returns the block size, and each file's bytes and digests; Damaged if they are not all there."""
    record = parsed(directory / DIGESTS)
    try:
        block = record["block"]
        files = {n: (f["bytes"], f["sha256"]) for n, f in record["files"].items()}
        complete = block > 0 and all(
            name.isprintable()
            and size >= 0
            and len(expected) == len(range(0, max(size, 1), block))
            for name, (size, expected) in files.items()
        )
    except (TypeError, KeyError, AttributeError, OverflowError):
        complete = False
    if not complete:
        raise Damaged(f"{DIGESTS} does not have a digest of every block")
    return block, files


def object_stores() -> ModuleType:
    """Returns the module of steps in object stores, which few runs import."""
    from meshtrain.checkpoint import stored

    return stored


def _size_problem(path: Path, size: int) -> str | None:
    there = status(path)
    if there is None or not stat.S_ISREG(there.st_mode):
        return "is missing"
    if there.st_size == size:
        return None
    return f"has {there.st_size:,} bytes instead of {size:,}"


def _problem(
    directory: Path,
    name: str,
    start: int,
    expected: str,
    block: int,
) -> str | None:
    try:
        digest = retried(lambda: digest_of(directory / name, start, block))
    except OSError as error:
        if error.errno in ABSENT:
            return f"{name} is missing"
        raise unreadable(directory / name, error) from None
    if digest == expected:
        return None
    return f"{name} is damaged between bytes {start:,} and {start + block:,}{_shared(directory / name)}"


def _shared(path: Path) -> str:
    """Returns the end of a sentence on a damaged file that other steps link to."""
    there = status(path)
    others = there.st_nlink - 1 if there is not None else 0
    if others <= 0:
        return ""
    steps_have = " step has" if others == 1 else " steps have"
    return f", a file that {others} other{steps_have} too"


def digest_of(path: Path, start: int, block: int) -> str:
    """Returns the SHA-256 of the bytes of a file from `start` on, at most a block of them."""
    digest = hashlib.sha256()
    buffer = bytearray(min(READ, block))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = block
        while left and (n := file.readinto(view[: min(left, len(buffer))])):
            digest.update(view[:n])
            left -= n
    return digest.hexdigest()
