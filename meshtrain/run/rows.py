"""Files with one JSON object a line, such as metrics.jsonl: written line by line, so that a killed run keeps its rows,
and read back.

One rule holds wherever rows are read: a row is a JSON object that ends with its line. Lines that hold something else (a
killed process, a full disk) are left out and counted; a last line without an end may still be written, and is left out
until it has one.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshtrain.errors import refusal, say
from meshtrain.files import still_names, write_atomically
from meshtrain.run.directory import set_aside

LONGEST = 1 << 20  # bytes of a line; a longer one is no row

Row = dict[str, Any]


def read(path: Path, containing: bytes = b"") -> tuple[list[Row], int]:
    """Returns the rows of a file, and how many lines are none; OSError if it cannot be read, no rows where no regular
    file is.

    `containing`: only lines with these bytes are parsed, which is most of a row's cost.
    """
    reader = RowReader(path, containing=containing)
    return list(reader.new()), reader.torn


def decode(lines: Iterable[bytes]) -> tuple[list[Row], int]:
    """Returns the rows among lines that have been read already, each with its end, and how many are none."""
    rows = [parse(line) for line in lines if line.endswith(b"\n") and line.strip()]
    return [row for row in rows if row is not None], rows.count(None)


def parse(line: bytes) -> Row | None:
    """Returns the JSON object of a line; None for anything else."""
    try:
        value = json.loads(line)
    # Not JSON, not UTF-8, a number of thousands of digits; brackets without end.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class RowReader:
    """Reads a file of rows that may still grow, be replaced, or not be there yet: `new` gives the rows since it was
    asked last.

    `last`: begin so many bytes before the end, to read the newest rows alone. `torn` counts the lines so far that could
    not be read as rows.
    """

    def __init__(
        self, path: Path, last: int | None = None, containing: bytes = b""
    ) -> None:
        self.path = path
        self.torn = 0
        self._last = last
        self._containing = containing
        self._position = 0
        self._identity = (0, 0)
        self._begun = False

    def new(self) -> Iterator[Row]:
        """Yields rows; none where there is no such file. OSError if it cannot be read."""
        try:
            # Opening a pipe would wait for ever.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return
        with os.fdopen(descriptor, "rb") as file:
            self._find_position(status)
            file.seek(self._position)
            if not self._begun and self._position:
                # The end of a row whose begin is not read.
                self._position += len(file.readline())
            self._begun = True
            while line := file.readline(LONGEST):
                if not line.endswith(b"\n"):
                    if len(line) < LONGEST:
                        return
                    while line and not line.endswith(b"\n"):
                        self._position += len(line)
                        line = file.readline(LONGEST)
                    self._position += len(line)
                    self.torn += 1
                    continue
                self._position += len(line)
                if self._containing not in line or not line.strip():
                    continue
                if (row := parse(line)) is not None:
                    yield row
                else:
                    self.torn += 1

    def _find_position(self, status: os.stat_result) -> None:
        """Reads a file from its begin that has taken the place of the one before, or was cut."""
        if (
            self._identity != (status.st_dev, status.st_ino)
            or status.st_size < self._position
        ):
            if self._last is not None:
                self._position = max(status.st_size - self._last, 0)
            else:
                self._position = 0
            self._identity = (status.st_dev, status.st_ino)
            self._begun = False


class MetricsFile:
    """Appends rows; numbers are written with full precision, what is not finite as null plus a `not_finite` list.

    Rows that the system does not take (a disk is full, read-only, or fails) wait in memory until it does, and that is
    said once: training need not end for them. A file that was removed or replaced meanwhile is written again with all
    of its rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        self._size = self._bytes()
        self._waiting = b""
        self.refused: OSError | None = None  # what the system said when it took no rows

    def write(self, row: dict[str, Any]) -> None:
        bad = [
            name
            for name, value in row.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        clean = {name: None if name in bad else value for name, value in row.items()}
        self._waiting += (
            json.dumps(clean | ({"not_finite": bad} if bad else {})).encode() + b"\n"
        )
        self._write_waiting()

    def is_there(self) -> bool:
        """Returns whether rows are appended to the file that a reader would find."""
        return still_names(self.path, self._file)

    def finish(self) -> bool:
        """Writes the rows that wait, with the others into a new file where this one takes none; returns whether all
        are in it.
        """
        self._write_waiting()
        # If it cannot be replaced either, the rows wait on, and `close` says why.
        with contextlib.suppress(OSError):
            if self.refused is not None and self.path.is_file() and self.is_there():
                write_atomically(self.path, self.path.read_bytes() + self._waiting)
                self._waiting = b""
                self.refused = None
                self._open_again()
        return self.refused is None

    def close(self) -> None:
        """Says if rows are lost."""
        self.finish()
        self._file.close()
        if self.refused is not None:
            rows = self._waiting.count(b"\n")
            say(
                f"the last {rows} rows of {self.path} cannot be written: {refusal(self.refused)}."
            )

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        try:
            if not self.is_there():
                self._write_again()
            elif self.refused is not None:
                self._open_again()
            self._say_if_shorter()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._size = self._bytes()
            self.refused = None
        except OSError as error:
            if self.refused is None:
                kept = "they are kept, and written as soon as it lets them be"
                say(
                    f"rows cannot be written to {self.path} now: {refusal(error)}; {kept}."
                )
            self.refused = error

    def _open_again(self) -> None:
        """Opens the file anew: a handle that has once met an error of the disk may answer with it for ever."""
        file = self.path.open("a+b", buffering=0)
        self._file.close()
        self._file = file

    def _bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _say_if_shorter(self) -> None:
        """Warns of rows that somebody cut off while the run goes on: they are nowhere any longer."""
        if (lost := self._size - self._bytes()) > 0:
            say(f"{lost} bytes of rows were cut off {self.path} while the run goes on.")
            self._size -= lost

    def _write_again(self) -> None:
        """Makes the file anew, with the rows of the one that is there no longer; what took its place is set aside."""
        try:
            self._file.seek(0)
            rows = self._file.read()
        except OSError as error:
            # On NFS, when another machine removed it. What waits and what comes is all there will be.
            rows = b""
            say(f"the rows in {self.path} until here went with it: {refusal(error)}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            set_aside(self.path.parent, [self.path.name])
        write_atomically(self.path, rows)
        self._open_again()
        self._size = self._bytes()


def trim_metrics(path: Path, step: int) -> None:
    """Drops rows of steps after `step`, which will be taken again, and lines that cannot be read as rows.

    Each step then stands there once, with a row of each `kind` that there is. The file is replaced whole or not at all.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [
        (row["step"], str(row.get("kind")), line)
        for line in lines
        if line.endswith(b"\n") and (row := parse(line)) and "step" in row
    ]
    # By step, since somebody may have put a file together from two.
    remaining = {
        (taken, kind): line
        for taken, kind, line in rows
        if isinstance(taken, int) and taken <= step
    }
    if len(remaining) < len(lines):
        write_atomically(path.resolve(), b"".join(remaining.values()))
