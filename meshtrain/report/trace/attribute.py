"""Seconds of a traced step by kind.

    CPU   all devices share the cores: at each instant the wall goes to those that run, and to those that wait only where none runs
    GPU   each device by itself: compute; collectives where no compute hides them; idle; then the mean over the devices

What cannot be told is said in a sentence, with what would cure it, and never guessed.
"""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from meshtrain.report.trace.attribution import COLLECTIVES, KINDS, NO_BUFFERS, Attribution, Kind, axis_kind
from meshtrain.report.trace.join import Instruction, instructions
from meshtrain.report.trace.read import Event, Span, Trace
from meshtrain.report.trace.share import share

Key = tuple[Kind, str]  # a kind, and of collectives whether they move, wait or cannot tell: both
Ranked = tuple[float, float, int, Key]  # begin, end, rank, key: see `share`
Table = Mapping[str, Instruction]

# NCCL names its kernels by what they do: ncclDevKernel_AllReduce_Sum_f32_RING_LL(...).
NCCL = {
    "AllReduce": "all-reduce",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "SendRecv": "collective-permute",
}
UNNAMED = (
    "What ran in command buffers does not tell its names; trace a short run of its own with "
    f"XLA_FLAGS={NO_BUFFERS} (nothing behind the sign, not even quotes), and see from its step time what that changes."
)
TOGETHER = "{} wait and move in one: a collective's seconds may be waiting for a device that comes later."
SHARED = "Fake devices share the cores, so an idle stage leaves its own to the others: the bubble shows only where no device runs."


def attribute(trace: Trace) -> Attribution:
    """Where the time of the traced steps went."""
    table = instructions(trace.module, trace.facts.mesh)
    # Those that share a wall: all fake devices, or each GPU for itself.
    walls = [_on_cpu(trace, table)] if trace.facts.platform == "cpu" else _on_gpu(trace, table) or [[]]
    found: dict[Key, float] = defaultdict(float)
    scale = 1e-9 / len(trace.steps) / len(walls)
    for spans in walls:
        for window in trace.steps:
            spent, outside, gaps = share(spans, window)
            for key, nanoseconds in [*spent.items(), (("host", ""), outside), (("idle", ""), gaps)]:
                found[key] += nanoseconds * scale
    devices = len({event.device for event in trace.events})
    counts = Counter(_collective(event, table) for event in trace.events)
    unjoined = sum(event.op not in table for event in trace.events if event.op or trace.facts.platform == "cpu")
    states = {
        state: {kind: seconds for kind in COLLECTIVES if (seconds := found.get((kind, state), 0.0))}
        for state in ("move", "wait")
    }
    return Attribution(
        platform=trace.facts.platform,
        devices=devices,
        steps=len(trace.steps),
        wall_seconds=trace.wall / 1e9 / len(trace.steps),
        seconds=_by_kind(found, trace.facts.masked),
        moving=states["move"],
        waiting=states["wait"],
        collectives=Counter({key: n / len(trace.steps) / devices for key, n in counts.items() if key}),
        events=len(trace.events),
        unjoined=unjoined,
        untraced_seconds=trace.untraced_seconds,
        cannot_tell=_cannot_tell(trace, table, unjoined),
    )


def _by_kind(found: Mapping[Key, float], masked: Mapping[str, float]) -> dict[Kind, float]:
    """Their sums; waiting over pipeline is the bubble, and of what slots took, the share of those that are idle is masked."""
    seconds: dict[Kind, float] = defaultdict(float)
    for (kind, state), spent in found.items():
        seconds["bubble" if (kind, state) == ("pipeline", "wait") else kind] += spent
    of_slot: dict[Kind, str] = {
        "forward": "forward", "backward": "backward", "recomputation": "backward", "head": "head",
    }  # fmt: skip
    for kind, slot in of_slot.items():
        idle = seconds[kind] * masked.get(slot, 0.0)
        seconds[kind] -= idle
        seconds["masked"] += idle
    return {kind: seconds[kind] for kind in KINDS if seconds[kind]}


def _kind(one: Instruction) -> Kind:
    return axis_kind(one.axes) if one.axes else one.kind


