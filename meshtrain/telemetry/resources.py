"""Samples what one process and its machine use, as a row of resources/RANK.jsonl every few seconds.

`catalogue` explains each name.

    psutil: processor, memory, disk, network      /proc/pressure: what waits for what
    cgroup: what is allowed                       NVML and JAX: the devices of the process

A value that the system does not know is left out. Rates are over the time since the sample before; the first has none.

psutil and /proc know the whole machine. A process that is over its cgroup's memory (version 1 or 2, of a container or a
Slurm job) is killed, however much the machine has left. Kernel documentation: admin-guide/cgroup-v2.rst (memory.max,
memory.current, cpu.max) and admin-guide/cgroup-v1/memory.rst. Used memory is counted without the inactive file cache,
which the kernel drops first, as the kubelet does.

NVIDIA's GPUs tell through NVML (extra `gpu`). A board that does not know a value says so by an error, or by a number
that cannot be: dcgm-exporter's own example has a memory temperature of 9223372036854775794. Both are left out. NVML's
load only says that some kernel ran, one that waits for others included.
"""

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

Values = dict[str, Any]

# Bits of nvmlClocksEventReasons (nvml.h). Left out: idle, clocks that somebody set, and clocks kept alike over several
# boards.
REASONS = {
    "power_cap": 0x4,
    "hardware": 0x8,
    "heat": 0x20,
    "hardware_heat": 0x40,
    "power_brake": 0x80,
}
MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
# bytes: version 1 of cgroups says "none" by the largest number of pages there is
NO_LIMIT = 2**60


def _memory_temperature(nvml: Any, gpu: Any) -> float:
    (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [MEMORY_TEMPERATURE])
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return value.value.uiVal


