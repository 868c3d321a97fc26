"""What is printed when a save fails is our sentence alone."""

import logging
import sys

import meshtrain.checkpoint  # noqa: F401


def record(path: str, error: bool) -> logging.LogRecord:
    info = (OSError, OSError(28, "full"), None) if error else None
    return logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), info)


def test_orbax_logs_no_traceback_and_all_else_is_logged():
    logger = logging.getLogger("absl")
    assert not logger.filter(record("/x/orbax/checkpoint/futures.py", error=True))
    assert logger.filter(record("/x/orbax/checkpoint/futures.py", error=False))
    assert logger.filter(record("/x/mine.py", error=True))


def test_a_closed_event_loop_is_not_told_and_every_other_error_is(capsys):
    sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
    assert not capsys.readouterr().err
    sys.excepthook(RuntimeError, RuntimeError("something else"), None)
    assert "something else" in capsys.readouterr().err
