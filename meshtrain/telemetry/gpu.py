"""NVIDIA GPUs through NVML (extra `gpu`): memory, load, power, temperature, and why one runs slower than it could.

A board that does not know a value says so by an error, or by a number that cannot be: dcgm-exporter's own example has a memory
temperature of 9223372036854775794. Both are left out. NVML's load only says that some kernel ran, one that waits for others included.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        nvml, found = self._nvml, dict[str, Any]()

        def take(name: str, ask: Callable[[], float]) -> None:
            # Any board lacks something, and older drivers lack functions.
            with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
                value, (least, most) = ask(), POSSIBLE[name]
                if least <= value <= most:
                    found[name] = value

        take("device_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        take("device_memory_limit_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        take("device_load_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        take("device_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        take("device_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        take("device_memory_temperature_celsius", lambda: _field(nvml, handle, MEMORY_TEMPERATURE))
        with contextlib.suppress(nvml.NVMLError, AttributeError, TypeError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            found["device_throttled"] = {reason: int(bool(bits & bit)) for reason, bit in REASONS.items()}
        return found


def _field(nvml: Any, handle: Any, number: int) -> float:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return value.value.uiVal


def opened(devices: Sequence[int]) -> Gpus | None:
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
