"""A save that fails is told in one sentence by whoever asked for it; what Orbax and its threads print of it besides is left out."""

import logging
import sys
from types import TracebackType


def without_tracebacks() -> None:
    """From here on Orbax logs no tracebacks of its own, and its closed event loops are not mourned."""
    logging.getLogger("absl").addFilter(_is_worth_telling)
    if sys.excepthook is not _tell:
        global _before
        _before, sys.excepthook = sys.excepthook, _tell


_before = sys.excepthook


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    # TensorStore reports each write to the loop that Orbax closed when the first one failed.
    if not (kind is RuntimeError and str(error) == "Event loop is closed"):
        _before(kind, error, traceback)
