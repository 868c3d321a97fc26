"""No process is left without the one that started it: the kernel ends it then, frozen or not (Linux: prctl(2),
PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns what a child does before its command (`preexec_fn`) to get a signal when its parent has ended, however
    that does.

    None where the kernel cannot. Processes that the child starts itself are not included.
    """
    if _libc is None:
        return None
    libc, parent = _libc, os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        # The parent ended before the kernel knew.
        if os.getppid() != parent:
            os._exit(1)

    return ask
