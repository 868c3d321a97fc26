"""What a row of metrics says of time, compiling, memory and utilisation, beside the losses."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax

# Seconds between two looks at the devices' memory: a device takes microseconds to tell, and steps may be short.
MEMORY_EVERY = 1.0
COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of jax.monitoring


class _Compiles:
    """Programs that this process has compiled, or found compiled, so far."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            self.count += 1
            self.seconds += duration_secs


@cache
def compiles() -> _Compiles:
    """Counted from the first call on."""
    return _Compiles()


class Measured:
    """For the step loop of one process.

    `phases`: seconds of the process by phase, see `survive.beat`. `devices`: its own ones. `tokens_at_peak`: see `plan.peak`.
    """

    def __init__(
        self, phases: Callable[[], Mapping[str, float]], devices: Sequence[jax.Device], tokens_at_peak: float | None
    ) -> None:
        self._phases, self._devices, self._peak = phases, devices, tokens_at_peak
        self._before = dict(phases())
        self._look = 0.0  # at the devices' memory, by time.monotonic
        self._compiled = compiles().count, compiles().seconds

    def step(self, tokens_per_second: float) -> dict[str, float]:
        """Of the step whose metrics have come, to be asked once a step."""
        before, self._before = self._before, dict(self._phases())
        spent = {name: self._before[name] - before.get(name, 0.0) for name in ("dispatch", "wait")}
        found = {"time": time.time(), "dispatch_seconds": spent["dispatch"], "wait_seconds": spent["wait"]}
        if self._peak is not None:
            found["mfu"] = tokens_per_second / self._peak
        return found

    def leave_out(self, phase: str, seconds: float) -> None:
        """They went by in a phase, and are no part of the step."""
        self._before[phase] = self._before.get(phase, 0.0) + seconds

    def row(self) -> dict[str, float]:
        """Since the row before, and as it is now."""
        count, seconds = self._compiled
        self._compiled = now = compiles().count, compiles().seconds
        found: dict[str, float] = {}
        if now[0] > count:
            found = {"compiles": now[0] - count, "compile_seconds": now[1] - seconds}
        return found | self._memory()

    def _memory(self) -> dict[str, float]:
        """Of the fullest device; left out where none tells it, and of rows that come soon after another."""
        if (now := time.monotonic()) < self._look:
            return {}
        self._look = now + MEMORY_EVERY
        # None on CPU devices; others may lack single figures.
        stats = [stats for device in self._devices if (stats := device.memory_stats())]
        names = (("memory_in_use_bytes", "bytes_in_use"), ("memory_peak_bytes", "peak_bytes_in_use"))
        return {name: max(known) for name, key in names if (known := [one[key] for one in stats if key in one])}