# --- fake devices


def _on_cpu(trace: Trace, table: Table) -> list[Ranked]:
    """All devices' spans: what waits inside a collective's event ranks behind all that runs. Between processes a collective does not tell
    when it waits, and ranks behind compute as a whole."""
    spans: list[Ranked] = []
    alone = trace.facts.processes == 1
    for event in trace.events:
        one = table.get(event.op)
        if one is None:
            spans.append((event.begin, event.end, 0, ("unknown", "")))
        elif one.container:
            continue
        elif not one.collective:
            spans.append((event.begin, event.end, 0, (_kind(one), "")))
        elif not alone:
            spans.append((event.begin, event.end, 1, (_kind(one), "both")))
        else:
            at, kind = event.begin, _kind(one)
            for begin, end in _inside(trace.waits.get(event.line, []), event.begin, event.end):
                spans += [(at, begin, 0, (kind, "move")), (begin, end, 1, (kind, "wait"))]
                at = end
            spans.append((at, event.end, 0, (kind, "move")))
    return spans


def _inside(waits: list[Span], begin: float, end: float) -> list[Span]:
    first = bisect.bisect_left(waits, (begin, begin))
    return waits[first : bisect.bisect_left(waits, (end, end), first)]


# --- GPUs


def _on_gpu(trace: Trace, table: Table) -> list[list[Ranked]]:
    """Each device's spans: collectives rank behind compute, copies of no instruction (batches, metrics) behind both."""
    of_device: dict[int, list[Ranked]] = defaultdict(list)
    for event in trace.events:
        one = table.get(event.op)
        if collective := _collective(event, table):
            kind = _kind(one) if one is not None and one.collective else axis_kind(tuple(collective[1].split("+")))
            ranked: tuple[int, Key] = (1, (kind, "both"))
        elif one is not None and not one.container:
            ranked = (0, (_kind(one), ""))
        elif event.name.startswith(("Memcpy", "Memset")):
            ranked = (2, ("host", ""))
        else:
            ranked = (0, ("unknown", ""))
        of_device[event.device].append((event.begin, event.end, *ranked))
    return list(of_device.values())


def _collective(event: Event, table: Table) -> tuple[str, str] | None:
    """Which collective an event is and over which axis; of a kernel of NCCL's that names no instruction the axis is known if all
    instructions of that kind have the same one, and else `unknown`."""
    one = table.get(event.op)
    if one is not None and one.collective:
        return one.collective, one.axis
    if not (named := re.match(r"nccl\w*?_(AllReduce|AllGather|ReduceScatter|SendRecv)", event.name)):
        return None
    kind = NCCL[named.group(1)]
    axes = {other.axis for other in table.values() if other.collective == kind}
    return kind, axes.pop() if len(axes) == 1 else "unknown"


def _cannot_tell(trace: Trace, table: Table, unjoined: int) -> list[str]:
    facts, said = trace.facts, []
    if facts.platform == "cpu":
        if facts.mesh.get("pipeline", 1) > 1:
            said.append(SHARED)
    elif facts.platform != "gpu":
        said.append(f"Traces of a {facts.platform} are not read, only those of CPUs and GPUs.")
    else:
        if not trace.events:
            said.append("The trace holds nothing that ran on a GPU: the profiler could not reach CUPTI, which needs its library and the right to use it.")  # fmt: skip
        if any(event.op not in table or table[event.op].container for event in trace.events if _buffered(event, table)):
            said.append(UNNAMED)
        if any(_collective(event, table) for event in trace.events):
            said.append(TOGETHER.format("NCCL's kernels"))
    if facts.processes > 1:
        if facts.platform == "cpu":
            said.append(TOGETHER.format("Collectives between processes"))
        said.append(f"Only the {len(facts.local)} devices of the first of {facts.processes} processes were traced, of {len(facts.devices)}.")  # fmt: skip
    if unjoined:
        said.append(
            f"{unjoined:,} of {len(trace.events):,} events name no instruction of the program beside the trace."
        )
    return said


def _buffered(event: Event, table: Table) -> bool:
    return event.op.startswith("command_buffer") or event.graph or (event.op in table and table[event.op].held)
