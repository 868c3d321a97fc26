"""A save that fails is reported in one sentence by whoever asked for it; what Orbax and its threads print of it besides is left out."""

import logging
import sys
import warnings

before = sys.unraisablehook


def without_tracebacks() -> None:
    """From here on Orbax logs no tracebacks of its own, and neither its closed event loops nor what was to run on them is reported."""
    logging.getLogger("absl").addFilter(_is_worth_a_line)
    # The garbage collector meets them whenever it comes by.
    warnings.filterwarnings("ignore", r"coroutine 'OrbaxLayout\..*' was never awaited", RuntimeWarning)
    if sys.unraisablehook is not _report:
        global before
        before, sys.unraisablehook = sys.unraisablehook, _report


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _report(unraisable: "sys.UnraisableHookArgs") -> None:
    # TensorStore reports each write to the loop that Orbax closed when the first one failed.
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        before(unraisable)
