"""Measures time, compiling, memory and utilisation for the rows of metrics, beside the losses."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import jax

from meshtrain.mesh import platform

if TYPE_CHECKING:
    from meshtrain.step import Program

# Seconds between two looks at the devices' memory: a device takes microseconds to tell, and steps may be short.
MEMORY_EVERY = 1.0
COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of jax.monitoring


class _Compiles:
    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            self.count += 1
            self.seconds += duration_secs


@cache
def compiles() -> _Compiles:
    """Returns a count that begins with the first call."""
    return _Compiles()


class Measured:
    """Measures the steps of one process.

    `phases`: seconds of the process by phase, see `survive.heartbeat`. `devices`: its own ones. `tokens_at_peak`:
    tokens a second at the devices' peak rate, None where it is not known. `constant`: what every row says alike.
    """

    def __init__(
        self,
        phases: Callable[[], Mapping[str, float]],
        devices: Sequence[jax.Device],
        tokens_at_peak: float | None = None,
        constant: Mapping[str, float] | None = None,
    ) -> None:
        self._phases = phases
        self._devices = devices
        self._peak = tokens_at_peak
        self._constant = dict(constant or {})
        self._before = dict(phases())
        self._clock = time.perf_counter()
        self._waited = 0.0
        self._memory_due = 0.0  # by time.monotonic
        self._compiled = compiles().count, compiles().seconds

    def restart(self) -> None:
        """Counts the next step from now."""
        self._clock = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leaves out what went by beside the step, such as an evaluation."""
        self._clock += seconds

    def step(self, tokens: int, waited: float) -> dict[str, float]:
        """Returns values of the step whose metrics have come, to be asked once a step.

        `waited`: seconds for data so far.
        """
        now = time.perf_counter()
        seconds = now - self._clock
        self._clock = now
        before = self._before
        self._before = dict(self._phases())
        # What was taken for waiting may turn out to be a pause.
        dispatch, wait = (
            max(0.0, self._before[name] - before.get(name, 0.0))
            for name in ("dispatch", "wait")
        )
        values = {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            **self._constant,
        }
        values |= {"step_seconds": seconds, "data_wait_seconds": waited - self._waited}
        values |= {
            "time": time.time(),
            "dispatch_seconds": dispatch,
            "wait_seconds": wait,
        }
        self._waited = waited
        if self._peak is not None:
            values["mfu"] = tokens / seconds / self._peak
        return values

    def row(self) -> dict[str, float]:
        """Returns values since the row before, and as they are now."""
        count, seconds = self._compiled
        self._compiled = now = compiles().count, compiles().seconds
        values: dict[str, float] = {}
        if now[0] > count:
            values = {"compiles": now[0] - count, "compile_seconds": now[1] - seconds}
        return values | self._memory()

    def _memory(self) -> dict[str, float]:
        """Returns the memory of the fullest device; nothing if none tells it, or soon after the last row with it."""
        if (now := time.monotonic()) < self._memory_due:
            return {}
        self._memory_due = now + MEMORY_EVERY
        # None on CPU devices; others may lack single figures.
        stats = [stats for device in self._devices if (stats := device.memory_stats())]
        names = (
            ("memory_in_use_bytes", "bytes_in_use"),
            ("memory_peak_bytes", "peak_bytes_in_use"),
        )
        return {
            name: max(known)
            for name, key in names
            if (known := [each[key] for each in stats if key in each])
        }


def measured(program: "Program", phases: Callable[[], Mapping[str, float]]) -> Measured:
    """Measures the steps of a program on this process's devices."""
    config = program.config
    devices = program.mesh.devices
    on_cpu = platform(program.mesh) == "cpu"
    peak = None
    sent = {}
    compresses = config.parallel.reduce.compression != "none"
    if compresses or not on_cpu:
        from meshtrain.plan import gradient_traffic, pipeline, shapes

        if not on_cpu:
            peak = shapes.tokens_at_peak(
                config, devices.flat[0].device_kind, devices.size
            )
        if compresses:
            iterations = pipeline.iterations(config, skips=program.local.forward.skips)
            sent = gradient_traffic.row(config, iterations)
    return Measured(phases, program.mesh.local_devices, peak, sent)
