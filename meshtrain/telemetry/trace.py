"""Traces a few steps of a run with JAX's profiler, where `telemetry.trace_at` asks for it; `report.trace` reads what is
left here.

    step            8    9   [10   11   12]   13                trace_at: [10], trace_steps: 3
                              start ... stop ─► traces/10/      trace.xplane.pb, module.hlo.txt, trace.json

The events of a trace name instructions and nothing else, so the program's text lies beside them. With several processes
the first one
traces its own devices: in SPMD all devices do the same, and what waits for the others shows there. Writing takes
seconds, in which the others wait at the next collective; they count as no step's time.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshtrain.config import Config
from meshtrain.errors import refusal, say
from meshtrain.mesh import platform
from meshtrain.run.directory import TRACES
from meshtrain.run.hooks import RunHook
from meshtrain.schedule.phases import idle_fractions
from meshtrain.schedule.table import Table

EVENTS = "trace.xplane.pb"
MODULE = "module.hlo.txt"
FACTS = "trace.json"
STEP = (
    # Name of the annotation around each traced step, as TensorBoard's profiler expects it
    "train"
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """The content of trace.json."""

    steps: list[int]  # traced
    module: str  # name of the compiled program
    platform: str  # cpu, gpu, tpu
    mesh: dict[str, int]  # axes and their sizes, in the mesh's order
    # ids of all devices by partition: HLO counts them by their place in the mesh
    devices: list[int]
    local: list[int]  # those of the process that traced
    processes: int
    # by slot, the share of its executions that the schedule's table leaves idle
    masked: dict[str, float]


class Tracer(RunHook):
    """Traces the steps that the config names.

    A failure is reported and ends the tracing, never the training.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        mesh: Mesh,
        table: Table | None,
        phase: Callable[[str], None] = lambda _: None,
        leave_out: Callable[[float], None] = lambda _: None,
    ) -> None:
        # `phase` hears what is waited for, `leave_out` the seconds that are no part of a step.
        self.phase = phase
        self.leave_out = leave_out
        self.config = config
        self.mesh = mesh
        self.table = table
        self.directory = directory / TRACES
        self.begins = (
            set(config.telemetry.trace_at) if jax.process_index() == 0 else set()
        )
        self.steps: list[int] = []  # of the trace that is being taken
        self._first: int | None = None
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def before_batch(self, step: int) -> None:
        if self._first is None:
            self._first = step
            # The first step of a process compiles, so the next one is traced in its place.
            self.begins = {max(at, step + 1) for at in self.begins if at >= step}
        if self.steps or (step in self.begins and self._begin()):
            self.steps.append(step)
            self._annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
            self._annotation.__enter__()

    def after_step(
        self, step: int, compiled: jax.stages.Compiled, metrics: Any
    ) -> None:
        """Waits for the devices where a trace begins and ends, so that it has whole steps and nothing of others."""
        last = len(self.steps) == self.config.telemetry.trace_steps
        if (
            last
            or step + 1 in self.begins
            or (self.steps and platform(self.mesh) == "cpu")
        ):
            self.phase("wait")
            jax.block_until_ready(metrics)
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if last:
            self.phase("trace")
            began = time.perf_counter()
            self._end(compiled)
            self.leave_out(time.perf_counter() - began)

    def close(self) -> None:
        """A trace that the run's end cut short is thrown away."""
        if self.steps:
            self._stop()
            shutil.rmtree(self._aside, ignore_errors=True)

    @property
    def _aside(self) -> Path:
        return self.directory / ".being-written"

    def _begin(self) -> bool:
        options = jax.profiler.ProfileOptions()
        # Every call of a Python function would be an event.
        options.python_tracer_level = 0
        try:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)
            jax.profiler.start_trace(self._aside, profiler_options=options)
        except (OSError, RuntimeError) as error:
            self._give_up("cannot begin", error)
            return False
        return True

    def _stop(self) -> bool:
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._give_up("is lost", error)
            return False
        finally:
            self.steps = []
        return True

    def _end(self, program: jax.stages.Compiled) -> None:
        steps = self.steps
        if not self._stop():
            return
        try:
            text = program.as_text()
            if text is None:
                raise RuntimeError("this backend keeps no HLO")
            (events,) = self._aside.glob("plugins/profile/*/*.xplane.pb")
            events.rename(self._aside / EVENTS)
            # For Perfetto, which reads xplane.pb too by way of TensorBoard: a third of the bytes again.
            shutil.rmtree(self._aside / "plugins")
            (self._aside / MODULE).write_text(text)
            (self._aside / FACTS).write_text(
                json.dumps(dataclasses.asdict(self._facts(steps, text)), indent=1)
                + "\n"
            )
            place = self.directory / str(steps[0])
            shutil.rmtree(place, ignore_errors=True)
            self._aside.rename(place)
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up("is lost", error)

    def _facts(self, steps: list[int], text: str) -> Facts:
        devices = list(self.mesh.devices.flat)
        return Facts(
            steps=steps,
            module=text.split(",", 1)[0].removeprefix("HloModule "),
            platform=platform(self.mesh),
            mesh=dict(self.mesh.shape),
            devices=[device.id for device in devices],
            local=[
                device.id
                for device in devices
                if device.process_index == jax.process_index()
            ],
            processes=jax.process_count(),
            masked=idle_fractions(self.table)
            if self.table and platform(self.mesh) != "cpu"
            else {},
        )

    def _give_up(self, what: str, error: Exception) -> None:
        why = (
            refusal(error)
            if isinstance(error, OSError)
            else str(error).partition("\n")[0]
        )
        say(
            f"the trace in {self.directory} {what}: {why.rstrip('.')}; training goes on, and no other is taken."
        )
        self.begins = set()
        shutil.rmtree(self._aside, ignore_errors=True)
