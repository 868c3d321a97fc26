"""Keeping the peak of host memory near what is really held."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_MMAP_THRESHOLD, SMALL, ADAPTED = -3, 1 << 20, 32 << 20  # ADAPTED: where glibc's own adapting ends up


@contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """While entered, large blocks that are freed go back to the system at once.

    glibc learns to keep freed blocks of up to 32 MB for itself, in an arena a thread; what is read and rearranged in many parts
    then peaks at up to twice its size (experiments/bench_checkpoint.py). No effect with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, SMALL)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, ADAPTED)
