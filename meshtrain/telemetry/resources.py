"""What one process and its machine use, as a row of resources/RANK.jsonl every few seconds; see `catalogue` for each name.

    psutil: processor, memory, disk, network      /proc/pressure: what waits for what
    cgroup: what is allowed                       NVML and JAX: the devices of the process

A value that the system does not know is left out. Rates are over the time since the sample before; the first has none.

psutil and /proc know the whole machine. A process that is over its cgroup's memory (version 1 or 2, of a container or a Slurm job) is killed,
however much the machine has left. Kernel documentation: admin-guide/cgroup-v2.rst (memory.max, memory.current, cpu.max) and
admin-guide/cgroup-v1/memory.rst. Used memory is counted without the inactive file cache, which the
kernel drops first, as the kubelet counts it.

NVIDIA's GPUs tell through NVML (extra `gpu`). A board that does not know a value says so by an error, or by a number that cannot be:
dcgm-exporter's own example has a memory temperature of 9223372036854775794. Both are left out. NVML's load only says that some kernel ran,
one that waits for others included.
"""

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Bits of nvmlClocksEventReasons (nvml.h). Left out: idle, clocks that somebody set, and clocks kept alike over several boards.
REASONS = {"power_cap": 0x4, "hardware": 0x8, "heat": 0x20, "hardware_heat": 0x40, "power_brake": 0x80}

# What can be, in the unit of the metric.
POSSIBLE = {
    "device_memory_used_bytes": (0, 2**50),
    "device_memory_limit_bytes": (1, 2**50),
    "device_load_ratio": (0, 1),
    "device_power_watts": (0, 1e5),
    "device_temperature_celsius": (-60, 250),
    "device_memory_temperature_celsius": (1, 250),  # 0 is what boards say that have no sensor
}
MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP


class Gpus:
    """Of one process. `sample` gives {metric: {device: value}}; a device is its number on the machine as CUDA counts for the process."""

    def __init__(self, devices: Sequence[int], nvml: Any, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml = nvml
        visible = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        self._handles: dict[str, Any] = {}
        for device in devices:
            with contextlib.suppress(nvml.NVMLError, IndexError, ValueError):
                self._handles[str(device)] = self._handle(visible[device] if visible else str(device))

    def _handle(self, entry: str) -> Any:
        """Of an entry of CUDA_VISIBLE_DEVICES: a number, or GPU-... and MIG-... of an identity."""
        if entry.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(entry))
        return self._nvml.nvmlDeviceGetHandleByUUID(entry)

    def sample(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for device, handle in self._handles.items():
            for name, value in self._values(handle).items():
                found.setdefault(name, {})[device] = value
        return found

    def _values(self, handle: Any) -> dict[str, Any]:
        nvml, values = self._nvml, dict[str, Any]()

        def take(name: str, ask: Callable[[], float]) -> None:
            # Any board lacks something, and older drivers lack functions.
            with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
                value, (least, most) = ask(), POSSIBLE[name]
                if least <= value <= most:
                    values[name] = value

        take("device_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        take("device_memory_limit_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        take("device_load_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        take("device_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        take("device_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        take("device_memory_temperature_celsius", lambda: _field(nvml, handle, MEMORY_TEMPERATURE))
        with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            values["device_throttled"] = {reason: int(bool(bits & bit)) for reason, bit in REASONS.items()}
        return values


def _field(nvml: Any, handle: Any, number: int) -> float:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return value.value.uiVal


def open_gpus(devices: Sequence[int]) -> Gpus | None:
    """The GPUs that JAX numbers so; None without any, without nvidia-ml-py, or without a driver."""
    if not devices:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    # NVMLError_LibraryNotFound and others, of a module that may not be there to name them.
    except Exception:
        return None
    return Gpus(devices, nvml)


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
        values: Values = {}
        if "own" in spent:
            values["cpu_ratio"] = spent["own"] / seconds / self._cores()
        if spent.get("all", 0) > 0:
            values["machine_cpu_ratio"] = min(1.0, max(0.0, spent["busy"] / spent["all"]))
        # A counter that was set back tells no rate.
        values |= {name: spent[name] / seconds for name in RATES if spent.get(name, -1) >= 0}
        return values

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
        # Systems other than Linux tie no process to cores.
        there = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1)
        return min(there, self._cgroup.cores() or there)

    def _memory(self) -> Values:
        rss, machine = self._process.memory_info().rss, psutil.virtual_memory()
        values = {"process_rss_bytes": rss, "memory_used_ratio": 1 - machine.available / machine.total}
        values["swap_used_bytes"] = psutil.swap_memory().used
        allowed = (self._limit, rss) if self._limit else self._cgroup.memory()
        if allowed:
            values["memory_limit_bytes"], values["memory_limit_used_ratio"] = allowed[0], allowed[1] / allowed[0]
        return values

    def _pressure(self) -> Values:
        """Share of the last ten seconds in which something waited (kernel: accounting/psi.rst, "some avg10")."""
        shares = {}
        for kind in ("cpu", "memory", "io"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (self._proc / "pressure" / kind).read_text()
                shares[f"pressure_{kind}_ratio"] = float(text.split("avg10=")[1].split()[0]) / 100
        return shares

    def _disk(self) -> Values:
        disk = shutil.disk_usage(self._directory)
        # Blocks that are kept for root are nobody else's to fill.
        return {"disk_free_bytes": disk.free, "disk_used_ratio": disk.used / max(1, disk.used + disk.free)}

    def _of_devices(self) -> Values:
        values: Values = self._gpus.sample() if self._gpus else {}
        # A GPU's memory belongs to JAX's pool from the first moment: what arrays and programs take of it, only JAX tells.
        for device in self._devices:
            stats = device.memory_stats() or {}
            for name, key in (
                ("device_memory_used_bytes", "bytes_in_use"),
                ("device_memory_limit_bytes", "bytes_limit"),
            ):
                if key in stats:
                    values.setdefault(name, {})[str(device.local_hardware_id)] = stats[key]
        return values

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
            for line in (proc / "self/cgroup").read_text().splitlines():
                # Version 2 has one hierarchy, whose controllers are named nowhere.
                _, names, path = line.split(":", 2)
                mount = root / "sys/fs/cgroup" / names
                # The group and those above it; in a container the path may be the host's, of which only the mount is there.
                directory = mount / path.lstrip("/")
                own = [d for d in (directory, *directory.parents) if d.is_relative_to(mount)]
                controllers = names.split(",")
                if {"", "memory"} & {*controllers}:
                    self._memory += [(d, _V1 if names else _V2) for d in own]
                if {"", "cpu"} & {*controllers}:
                    self._cpu += own

    def memory(self) -> tuple[int, int] | None:
        """(limit, used) in bytes, of the group above the process that is nearest to its limit; None without a limit."""
        known = [found for directory, names in self._memory if (found := _memory(directory, names)) is not None]
        return max(known, key=lambda found: found[1] / found[0], default=None)

    def cores(self) -> float | None:
        """How many cores' time the groups give the process; None without a limit."""
        return min((found for directory in self._cpu if (found := _cores(directory)) is not None), default=None)


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
