"""Rows that a run writes (`meshtrain.run.rows`) as a column of numbers for each key.

    {"step": 7, "loss": 2.5, "phase_seconds": {"data": 0.1}} ─► step [.., 7] loss [.., 2.5] phase_seconds.data [.., 0.1]

A row that has no such key has NaN there.
"""

import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.run.rows import RowReader

HUGE = 1e30  # no metric is so large; squares and sums of larger numbers overflow
MOST_COLUMNS = 512  # of which a machine with many devices has most: a number each


class Columns:
    """Numbers by key, each column as long as there are rows: 8 bytes a number."""

    def __init__(self) -> None:
        self._columns: dict[str, array] = {}
        self.rows = 0
        self.not_finite: dict[
            str, int
        ] = {}  # how many rows name a value that was infinite or no number

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
        values = np.full(self.rows, math.nan)
        if column is not None:
            values[: len(column)] = (
                np.frombuffer(column, np.float64) if len(column) else ()
            )
        return values

    def names(self, under: str = "") -> list[str]:
        """The columns, or those of the labels of one metric."""
        return [name for name in self._columns if name.startswith(under)]

    def known(self, name: str) -> np.ndarray:
        """Returns the finite values of one key in the order of the rows, float64."""
        values = self[name]
        return values[np.isfinite(values)]


def _float(value: float) -> float:
    # Also a whole number of hundreds of digits.
    return float(value) if -HUGE < value < HUGE else math.nan


def read(path: Path) -> tuple[Columns, int]:
    """Returns all rows of a file as columns, and how many lines were not rows."""
    reader = RowReader(path)
    columns = Columns()
    for row in reader.new():
        columns.add(row)
    return columns, reader.torn
