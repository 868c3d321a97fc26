"""Disks of a test's own: mounts that only one process sees, and that end with it."""

import ctypes
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

NEW_NAMESPACE, NEW_USER, READ_ONLY, BIND, REMOUNT = (
    0x20000,
    0x10000000,
    1,
    4096,
    32,
)  # sched.h, mount.h


def mount(what: str, path: Path, flags: int = 0, options: str = "") -> None:
    """A mount that only this process sees, and that ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(what.encode(), str(path).encode(), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")


def own_mounts() -> None:
    """Moves this process into a mount namespace of its own; needs no privilege where user namespaces are allowed."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACE | (NEW_USER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/setgroups").write_text(
            "deny"
        )  # or the group may not be mapped, and nothing written
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def exit_code_of(do: Callable[[], None]) -> int:
    """Of a process forked to do something; minus the signal that killed it."""
    process = multiprocessing.get_context("fork").Process(target=do)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def may_mount() -> bool:
    return exit_code_of(own_mounts) == 0
