"""metrics.jsonl: one JSON object a logged step, written line by line so that a killed run keeps what it had said."""

import json
import math
import os
from pathlib import Path
from typing import Any

from meshtrain.errors import refusal, say
from meshtrain.files import still_names, write_atomically
from meshtrain.run.directory import set_aside


class MetricsFile:
    """Appends rows; numbers are written with full precision, what is not finite as null plus a `not_finite` list.

    Rows that the system does not take (a disk is full, or read-only) wait in memory until it does: training need not end for them.
    A file that was removed or replaced meanwhile is written again with all of its rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        self._size = self._bytes()
        self._waiting = b""
        self.refused: OSError | None = None  # what the system said when it took no rows

    def write(self, row: dict[str, Any]) -> None:
        bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        clean = {name: None if name in bad else value for name, value in row.items()}
        self._waiting += json.dumps(clean | ({"not_finite": bad} if bad else {})).encode() + b"\n"
        self._write_waiting()

    def is_there(self) -> bool:
        """Whether rows are appended to the file that a reader would find."""
        return still_names(self.path, self._file)

    def close(self) -> None:
        """Says if rows are lost."""
        self._write_waiting()
        self._file.close()
        if self.refused is not None:
            rows = self._waiting.count(b"\n")
            say(f"the last {rows} rows of {self.path} cannot be written: {refusal(self.refused)}.")

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        try:
            if not self.is_there():
                self._write_again()
            self._say_if_shorter()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._size = self._bytes()
            self.refused = None
        except OSError as error:
            self.refused = error

    def _bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _say_if_shorter(self) -> None:
        """Rows that somebody cut off while the run goes on are nowhere any longer; what comes is appended to what is left."""
        if (lost := self._size - self._bytes()) > 0:
            say(f"{lost} bytes of rows were cut off {self.path} while the run goes on.")
            self._size -= lost

    def _write_again(self) -> None:
        """The file under its name, with the rows of the one that is there no longer; what took its place is set aside."""
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
        self._file.close()
        self._file = self.path.open("a+b", buffering=0)
        self._size = self._bytes()


def trim_metrics(path: Path, step: int) -> None:
    """Drops rows of steps after `step`, which will be taken again, and what is not a whole row (a process killed while writing leaves one).

    Each step then stands there once. The file is replaced whole or not at all.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    # By step, since somebody may have put a file together from two.
    rows = {taken: line for line in lines if (taken := _step(line)) is not None and taken <= step}
    kept = list(rows.values())
    if len(kept) < len(lines):
        write_atomically(path.resolve(), b"".join(kept))


def _step(line: bytes) -> int | None:
    """The step of a row; None if the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None
