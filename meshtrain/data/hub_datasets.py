"""Datasets of Hugging Face as sources: hf:NAME[:SPLIT[:COLUMN]], NAME of the hub or a directory on disk.

    hf:Salesforce/wikitext/wikitext-2-raw-v1:train:text      repository, subset, split, column
    hf:./saved:validation                                    what save_to_disk wrote, or a downloaded repository
       │ the library datasets (extra `datasets`), row by row, once
       ▼
    CACHE/datasets/KEY/saved-validation/00000.jsonl          files of text, which are prepared as all others are

A copy that was interrupted goes on behind its last whole file. Rows have the order of the dataset: shuffling, splitting
and resuming are those of the shards.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain import hub
from meshtrain.data.formats import present
from meshtrain.errors import ConfigError, nearest, not_installed, short
from meshtrain.files import cache_directory, locked, write_atomically
from meshtrain.sources import DATASET as SCHEME
from meshtrain.sources import is_dataset

FORM = f"{SCHEME}NAME[:SPLIT[:COLUMN]]"
PART = 64 << 20  # bytes of a file, about
WHOLE = "whole"  # beside the files once all are there


@dataclass(frozen=True)
class HubDataset:
    """A source as it was given, and its parts. `column` None: data.text_field, or all of a conversation."""

    source: str
    name: str
    split: str = "train"
    column: str | None = None

    @classmethod
    def read(cls, source: str) -> "HubDataset":
        """Returns the parts of a source; ConfigError if it has others."""
        name, *rest = source.removeprefix(SCHEME).split(":")
        if not name or len(rest) > 2 or not all(rest):
            raise ConfigError(
                f"the source {short(source)} is no dataset; write {FORM}."
            )
        if name.startswith((".", "~", "/")) and not Path(name).expanduser().is_dir():
            raise ConfigError(
                f"the source {short(source)} names no directory that is there."
            )
        return cls(source, name, *rest)

    @property
    def directory(self) -> Path | None:
        """The directory on disk; None of a name of the hub."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None


def files_of(source: str, contents: str, text_field: str) -> str:
    """Returns the directory of files that a dataset is copied to, now if that is not there; any other source as it is.

    `contents`: data.format. ConfigError for a dataset, a split or a column that there is none of. OSError where the
    disk refuses.
    """
    if not is_dataset(source):
        return source
    dataset = HubDataset.read(source)
    if contents == "pairs" and dataset.column:
        raise ConfigError(
            f"{short(source)} names a column, but pairs are made of several; leave it out."
        )
    field = text_field if contents == "text" else "messages"
    slug = "-".join(
        filter(None, (os.path.basename(dataset.name.rstrip("/")), dataset.split))
    )
    to = cache_directory() / "datasets" / _key(dataset, contents, field) / slug
    to.mkdir(parents=True, exist_ok=True)
    with locked(to.parent):
        if not (to.parent / WHOLE).is_file():
            column = dataset.column or (text_field if contents == "text" else None)
            _copy(dataset, column, field, to)
    return str(to)


