"""What is printed when a save fails is our sentence alone."""

import logging
import subprocess
import sys
from types import SimpleNamespace

from meshtrain.checkpoint import quiet


def record(path: str, error: bool) -> logging.LogRecord:
    info = (OSError, OSError(28, "full"), None) if error else None
    return logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), info)


def test_orbax_logs_no_traceback_and_all_else_is_logged():
    logger = logging.getLogger("absl")
    assert not logger.filter(record("/x/orbax/checkpoint/futures.py", error=True))
    assert logger.filter(record("/x/orbax/checkpoint/futures.py", error=False))
    assert logger.filter(record("/x/mine.py", error=True))


def test_a_closed_event_loop_is_not_printed_and_every_other_error_is(monkeypatch):
    passed = []
    monkeypatch.setattr(quiet, "before", passed.append)
    for error in (
        RuntimeError("Event loop is closed"),
        RuntimeError("something else"),
        OSError("Event loop is closed"),
    ):
        quiet._report(SimpleNamespace(exc_type=type(error), exc_value=error))
    assert [str(u.exc_value) for u in passed] == ["something else", "Event loop is closed"]


def test_the_hook_is_there_as_soon_as_checkpoints_are_imported():
    command = "import sys, meshtrain.checkpoint.quiet as q; assert sys.unraisablehook is q._report"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0


def test_what_orbax_began_and_never_awaited_is_not_printed_and_of_all_else_it_is():
    command = """
import meshtrain.checkpoint
async def run(): pass
for name in ("OrbaxLayout.save_checkpointables.<locals>._run_background", "mine"):
    run.__qualname__ = name
    run()
"""
    printed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stderr
    assert "OrbaxLayout" not in printed and "coroutine 'mine' was never awaited" in printed
