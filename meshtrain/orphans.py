"""No process is left without the one that started it: the kernel ends it then, frozen or not (Linux: prctl(2),
PR_SET_PDEATHSIG), or hands it to another one (PR_SET_CHILD_SUBREAPER).
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


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns what a child does before its command (`preexec_fn`) to get a signal when its parent has ended, however
    that does.

    None where the kernel cannot. Processes that the child starts itself are not included.
    """
    if _libc is None:
        return None
    parent = os.getpid()
    return lambda: die_with(parent, number)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when its parent has ended, or the thread of the parent that started it."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    # The parent ended before the kernel knew.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes what is left by this process's children, and by theirs, its own children where the kernel can."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
