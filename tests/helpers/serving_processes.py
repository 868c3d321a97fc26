"""Servers as processes of their own."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def serving(
    words: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process of Python's that says its address in its first line and then, perhaps, that it is ready; it and its
    address.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    command = [sys.executable, *words]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        stderr=subprocess.PIPE,
        text=True,
    )
    # A server that does not start must not hang its test.
    patience = threading.Timer(100, process.kill)
    patience.start()
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stderr.read()
        yield process, found[0]
    finally:
        patience.cancel()
        process.kill()
        process.communicate()
