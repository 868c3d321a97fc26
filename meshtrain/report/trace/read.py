"""Reads a traced run's files: what ran when on which device, when the steps were, and which program it was.

    traces/STEP/trace.xplane.pb   planes ─► lines ─► events (name, start, duration, stats)
                                  CPU: one plane for all devices, which mix on the lines of a pool of threads
                                  GPU: a plane a device, a line a stream
    traces/STEP/module.hlo.txt    what the events' `hlo_op` names
    traces/STEP/trace.json        `telemetry.trace.Facts`

The stats of a GPU's event (hlo_op, hlo_module, cuda_graph_id) are documented in openxla/xla,
xla/backends/profiler/gpu/cupti_collector.cc. With command buffers kernels name the buffer, not the instruction:
openxla/xprof, issues 2544 and 3070.
"""

import bisect
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData

from meshtrain.errors import ConfigError, refusal
from meshtrain.hlo import Module
from meshtrain.report import rows
from meshtrain.telemetry.trace import EVENTS, FACTS, MODULE, STEP, Facts

Span = tuple[float, float]  # begin and end, in nanoseconds of the trace's clock
# Nanoseconds by which an `end` is later if an event did not do its work itself
HANDED = 2000.0
AROUND = 20  # steps before and after the traced ones, for their median
# Inside a collective's event on a CPU: the others are not there yet
WAITING = "Rendezvous"


class TraceEvent(NamedTuple):
    """An instruction that ran on a device, or on a GPU a kernel or copy, of which `op` may be empty."""

    name: str
    op: str
    device: int  # its number among the process's own
    line: str
    begin: float
    end: float
    graph: bool = False  # launched by a CUDA graph, XLA's command buffer


@dataclass(frozen=True)
class Trace:
    """The events of a few traced steps."""

    facts: Facts
    module: Module
    steps: list[Span]
    events: list[TraceEvent]  # of the train step, within the steps
    waits: dict[str, list[Span]] = field(default_factory=dict)  # by line, in order
    untraced_seconds: float | None = None  # median of the steps around these

    @property
    def wall(self) -> float:
        """Nanoseconds of all steps together."""
        return sum(end - begin for begin, end in self.steps)


def read_trace(directory: Path) -> Trace:
    """The trace in traces/STEP/ of a run. ConfigError where there is none, or none that can be read."""
    try:
        facts = Facts(**json.loads((directory / FACTS).read_text()))
        module = Module((directory / MODULE).read_text())
        content = (directory / EVENTS).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{directory} holds no whole trace: {error.filename}: {refusal(error)}."
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{directory} holds no trace that can be read: {error}."
        ) from None
    try:
        # Held until all is read: a plane does not keep what it is a part of.
        profile = ProfileData.from_serialized_xspace(content)
    except RuntimeError as error:
        raise ConfigError(
            f"{directory / EVENTS} is not a trace of JAX's profiler: {error}."
        ) from None
    planes = list(profile.planes)
    with warnings.catch_warnings():
        # Of its own types when they are first needed, where Python 3.13 misses something; as an error it would end the
        # process.
        warnings.simplefilter("ignore", DeprecationWarning)
        steps = _steps(planes, facts)
    if not steps:
        raise ConfigError(
            f"{directory / EVENTS} holds none of the steps {facts.steps}; trace them again."
        )
    events, waits = (
        _cpu_events(planes, facts)
        if facts.platform == "cpu"
        else (_gpu_events(planes, facts), {})
    )
    within = [
        e
        for e in events
        if any(e.begin < end and e.end > begin for begin, end in steps)
    ]
    return Trace(
        facts,
        module,
        steps,
        within,
        waits,
        _untraced(directory.parent.parent / "metrics.jsonl", facts.steps),
    )


def _steps(planes: Iterable[Any], facts: Facts) -> list[Span]:
    lines = [
        line
        for plane in planes
        if plane.name.startswith("/host:")
        for line in plane.lines
    ]
    annotations = [
        event for line in lines for event in line.events if event.name == STEP
    ]
    return sorted(
        {
            (e.start_ns, e.end_ns)
            for e in annotations
            if dict(e.stats).get("step_num") in facts.steps
        }
    )


def _cpu_events(
    planes: Iterable[Any], facts: Facts
) -> tuple[list[TraceEvent], dict[str, list[Span]]]:
    """Every event tells its device; a line is a thread, which serves all of them in turn.

    An event of a large product ends when its parts are handed to other threads. `end: NAME` comes when they are done;
    if what needs the product goes on at once, some time after that has begun.
    """
    events: list[TraceEvent] = []
    waits: dict[str, list[Span]] = defaultdict(list)
    numbers: list[int] = []  # by event: that which its `end` names
    ends: dict[int, float] = {}
    for plane in planes:
        for line in plane.lines if plane.name == "/host:CPU" else ():
            name_of_line = line.name
            for event in line.events:
                name = event.name
                if name == WAITING:
                    waits[name_of_line].append((event.start_ns, event.end_ns))
                elif name.startswith("end: "):
                    ends[dict(event.stats)["_c"]] = event.start_ns
                # Most events are the thread pool's own
                elif not name.startswith(("ThreadpoolListener", "Wait", "Invoke")):
                    stats = dict(event.stats)
                    if stats.get("hlo_module") == facts.module:
                        op = str(stats["hlo_op"])
                        device = int(stats["device_ordinal"])
                        events.append(
                            TraceEvent(
                                name,
                                op,
                                device,
                                name_of_line,
                                event.start_ns,
                                event.end_ns,
                            )
                        )
                        numbers.append(stats.get("_p", -1))
    begins: dict[int, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.begin):
        begins[event.device].append(event.begin)
    for i, event in enumerate(events):
        if ends.get(numbers[i], 0.0) > event.end + HANDED:
            later = begins[event.device][
                bisect.bisect_left(begins[event.device], event.end) :
            ][:1]
            events[i] = event._replace(end=min([ends[numbers[i]], *later]))
    return events, {line: sorted(spans) for line, spans in waits.items()}


def _gpu_events(planes: Iterable[Any], facts: Facts) -> list[TraceEvent]:
    """Returns the events on the streams of each device's plane; other lines repeat them in other units."""
    events = []
    for plane in planes:
        number = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines if number else ():
            if not line.name.startswith("Stream"):
                continue
            assert number is not None
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module", facts.module) == facts.module:
                    op = str(stats.get("hlo_op", ""))
                    graph = "cuda_graph_id" in stats or "cuda_graph_exec_id" in stats
                    device = int(number.group(1))
                    events.append(
                        TraceEvent(
                            event.name,
                            op,
                            device,
                            line.name,
                            event.start_ns,
                            event.end_ns,
                            graph,
                        )
                    )
    return events


def _untraced(metrics: Path, traced: list[int]) -> float | None:
    """Median seconds of the steps before and after those that were traced, where the run's rows tell."""
    try:
        columns, _ = rows.read(metrics)
    except OSError:
        return None
    steps = columns["step"]
    seconds = columns["step_seconds"]
    first = min(traced)
    last = max(traced)
    near = (
        (steps >= first - AROUND)
        & (steps <= last + AROUND)
        & ((steps < first) | (steps > last))
    )
    seconds = np.sort(seconds[near & np.isfinite(seconds)])
    return float(seconds[len(seconds) // 2]) if len(seconds) else None
