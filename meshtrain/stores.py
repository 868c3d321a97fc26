"""Object stores (s3://, gs://, hf://): requests that are bounded whole, tried again, and end in one sentence; local
copies of what is read.

    read(s3://bucket/a, at, size) ──► one request ── too slow, cut short, 503 ──► again, PAUSES apart ──► RequestRefused
    local_copy(s3://bucket/model) ──► CACHE/copy-1f3a.../config.json, model.safetensors

fsspec's file systems do the talking (extra `remote`). A timeout of a socket begins anew with each byte that drips in,
so each request has one for all of it: PATIENCE, and what its bytes take at SLOWEST.
"""

import asyncio
import datetime
import errno
import hashlib
import io
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from meshtrain.errors import ConfigError, not_installed, short
from meshtrain.files import (
    PAUSES,
    RequestRefused,
    cache_directory,
    locked,
    temporary_beside,
)

T = TypeVar("T")

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
PATIENCE = 30.0  # seconds of a request, beside what its bytes take
SLOWEST = 1e6  # bytes a second
THREADS = 16
BLOCK = 8 << 20  # bytes of one request
LARGEST_CACHE = 64.0  # GiB, as data.cache_gib
PATH = object()  # stands for the path of the address


@dataclass(frozen=True)
class Entry:
    """An object of a listing."""

    size: int
    etag: str  # what changes with its content, as the store names it
    modified: int  # ns since 1970


# --- requests


def file_system(address: str) -> Any:
    """Returns a new file system of fsspec's for an address, with credentials that are looked up anew.

    ConfigError for a scheme that is none, or whose library is not installed.
    """
    scheme = address.partition("://")[0]
    if scheme not in LIBRARIES:
        legal = ", ".join(f"{name}://" for name in LIBRARIES)
        raise ConfigError(
            f"{short(address)} is at no store that is known; legal are {legal}."
        )
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {
            "retries": {"max_attempts": 1},
            "connect_timeout": 10,
        }
    try:
        import fsspec

        system = fsspec.filesystem(scheme, **options)
    except ImportError:
        raise not_installed(
            f"{short(address)} is read by fsspec and {LIBRARIES[scheme]}",
            "remote",
            libraries=2,
        ) from None
    # Other tries are ours.
    if scheme == "s3":
        system.retries = 1
    if scheme == "gs":
        system._request = partial(type(system)._request.__wrapped__, system)
        # It prints tracebacks.
        logging.getLogger(LIBRARIES[scheme]).setLevel(logging.CRITICAL)
    return system


# By process and scheme, with the time when it was made.
_systems: dict[tuple[int, str], tuple[Any, float]] = {}
_making = threading.Lock()


def _system(address: str, fresh: bool) -> tuple[Any, str]:
    scheme, _, path = address.partition("://")
    key = os.getpid(), scheme
    with _making:
        made = _systems.get(key)
        # Threads that are refused together look their credentials up once.
        if made is None or (fresh and time.monotonic() - made[1] > PATIENCE):
            _systems[key] = made = file_system(address), time.monotonic()
        return made[0], path


def forget() -> None:
    """Forgets the connections: the environment has other credentials, or another server."""
    _systems.clear()


def _once(
    address: str,
    method: str,
    seconds: float,
    fresh: bool,
    *given: Any,
    **more: Any,
) -> Any:
    system, path = _system(address, fresh)
    arguments = [path if one is PATH else one for one in given]
    if system.async_impl:
        bounded = asyncio.wait_for(
            getattr(system, f"_{method}")(*arguments, **more), seconds
        )
        return asyncio.run_coroutine_threadsafe(bounded, system.loop).result(
            seconds + PATIENCE
        )
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(getattr(system, method), *arguments, **more).result(seconds)
    finally:
        # A thread that hangs is left to itself.
        pool.shutdown(wait=False)


def _ask(
    address: str,
    method: str,
    *given: Any,
    size: int = 0,
    whole: int | None = None,
    **more: Any,
) -> Any:
    """Returns what a method of fsspec's answers, PATH standing for the path; RequestRefused once it was tried often
    enough.

    `size`: bytes on their way. `whole`: bytes that an answer has, or it was cut short. FileNotFoundError,
    FileExistsError at once.
    """
    seconds = PATIENCE + size / SLOWEST
    fresh = False
    for pause in (*PAUSES, None):
        number = errno.EIO
        try:
            answer = _once(address, method, seconds, fresh, *given, **more)
            if whole is None or len(answer) == whole:
                return answer
            reason = "the answer was cut short"
        except (FileNotFoundError, FileExistsError, ConfigError):
            raise
        except TimeoutError:
            number = errno.ETIMEDOUT
            reason = f"no whole answer within {seconds:.0f} s"
        # of whatever library the store's is
        except Exception as error:
            said = (
                getattr(error, "strerror", None) or str(error) or type(error).__name__
            )
            reason = said.splitlines()[0].rstrip(".")
            code = getattr(error, "code", None)
            if isinstance(error, PermissionError) or code == HTTPStatus.UNAUTHORIZED:
                number = errno.EACCES
                # A credential that has expired may have been renewed where it came from.
                if fresh:
                    break
                fresh = True
        if pause is not None:
            time.sleep(pause * random.uniform(0.8, 1.2))
    raise RequestRefused(number, reason, address)


def read(address: str, at: int = 0, size: int | None = None) -> bytes:
    """Returns the bytes of an object, all or `size` of them from `at` on."""
    if size is None:
        return bytes(_ask(address, "cat_file", PATH, size=BLOCK))
    if size == 0:
        return b""
    return bytes(
        _ask(address, "cat_file", PATH, size=size, whole=size, start=at, end=at + size)
    )


