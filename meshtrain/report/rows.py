"""JSON Lines that a run writes, read with distrust: line by line, whole rows alone, into a column of numbers for each key.

    {"step": 7, "loss": 2.5, "phase_seconds": {"data": 0.1}}     ─►  step [.., 7]  loss [.., 2.5]  phase_seconds.data [.., 0.1]

A row that has no such key has NaN there. What is cut in half (a process was killed while it wrote) is left out and counted; what does
not end yet, of a file that still grows, waits for its end.
"""

import json
import math
import os
import stat
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 1 << 20  # bytes of a line; a longer one is no row
HUGE = 1e30  # no metric is so large; squares and sums of larger numbers overflow
MOST_COLUMNS = 512  # of which a machine with many devices has most: a number each

Row = dict[str, Any]


class Follower:
    """A file of JSON Lines that may still grow, be replaced, or not be there yet: `new` gives the rows since it was asked last.

    `last`: begin so many bytes before the end, to look at the newest rows alone.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.path, self.torn = path, 0
        self._last, self._at, self._file_of, self._begun = last, 0, (0, 0), False

    def new(self) -> Iterator[Row]:
        """Whole rows; none where there is no such file. OSError if it cannot be read."""
        try:
            # Opening a pipe would wait for ever.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            return
        with os.fdopen(descriptor, "rb") as file:
            self._place(about)
            file.seek(self._at)
            if self._begun is False and self._at:
                # The end of a row whose begin is not read.
                self._at += len(file.readline())
            self._begun = True
            while line := file.readline(LONGEST):
                if not line.endswith(b"\n"):
                    if len(line) < LONGEST:
                        return
                    while line and not line.endswith(b"\n"):
                        self._at += len(line)
                        line = file.readline(LONGEST)
                    self._at += len(line)
                    self.torn += 1
                    continue
                self._at += len(line)
                row = _object(line)
                if row is not None:
                    yield row
                elif line.strip():
                    self.torn += 1

    def _place(self, about: os.stat_result) -> None:
        """Where to read on: from the begin of a file that has taken the place of the one before, or was cut."""
        same = self._file_of == (about.st_dev, about.st_ino) and about.st_size >= self._at
        if not same:
            self._at = max(about.st_size - self._last, 0) if self._last is not None else 0
            self._file_of, self._begun = (about.st_dev, about.st_ino), False


def _object(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
    # Not JSON, not UTF-8, a number of thousands of digits; brackets without end.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Columns:
    """Numbers by key, each column as long as there are rows: 8 bytes a number."""

    def __init__(self) -> None:
        self._columns: dict[str, array] = {}
        self.rows = 0
        self.not_finite: dict[str, int] = {}  # how many rows name a value that was infinite or no number

    def add(self, row: Mapping[str, Any]) -> None:
        self._put(row, "")
        self.rows += 1
        bad = row.get("not_finite")
        for name in bad if isinstance(bad, list) else ():
            if isinstance(name, str):
                self.not_finite[name] = self.not_finite.get(name, 0) + 1

    def _put(self, row: Mapping[str, Any], prefix: str) -> None:
        for key, value in row.items():
            kind = type(value)
            if kind is float or kind is int:
                column = self._columns.get(prefix + key)
                if column is None:
                    if len(self._columns) >= MOST_COLUMNS:
                        continue
                    column = self._columns[prefix + key] = array("d")
                if len(column) < self.rows:
                    column.extend([math.nan] * (self.rows - len(column)))
                # Of a key that stands there twice, the last.
                if len(column) == self.rows:
                    column.append(_float(value))
            elif kind is dict and prefix.count(".") < 3:
                self._put(value, f"{prefix}{key}.")

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> np.ndarray:
        """float64 [rows]; NaN where a row does not say, or no row does."""
        column = self._columns.get(name)
        found = np.full(self.rows, math.nan)
        if column is not None:
            found[: len(column)] = np.frombuffer(column, np.float64) if len(column) else ()
        return found

    def names(self, under: str = "") -> list[str]:
        """The columns, or those of the labels of one metric."""
        return [name for name in self._columns if name.startswith(under)]

    def known(self, name: str) -> np.ndarray:
        """What rows say of one key, in their order: finite float64."""
        found = self[name]
        return found[np.isfinite(found)]


def _float(value: float) -> float:
    # Also a whole number of hundreds of digits.
    return float(value) if -HUGE < value < HUGE else math.nan


def read(path: Path) -> tuple[Columns, int]:
    """All of a file, and how many lines were no rows. A last line without its end may still be written: it is left out."""
    follower, found = Follower(path), Columns()
    for row in follower.new():
        found.add(row)
    return found, follower.torn