# By metric, what can be, in its unit, and how NVML is asked.
GPU_VALUES: dict[str, tuple[float, float, Callable[[Any, Any], float]]] = {
    "device_memory_used_bytes": (
        0,
        2**50,
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    "device_memory_limit_bytes": (
        1,
        2**50,
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    "device_load_ratio": (
        0,
        1,
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "device_power_watts": (
        0,
        1e5,
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    "device_temperature_celsius": (
        -60,
        250,
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
    "device_memory_temperature_celsius": (
        1,
        250,
        _memory_temperature,
    ),  # 0 is what boards say that have no sensor
}


class Gpus:
    """Samples the GPUs of one process.

    `sample` gives {metric: {device: value}}; a device is its number on the machine as CUDA counts for the process.
    """

    def __init__(
        self,
        devices: Sequence[int],
        nvml: Any,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._nvml = nvml
        visible = [
            entry.strip()
            for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if entry.strip()
        ]
        self._handles: dict[str, Any] = {}
        for device in devices:
            with contextlib.suppress(nvml.NVMLError, IndexError, ValueError):
                # A number, or GPU-... and MIG-... of an identity.
                entry = visible[device] if visible else str(device)
                by_number = entry.isdecimal()
                self._handles[str(device)] = (
                    nvml.nvmlDeviceGetHandleByIndex(int(entry))
                    if by_number
                    else nvml.nvmlDeviceGetHandleByUUID(entry)
                )

    def sample(self) -> dict[str, dict[str, Any]]:
        nvml = self._nvml
        values = dict[str, dict[str, Any]]()
        for device, gpu in self._handles.items():
            # Any board lacks something, and older drivers lack functions.
            for name, (least, most, ask) in GPU_VALUES.items():
                with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
                    if least <= (value := ask(nvml, gpu)) <= most:
                        values.setdefault(name, {})[device] = value
            with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
                bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
                reasons = {
                    reason: int(bool(bits & bit)) for reason, bit in REASONS.items()
                }
                values.setdefault("device_throttled", {})[device] = reasons
        return values


def open_gpus(devices: Sequence[int]) -> Gpus | None:
    """Returns the GPUs that JAX numbers so; None without any, without nvidia-ml-py, or without a driver."""
    if not devices:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    # NVMLError_LibraryNotFound and others, of a module that may not be there to name them.
    except Exception:
        return None
    return Gpus(devices, nvml)


class Resources:
    """Samples what this process and its machine use.

    `directory`: the run's. `limit`: bytes that the process is to stay below, in place of its cgroup's; 0: none.
    `phases`: its seconds by phase so far. `devices`: JAX's, with memory figures of their own. `proc` and `root` as in
    `Cgroup`.
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
        self._directory = directory
        self._limit = limit
        self._phases = phases
        self._devices = devices
        self._gpus = gpus
        self._proc = proc
        self._process = psutil.Process()
        self._cgroup = Cgroup(proc, root)
        self._cards = _cards(root)
        self._counts: dict[str, float] = {}
        self._spent: Mapping[str, float] = {}
        self._since = 0.0
        # The first counts, for rates; a process's first phases were before it was asked.
        self.sample()
        self._spent = {}

    def sample(self) -> Values:
        """Returns a row's values now."""
        values: Values = {}
        parts = (
            self._rates,
            self._memory,
            self._pressure,
            self._disk,
            self._sample_devices,
            self._sample_phases,
        )
        for part in parts:
            # A machine without one of them, a container that may not look.
            with contextlib.suppress(
                OSError,
                psutil.Error,
                NotImplementedError,
                RuntimeError,
                ValueError,
                Warning,
            ):
                values |= part()
        return values

    def _rates(self) -> Values:
        now = time.perf_counter()
        counts = self._counted()
        before = self._counts
        self._counts = counts
        seconds = now - self._since
        self._since = now
        spent = {
            name: count - before[name]
            for name, count in counts.items()
            if name in before
        }
        values: Values = {}
        if "own" in spent:
            values["cpu_ratio"] = spent["own"] / seconds / self._cores()
        if spent.get("all", 0) > 0:
            values["machine_cpu_ratio"] = min(
                1.0, max(0.0, spent["busy"] / spent["all"])
            )
        # A counter that was set back tells no rate.
        rates = {
            name: count / seconds
            for name, count in spent.items()
            if name.endswith("_per_second") and count >= 0
        }
        return values | rates

    def _counted(self) -> dict[str, float]:
        times = psutil.cpu_times()._asdict()
        # guest time is part of user time, iowait is no work
        every = sum(
            seconds for name, seconds in times.items() if not name.startswith("guest")
        )
        counts = {
            "own": time.process_time(),
            "all": every,
            "busy": every - times["idle"] - times.get("iowait", 0.0),
        }
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            if disks := psutil.disk_io_counters():
                counts["disk_read_bytes_per_second"] = disks.read_bytes
                counts["disk_written_bytes_per_second"] = disks.write_bytes
        with contextlib.suppress(OSError, RuntimeError):
            cards = [
                card
                for name, card in psutil.net_io_counters(pernic=True).items()
                if name in self._cards
            ]
            if cards:
                counts["network_sent_bytes_per_second"] = sum(
                    card.bytes_sent for card in cards
                )
                counts["network_received_bytes_per_second"] = sum(
                    card.bytes_recv for card in cards
                )
        return counts

    def _cores(self) -> float:
        # Systems other than Linux tie no process to cores.
        there = float(
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else psutil.cpu_count() or 1
        )
        return min(there, self._cgroup.cores() or there)

    def _memory(self) -> Values:
        rss = self._process.memory_info().rss
        machine = psutil.virtual_memory()
        values = {
            "process_rss_bytes": rss,
            "memory_used_ratio": 1 - machine.available / machine.total,
        }
        values["swap_used_bytes"] = psutil.swap_memory().used
        if allowed := (self._limit, rss) if self._limit else self._cgroup.memory():
            values["memory_limit_bytes"] = allowed[0]
            values["memory_limit_used_ratio"] = allowed[1] / allowed[0]
        return values

    def _pressure(self) -> Values:
        """Share of the last ten seconds in which something waited (kernel: accounting/psi.rst, "some avg10")."""
        shares = {}
        for kind in ("cpu", "memory", "io"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (self._proc / "pressure" / kind).read_text()
                shares[f"pressure_{kind}_ratio"] = (
                    float(text.split("avg10=")[1].split()[0]) / 100
                )
        return shares

    def _disk(self) -> Values:
        disk = shutil.disk_usage(self._directory)
        # Blocks that are kept for root are nobody else's to fill.
        return {
            "disk_free_bytes": disk.free,
            "disk_used_ratio": disk.used / max(1, disk.used + disk.free),
        }

    def _sample_devices(self) -> Values:
        values: Values = self._gpus.sample() if self._gpus else {}
        # A GPU's memory belongs to JAX's pool from the first moment: what arrays and programs take of it, only JAX
        # tells.
        for device in self._devices:
            stats = device.memory_stats() or {}
            for name, key in (("used", "bytes_in_use"), ("limit", "bytes_limit")):
                if key in stats:
                    values.setdefault(f"device_memory_{name}_bytes", {})[
                        str(device.local_hardware_id)
                    ] = stats[key]
        return values

    def _sample_phases(self) -> Values:
        before = self._spent
        self._spent = self._phases()
        spent = {
            name: seconds - before.get(name, 0.0)
            for name, seconds in self._spent.items()
        }
        if spent:
            return {
                "phase_seconds": {
                    name: seconds for name, seconds in spent.items() if seconds > 0
                }
            }
        return {}


def _cards(root: Path) -> set[str]:
    """Network interfaces that are hardware; all but the loopback where none is (a container): bridges would count bytes
    twice.
    """
    names = {path.name for path in root.glob("sys/class/net/*")}
    return {
        name for name in names if (root / "sys/class/net" / name / "device").exists()
    } or names - {"lo"}


class Cgroup:
    """Reads the memory and CPU limits of this process.

    `proc` and `root` stand before the paths that the kernel names.
    """

    # The limit, what is used, and the file cache in memory.stat.
    V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    V2 = ("memory.max", "memory.current", "inactive_file")

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/")) -> None:
        self._memory: list[tuple[Path, tuple[str, str, str]]] = []
        self._cpu: list[Path] = []
        with contextlib.suppress(OSError, ValueError):
            for line in (proc / "self/cgroup").read_text().splitlines():
                # Version 2 has one hierarchy, whose controllers are named nowhere.
                _, names, path = line.split(":", 2)
                mount = root / "sys/fs/cgroup" / names
                # The group and those above it; in a container the path may be the host's, of which only the mount is
                # there.
                directory = mount / path.lstrip("/")
                groups = [
                    d
                    for d in (directory, *directory.parents)
                    if d.is_relative_to(mount)
                ]
                controllers = {*names.split(",")}
                if {"", "memory"} & controllers:
                    self._memory += [
                        (group, self.V1 if names else self.V2) for group in groups
                    ]
                if {"", "cpu"} & controllers:
                    self._cpu += groups

    def memory(self) -> tuple[int, int] | None:
        """Returns (limit, used) in bytes, of the group above the process that is nearest to its limit; None without a
        limit.
        """
        known = []
        for group, (limit_file, used_file, inactive) in self._memory:
            # No such file at the root of a hierarchy, and "max" for no limit.
            with contextlib.suppress(OSError, ValueError):
                limit = int((group / limit_file).read_text())
                used = int((group / used_file).read_text())
                if 0 < limit < NO_LIMIT:
                    stat = dict(
                        line.split()
                        for line in (group / "memory.stat").read_text().splitlines()
                    )
                    known.append((limit, max(0, used - int(stat.get(inactive, 0)))))
        return max(known, key=lambda pair: pair[1] / pair[0], default=None)

    def cores(self) -> float | None:
        """Returns how many cores' time the groups give the process; None without a limit."""
        known = []
        for group in self._cpu:
            with contextlib.suppress(OSError, ValueError):
                if (group / "cpu.max").exists():
                    quota, period = (group / "cpu.max").read_text().split()
                else:
                    quota, period = (
                        (group / f"cpu.cfs_{name}_us").read_text()
                        for name in ("quota", "period")
                    )
                if int(quota) > 0:
                    known.append(int(quota) / int(period))
        return min(known, default=None)