def _key(dataset: HubDataset, contents: str, field: str) -> str:
    """Returns what tells one copy from another: of a directory also which files are in it."""
    parts = [dataset.source, contents, field]
    if directory := dataset.directory:
        parts.append(str(directory.resolve()))
        parts += [
            f"{path.relative_to(directory)} {status.st_size} {status.st_mtime_ns}"
            for path, status in _listing(directory)
        ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _listing(directory: Path) -> list[tuple[Path, os.stat_result]]:
    return [
        (path, path.stat()) for path in sorted(directory.rglob("*")) if path.is_file()
    ]


def _copy(dataset: HubDataset, column: str | None, field: str, to: Path) -> None:
    done = sorted(to.glob("*.jsonl"))
    rows = _open(dataset)
    if column is not None:
        _check_column(
            dataset, column, rows.column_names or next(_rows(dataset, rows), {})
        )
        rows = rows.select_columns([column])
    taken = sum(_lines(path) for path in done)
    lines = (_line(row, column, field) for row in _rows(dataset, rows.skip(taken)))
    # The time that chat templates see: of a directory its own, so that its copy makes the same shards on any day.
    directory = dataset.directory
    stamp = (
        max((s.st_mtime_ns for _, s in _listing(directory)), default=0)
        if directory
        else 0
    )
    for number, content in enumerate(_parts(lines), len(done)):
        path = to / f"{number:05d}.jsonl"
        write_atomically(path, content)
        os.utime(path, ns=(stamp, stamp))
    write_atomically(to.parent / WHOLE, b"")


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _line(row: dict[str, Any], column: str | None, field: str) -> bytes:
    record = present(row) if column is None else {field: row[column]}
    return (
        json.dumps(record, ensure_ascii=False, default=str).encode(
            errors="surrogatepass"
        )
        + b"\n"
    )


def _parts(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines in pieces of about PART bytes."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= PART:
            yield b"".join(piece)
            piece = []
            size = 0
    if piece:
        yield b"".join(piece)


def _open(dataset: HubDataset) -> Any:
    """Returns the rows of a split, an IterableDataset; ConfigError with what is legal where there is none."""
    try:
        import datasets
    except ImportError:
        raise not_installed(
            f"{short(dataset.source)} is read by the library datasets", "datasets"
        ) from None
    directory = dataset.directory
    try:
        if directory is not None and (directory / "dataset_info.json").is_file():
            return _iterable(
                {"train": datasets.load_from_disk(str(directory))}, dataset
            )
        if directory is not None and (directory / "dataset_dict.json").is_file():
            return _iterable(datasets.load_from_disk(str(directory)), dataset)
        if directory is not None:
            return _iterable(
                datasets.load_dataset(str(directory), streaming=True), dataset
            )
        owner, *parts = dataset.name.split("/")
        repository, _, revision = "/".join([owner, *parts[:1]]).partition("@")
        how = {"revision": revision or None, "streaming": True}
        return _iterable(datasets.load_dataset(repository, *parts[1:2], **how), dataset)
    except ConfigError:
        raise
    # of the library, of the hub, or of what is in the files
    except Exception as error:
        raise _unreadable(dataset, error) from None


def _iterable(splits: Any, dataset: HubDataset) -> Any:
    if dataset.split not in splits:
        ending = nearest(dataset.split, splits) or f"; it has {', '.join(splits)}."
        raise ConfigError(
            f"{short(dataset.source)}: there is no split {short(repr(dataset.split))}{ending}"
        )
    rows = splits[dataset.split]
    return rows.to_iterable_dataset() if hasattr(rows, "to_iterable_dataset") else rows


def _rows(dataset: HubDataset, rows: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows; ConfigError for one that cannot be read."""
    try:
        yield from rows
    # of the library, of the hub, or of what is in the files
    except Exception as error:
        raise _unreadable(dataset, error) from None


def _unreadable(dataset: HubDataset, error: Exception) -> ConfigError:
    why = f"{short(dataset.source)} cannot be read ({hub.reason(error)})"
    if dataset.directory is not None:
        return ConfigError(
            f"{why}; give a directory of save_to_disk, or of Parquet, Arrow or JSON Lines."
        )
    target = dataset.name.rpartition("/")[2]
    command = f"hf download {dataset.name} --repo-type dataset --local-dir {target}"
    return ConfigError(
        f"{why}; where it can, {short(command)} fetches it: give {SCHEME}{short(target)} then."
    )


def _check_column(dataset: HubDataset, column: str, names: Iterable[str]) -> None:
    if column not in (names := list(names)):
        ending = nearest(column, names) or f"; it has {', '.join(map(short, names))}."
        raise ConfigError(
            f"{short(dataset.source)}: there is no column {short(repr(column))}{ending}"
        )
