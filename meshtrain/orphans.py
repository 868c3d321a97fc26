"""No process is left without the one that started it: the kernel ends it then, frozen or not (Linux: prctl(2),
PR_SET_PDEATHSIG), or hands it to one that does (PR_SET_CHILD_SUBREAPER).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Looked up here: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(
    number: int = signal.SIGKILL, parent: int | None = None
) -> Callable[[], None] | None:
    """Returns what a child does before its command (`preexec_fn`) to get a signal when its parent has ended, however
    that does; `parent`: its process id, for a child that asks by itself.

    None where the kernel cannot. Processes that the child starts itself are not included.
    """
    if _libc is None:
        return None
    libc = _libc
    started_by = parent or os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        # The parent ended before the kernel knew.
        if os.getppid() != started_by:
            os._exit(1)

    return ask


def adopt_orphans() -> None:
    """Makes the processes that this one's children leave behind its own children, where the kernel can."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
