"""metrics.jsonl: one JSON object a logged step, written line by line so that a killed run keeps what it had said."""

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends rows (one process of a run does); numbers are written with full precision, what is not finite as null plus a `not_finite` list.

    Rows that a full disk has no room for wait in memory until it has: training need not end for them.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self._file = (path if writes else Path(os.devnull)).open("ab", buffering=0)
        self._waiting = b""

    def write(self, row: dict[str, Any]) -> None:
        bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        clean = {name: None if name in bad else value for name, value in row.items()}
        self._waiting += json.dumps(clean | ({"not_finite": bad} if bad else {})).encode() + b"\n"
        self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        self._file.close()
        if self._waiting:
            rows = self._waiting.count(b"\n")
            print(f"meshtrain: the disk is full; {rows} rows of {self._file.name} are lost.", file=sys.stderr)

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