def write(address: str, content: bytes) -> None:
    """Writes an object, in place of one that is there."""
    _ask(address, "pipe_file", PATH, content, size=len(content))


def write_new(address: str, content: bytes) -> bool:
    """Writes an object if there is none; returns whether the one that is there has this content."""
    try:
        _ask(address, "pipe_file", PATH, content, size=len(content), mode="create")
    except FileExistsError:
        # an answer that was lost, or somebody else's
        return read(address) == content
    return True


def upload(path: Path, address: str) -> None:
    """Writes a file as an object."""
    _ask(address, "put_file", str(path), PATH, size=path.stat().st_size)


def remove(addresses: Iterable[str]) -> None:
    """Removes objects, those that are not there too."""

    def one(address: str) -> None:
        try:
            _ask(address, "rm_file", PATH)
        except FileNotFoundError:
            return

    each(one, addresses)


def each(function: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
    """Returns what a function returns for each of the values, THREADS at a time; after an error none is begun."""
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            return list(pool.map(function, values))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def listing(address: str) -> dict[str, Entry]:
    """Returns the objects under an address, by the rest of their names, in order; of an object itself by nothing."""
    try:
        found = _ask(address, "find", PATH, detail=True)
    except FileNotFoundError:
        return {}
    _, path = _system(address, fresh=False)
    root = path.rstrip("/")
    entries = {}
    for name, info in sorted(found.items()):
        if info.get("type") == "file" and not name.endswith("/"):
            entries[name.removeprefix(root).lstrip("/")] = _entry(info)
    return entries


def status(address: str) -> Entry:
    """Returns the entry of an object; FileNotFoundError if there is none."""
    return _entry(_ask(address, "info", PATH))


def _entry(info: Mapping[str, Any]) -> Entry:
    etag = next(
        (str(info[key]) for key in ("ETag", "etag", "blob_id") if info.get(key)), ""
    )
    when = next(
        (info[key] for key in ("LastModified", "mtime", "updated") if info.get(key)), 0
    )
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when)
    seconds = when.timestamp() if isinstance(when, datetime.datetime) else float(when)
    return Entry(int(info["size"]), etag, int(seconds) * 10**9)


# --- an object as a file


class RangedFile(io.RawIOBase):
    """An object as a file: each read is a request of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._size = status(address).size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        content = self._next(len(into))
        into[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self._next(BLOCK), b""))

    def _next(self, size: int) -> bytes:
        content = read(
            self._address, self._at, max(0, min(size, self._size - self._at))
        )
        self._at += len(content)
        return content


def open_object(address: str) -> io.BufferedReader:
    """Opens an object for reading."""
    return io.BufferedReader(RangedFile(address), BLOCK)


# --- local copies


def local_copy(
    address: str,
    limit: float = LARGEST_CACHE,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Returns a directory with the `wanted` objects under an address, fetched where it is not there as it is now.

    ConfigError if there are none, or more than the cache may hold. OSError where the store or the disk refuses.
    """
    entries = {
        name: entry for name, entry in listing(address).items() if name and wanted(name)
    }
    if not entries:
        raise ConfigError(f"there is nothing under {short(address)}.")
    names = repr(
        (address.rstrip("/"), sorted((n, e.size, e.etag) for n, e in entries.items()))
    )
    directory = cache() / f"copy-{hashlib.sha256(names.encode()).hexdigest()[:24]}"
    make_room(
        sum(entry.size for entry in entries.values()), limit, address, {directory}
    )
    with locked(cache()):
        if not directory.is_dir():
            partial = directory.with_suffix(".part")
            for name, entry in entries.items():
                _fetch(f"{address.rstrip('/')}/{name}", partial / name, entry)
            now = listing(address)
            if changed := [
                name for name, entry in entries.items() if now.get(name) != entry
            ]:
                shutil.rmtree(partial)
                raise ConfigError(
                    f"{short(address)}/{changed[0]} has changed while it was read; run again."
                )
            os.rename(partial, directory)
    os.utime(directory)
    return directory


def _fetch(address: str, path: Path, entry: Entry) -> None:
    """Fetches an object that is not there yet, a block at a time."""
    if path.is_file() and path.stat().st_size == entry.size:
        return
    if not path.resolve().is_relative_to(cache().resolve()):
        raise ConfigError(f"{short(address)} is no name that a file can have.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    with temporary.open("wb") as file:

        def block(at: int) -> None:
            content = read(address, at, min(BLOCK, entry.size - at))
            os.pwrite(file.fileno(), content, at)

        each(block, range(0, entry.size, BLOCK))
        os.fsync(file.fileno())
    os.replace(temporary, path)


def cache() -> Path:
    """Returns the directory of copies, which is made."""
    directory = cache_directory() / "store"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def make_room(needed: int, limit: float, address: str, keep: set[Path]) -> None:
    """Removes what was used longest ago, so that with `needed` bytes the copies are at most `limit` GiB.

    `keep`: what those bytes are for. ConfigError if they are more than that alone.
    """
    most = int(limit * 2**30)
    if needed > most:
        raise ConfigError(
            f"{short(address)} has {needed / 2**30:.1f} GiB to keep here, but data.cache_gib is {limit:g}; give more."
        )
    others = []
    for path in cache().iterdir():
        if (
            not path.name.startswith(".")
            and path.with_suffix("") not in keep
            and path not in keep
        ):
            files = [p for p in (path, *path.rglob("*")) if p.is_file()]
            others.append(
                (path.stat().st_mtime, path, sum(p.stat().st_blocks for p in files))
            )
    total = 512 * sum(blocks for *_, blocks in others)
    for _, path, blocks in sorted(others):
        if total + needed <= most:
            return
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        total -= 512 * blocks
