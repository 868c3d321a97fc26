"""What one process and its machine use, as a row of resources/RANK.jsonl every few seconds; see `catalogue` for each name.

    psutil: processor, memory, disk, network      /proc/pressure: who waits for what
    cgroup: what is allowed                       NVML and JAX: the devices of the process

A value that the system does not tell is left out. Rates are over the time since the sample before; the first has none.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from meshtrain.telemetry.cgroup import Cgroup
from meshtrain.telemetry.gpu import Gpus

Values = dict[str, Any]


class Resources:
    """Of one process, which is this one.

    `directory`: of the run. `limit`: bytes that the process is to stay below, in place of its cgroup's; 0: none. `phases`: its seconds
    by phase so far. `devices`: JAX's, with memory figures of their own. `proc` and `root` as in `Cgroup`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limit: int = 0,
        phases: Callable[[], Mapping[str, float]] = dict,
        devices: Sequence[Any] = (),
        gpus: Gpus | None = None,
        proc: Path = Path("/proc"),
        root: Path = Path("/"),
    ) -> None:
        self._directory, self._limit, self._phases = directory, limit, phases
        self._devices, self._gpus, self._proc = devices, gpus, proc
        self._process, self._cgroup = psutil.Process(), Cgroup(proc, root)
        self._cards = _cards(root)
        self._counts: dict[str, float] = {}
        self._spent: Mapping[str, float] = {}
        self._since = 0.0
        # The first counts, for rates; a process's first phases were before it was asked.
        self.sample()
        self._spent = {}

    def sample(self) -> Values:
        """A row's values now."""
        found: Values = {}
        for part in (
            self._processor_and_rates,
            self._memory,
            self._pressure,
            self._disk,
            self._of_devices,
            self._of_phases,
        ):
            # A machine without one of them, a container that may not look.
            with contextlib.suppress(OSError, psutil.Error, NotImplementedError, RuntimeError, ValueError, Warning):
                found |= part()
        return found

    def _processor_and_rates(self) -> Values:
        now = time.perf_counter()
        counts, before = self._counted(), self._counts
        seconds, self._since, self._counts = now - self._since, now, counts
        spent = {name: count - before[name] for name, count in counts.items() if name in before}
        found: Values = {}
        if "own" in spent:
            found["cpu_ratio"] = spent["own"] / seconds / self._cores()
        if spent.get("all", 0) > 0:
            found["machine_cpu_ratio"] = min(1.0, max(0.0, spent["busy"] / spent["all"]))
        # A counter that was set back tells no rate.
        found |= {name: spent[name] / seconds for name in RATES if spent.get(name, -1) >= 0}
        return found

    def _counted(self) -> dict[str, float]:
        counts = {"own": time.process_time()}
        times = psutil.cpu_times()._asdict()
        # guest time is part of user time, iowait is no work
        counts["all"] = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
        counts["busy"] = counts["all"] - times["idle"] - times.get("iowait", 0.0)
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            if disks := psutil.disk_io_counters():
                counts |= {
                    "disk_read_bytes_per_second": disks.read_bytes,
                    "disk_written_bytes_per_second": disks.write_bytes,
                }
        with contextlib.suppress(OSError, RuntimeError):
            cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name in self._cards]
            if cards:
                counts["network_sent_bytes_per_second"] = sum(card.bytes_sent for card in cards)
                counts["network_received_bytes_per_second"] = sum(card.bytes_recv for card in cards)
        return counts

    def _cores(self) -> float:
        """That the process may use."""
        # Systems other than Linux tie no process to cores.
        there = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1)
        return min(there, self._cgroup.cores() or there)

    def _memory(self) -> Values:
        rss, machine = self._process.memory_info().rss, psutil.virtual_memory()
        found = {"process_rss_bytes": rss, "memory_used_ratio": 1 - machine.available / machine.total}
        found["swap_used_bytes"] = psutil.swap_memory().used
        allowed = (self._limit, rss) if self._limit else self._cgroup.memory()
        if allowed:
            found["memory_limit_bytes"], found["memory_limit_used_ratio"] = allowed[0], allowed[1] / allowed[0]
        return found

    def _pressure(self) -> Values:
        """Share of the last ten seconds in which something waited (kernel: accounting/psi.rst, "some avg10")."""
        found = {}
        for kind in ("cpu", "memory", "io"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (self._proc / "pressure" / kind).read_text()
                found[f"pressure_{kind}_ratio"] = float(text.split("avg10=")[1].split()[0]) / 100
        return found

    def _disk(self) -> Values:
        disk = shutil.disk_usage(self._directory)
        # Blocks that are kept for root are nobody else's to fill.
        return {"disk_free_bytes": disk.free, "disk_used_ratio": disk.used / max(1, disk.used + disk.free)}

    def _of_devices(self) -> Values:
        found: Values = self._gpus.sample() if self._gpus else {}
        # A GPU's memory belongs to JAX's pool from the first moment: what arrays and programs take of it, only JAX tells.
        for device in self._devices:
            stats = device.memory_stats() or {}
            for name, key in (
                ("device_memory_used_bytes", "bytes_in_use"),
                ("device_memory_limit_bytes", "bytes_limit"),
            ):
                if key in stats:
                    found.setdefault(name, {})[str(device.local_hardware_id)] = stats[key]
        return found

    def _of_phases(self) -> Values:
        before, self._spent = self._spent, self._phases()
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in self._spent.items()}
        return {"phase_seconds": {name: seconds for name, seconds in spent.items() if seconds > 0}} if spent else {}


RATES = (
    "disk_read_bytes_per_second", "disk_written_bytes_per_second", "network_sent_bytes_per_second", "network_received_bytes_per_second",
)  # fmt: skip


def _cards(root: Path) -> set[str]:
    """Network interfaces that are hardware; all but the loopback where none is (a container): bridges would count bytes twice."""
    names = {path.name for path in root.glob("sys/class/net/*")}
    return {name for name in names if (root / "sys/class/net" / name / "device").exists()} or names - {"lo"}
