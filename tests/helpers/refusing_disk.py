"""A disk that refuses some calls on some files, as the system would: for this process, and what it does through
Python.
"""

import io
import math
import os
from contextlib import contextmanager

import pytest


class RefusingDisk:
    """Refuses `call` (open, read, stat, list) on paths that end with `name`, `times` times, with the error `number`."""

    def __init__(self, call, name, number, times=math.inf):
        self.call, self.name, self.number, self.left, self.refused = (
            call,
            name,
            number,
            times,
            0,
        )

    def ask(self, call, path):
        if (
            isinstance(path, int)
            or call != self.call
            or not os.fspath(path).endswith(self.name)
            or self.left <= 0
        ):
            return
        self.left -= 1
        self.refused += 1
        raise OSError(self.number, os.strerror(self.number), os.fspath(path))


class _File:
    """An open file that asks the disk before each read."""

    def __init__(self, file, disk, path):
        self._file, self._disk, self._path = file, disk, path

    def __getattr__(self, name):
        if name in ("read", "readinto", "readline", "readlines", "readall"):
            self._disk.ask("read", self._path)
        return getattr(self._file, name)

    def __iter__(self):
        self._disk.ask("read", self._path)
        return iter(self._file)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@contextmanager
def refusing(call, name, number, times=math.inf, pauses=(0.0,) * 3):
    """The disk refuses while entered; the pauses between two tries are as given."""
    disk = RefusingDisk(call, str(name), number, times)
    real_open, real_stat, real_lstat, real_list, real_scan = (
        io.open,
        os.stat,
        os.lstat,
        os.listdir,
        os.scandir,
    )

    def opened(path, mode="r", *arguments, **named):
        disk.ask("open", path)
        file = real_open(path, mode, *arguments, **named)
        return (
            _File(file, disk, path)
            if disk.call == "read" and "r" in mode and not isinstance(path, int)
            else file
        )

    def asking(call, real):
        def function(path=".", *arguments, **named):
            disk.ask(call, path)
            return real(path, *arguments, **named)

        return function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("io.open", opened)
        patch.setattr("builtins.open", opened)
        patch.setattr("os.stat", asking("stat", real_stat))
        patch.setattr("os.lstat", asking("stat", real_lstat))
        patch.setattr("os.listdir", asking("list", real_list))
        patch.setattr("os.scandir", asking("list", real_scan))
        patch.setattr("meshtrain.files.PAUSES", pauses)
        yield disk
