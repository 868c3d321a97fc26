"""What the cgroups of a process allow it: memory and cores, by version 1 or 2, of a container or a Slurm job.

psutil and /proc tell of the whole machine. A process that is over its cgroup's memory is killed, however much the machine has left.

Kernel documentation: admin-guide/cgroup-v2.rst (memory.max, memory.current, cpu.max) and admin-guide/cgroup-v1/memory.rst; proc(5) for
/proc/self/mountinfo. What is used is counted without the inactive file cache, which the kernel drops first, as the kubelet counts it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 2**60  # bytes: version 1 says "none" by the largest number of pages there is


@dataclass(frozen=True)
class _Names:
    """Files of one version."""

    limit: str
    used: str
    inactive: str  # in memory.stat


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


class Cgroup:
    """Of this process. `proc` and `root` stand before the paths that the kernel names."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/")) -> None:
        self._memory: list[tuple[Path, _Names]] = []
        self._cpu: list[Path] = []
        with contextlib.suppress(OSError, ValueError):
            own = dict(_groups((proc / "self/cgroup").read_text()))
            for mount, controllers, inner in _mounts((proc / "self/mountinfo").read_text()):
                # Version 2 has one hierarchy, whose controllers are named nowhere.
                for controller in controllers or {""}:
                    if controller not in own:
                        continue
                    found = list(_upwards(root / mount.relative_to("/"), inner, own[controller]))
                    if controller in ("", "memory"):
                        self._memory += [(directory, _V1 if controller else _V2) for directory in found]
                    if controller in ("", "cpu"):
                        self._cpu += found

    def memory(self) -> tuple[int, int] | None:
        """(limit, used) in bytes, of the group above the process that is nearest to its limit; None without a limit."""
        known = [found for directory, names in self._memory if (found := _memory(directory, names)) is not None]
        return max(known, key=lambda found: found[1] / found[0], default=None)

    def cores(self) -> float | None:
        """How many cores' time the groups give the process; None without a limit."""
        return min((found for directory in self._cpu if (found := _cores(directory)) is not None), default=None)


def _groups(text: str) -> Iterator[tuple[str, str]]:
    """(controller, path) of /proc/self/cgroup; the controller of version 2 is empty."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(text: str) -> Iterator[tuple[Path, set[str], str]]:
    """(where, controllers, the group that is mounted there) of /proc/self/mountinfo."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        inner, where = before.split(" ")[3:5]
        if kind in ("cgroup", "cgroup2"):
            yield Path(where), set(options.split(",")) - {"rw", "ro"} if kind == "cgroup" else set(), inner


def _upwards(mount: Path, inner: str, path: str) -> Iterator[Path]:
    """The directories of a group and of those above it, as far as they are to be seen."""
    own = Path(path)
    # In a container the path may be the host's, of which only the container's part is mounted.
    below = own.relative_to(inner) if own.is_relative_to(inner) else Path()
    directory = mount / str(below).lstrip("/")
    yield directory
    while directory != mount:
        directory = directory.parent
        yield directory


def _memory(directory: Path, names: _Names) -> tuple[int, int] | None:
    # No such file at the root of a hierarchy, and "max" for no limit.
    with contextlib.suppress(OSError, ValueError):
        limit, used = int((directory / names.limit).read_text()), int((directory / names.used).read_text())
        if 0 < limit < NO_LIMIT:
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            return limit, max(0, used - int(stat.get(names.inactive, 0)))
    return None


def _cores(directory: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return int(quota) / int(period)
    return None
