"""Attributes the seconds of a traced step to kinds.

    CPU   all devices share the cores: at each instant the wall goes to those that run, else to those that wait
    GPU   each device by itself: compute; collectives where no compute hides them; idle; then the mean over the devices

The wall is shared among what ran: at each instant equally among those of the first rank that is there, so that the
shares sum to the wall.
Summed durations mislead: on fake devices, more of which run than there are cores, they are several times the wall.

    rank 0   ████████          ███     a ran alone, then a and b half each, then c
    rank 0       ███████
    rank 1          █████████████      counts only where nothing of rank 0 runs
             a   a,b b   1    c  1

Nothing is guessed: a sentence says what cannot be told, and what would cure it.
"""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from meshtrain.report.trace.attribution import (
    COLLECTIVES,
    KINDS,
    NO_BUFFERS,
    Attribution,
    Kind,
    axis_kind,
)
from meshtrain.report.trace.instructions import Instruction, instructions
from meshtrain.report.trace.read import Span, Trace, TraceEvent

# a kind, and of collectives whether they move, wait or cannot tell: both
Spending = tuple[Kind, str]
Ranked = tuple[float, float, int, Spending]  # begin, end, rank, key: see `share`
Instructions = Mapping[str, Instruction]
Key = TypeVar("Key", bound=Hashable)

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
SHARED = (
    "Fake devices share the cores, so an idle stage leaves its own to the others: the bubble shows only where no "
    "device runs."
)


def attribute(trace: Trace) -> Attribution:
    """Returns where the time of the traced steps went."""
    table = instructions(trace.module, trace.facts.mesh)
    # Those that share a wall: all fake devices, or each GPU for itself.
    walls = (
        [_cpu_spans(trace, table)]
        if trace.facts.platform == "cpu"
        else _gpu_spans(trace, table) or [[]]
    )
    totals: dict[Spending, float] = defaultdict(float)
    steps = len(trace.steps)
    scale = 1e-9 / steps / len(walls)
    for spans in walls:
        for window in trace.steps:
            spent, outside, gaps = share(spans, window)
            for key, nanoseconds in [
                *spent.items(),
                (("host", ""), outside),
                (("idle", ""), gaps),
            ]:
                totals[key] += nanoseconds * scale
    devices = len({event.device for event in trace.events})
    counts = Counter(_collective(event, table) for event in trace.events)
    unjoined = sum(
        event.op not in table
        for event in trace.events
        if event.op or trace.facts.platform == "cpu"
    )
    moving, waiting = (
        {
            kind: seconds
            for kind in COLLECTIVES
            if (seconds := totals.get((kind, state), 0.0))
        }
        for state in ("move", "wait")
    )
    return Attribution(
        platform=trace.facts.platform,
        devices=devices,
        steps=steps,
        wall_seconds=trace.wall / 1e9 / steps,
        seconds=_sum_kinds(totals, trace.facts.masked),
        moving=moving,
        waiting=waiting,
        collectives=Counter(
            {key: n / steps / devices for key, n in counts.items() if key}
        ),
        events=len(trace.events),
        unjoined=unjoined,
        untraced_seconds=trace.untraced_seconds,
        cannot_tell=_cannot_tell(trace, table, unjoined),
    )


def _sum_kinds(
    totals: Mapping[Spending, float], masked: Mapping[str, float]
) -> dict[Kind, float]:
    """Their sums; waiting over pipeline is the bubble, and of what slots took, the share of those that are idle is
    masked.
    """
    seconds: dict[Kind, float] = defaultdict(float)
    for (kind, state), spent in totals.items():
        seconds["bubble" if (kind, state) == ("pipeline", "wait") else kind] += spent
    slots: dict[Kind, str] = {
        "forward": "forward",
        "backward": "backward",
        "recomputation": "backward",
        "head": "head",
    }
    for kind, slot in slots.items():
        idle = seconds[kind] * masked.get(slot, 0.0)
        seconds[kind] -= idle
        seconds["masked"] += idle
    return {kind: seconds[kind] for kind in KINDS if seconds[kind]}


def _kind(one: Instruction) -> Kind:
    return axis_kind(one.axes) if one.axes else one.kind


def _cpu_spans(trace: Trace, table: Instructions) -> list[Ranked]:
    """The spans of all fake devices: what waits inside a collective's event ranks behind all that runs.

    Between processes a collective does not tell when it waits, and ranks behind compute as a whole.
    """
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
            at = event.begin
            kind = _kind(one)
            waits = trace.waits.get(event.line, [])
            first = bisect.bisect_left(waits, (event.begin, event.begin))
            for begin, end in waits[
                first : bisect.bisect_left(waits, (event.end, event.end), first)
            ]:
                spans += [
                    (at, begin, 0, (kind, "move")),
                    (begin, end, 1, (kind, "wait")),
                ]
                at = end
            spans.append((at, event.end, 0, (kind, "move")))
    return spans


def _gpu_spans(trace: Trace, table: Instructions) -> list[list[Ranked]]:
    """Each GPU's spans: collectives rank behind compute, copies of no instruction (batches, metrics) behind both."""
    by_device: dict[int, list[Ranked]] = defaultdict(list)
    for event in trace.events:
        one = table.get(event.op)
        if collective := _collective(event, table):
            kind = (
                _kind(one)
                if one is not None and one.collective
                else axis_kind(tuple(collective[1].split("+")))
            )
            ranked: tuple[int, Spending] = (1, (kind, "both"))
        elif one is not None and not one.container:
            ranked = (0, (_kind(one), ""))
        elif event.name.startswith(("Memcpy", "Memset")):
            ranked = (2, ("host", ""))
        else:
            ranked = (0, ("unknown", ""))
        by_device[event.device].append((event.begin, event.end, *ranked))
    return list(by_device.values())


def _collective(event: TraceEvent, table: Instructions) -> tuple[str, str] | None:
    """Returns which collective an event is, and over which axis.

    If an NCCL kernel names no instruction, its axis is the one that all instructions of its kind share, else
    `unknown`.
    """
    one = table.get(event.op)
    if one is not None and one.collective:
        return one.collective, one.axis
    if not (
        named := re.match(
            r"nccl\w*?_(AllReduce|AllGather|ReduceScatter|SendRecv)", event.name
        )
    ):
        return None
    kind = NCCL[named.group(1)]
    axes = {other.axis for other in table.values() if other.collective == kind}
    return kind, axes.pop() if len(axes) == 1 else "unknown"


def _cannot_tell(trace: Trace, table: Instructions, unjoined: int) -> list[str]:
    facts = trace.facts
    sentences = []
    if facts.platform == "cpu":
        if facts.mesh.get("pipeline", 1) > 1:
            sentences.append(SHARED)
    elif facts.platform != "gpu":
        sentences.append(
            f"Traces of a {facts.platform} are not read, only those of CPUs and GPUs."
        )
    else:
        if not trace.events:
            sentences.append(
                "The trace holds nothing that ran on a GPU: the profiler could not reach CUPTI, which needs its "
                "library and the right to use it."
            )
        if any(
            event.op not in table or table[event.op].container
            for event in trace.events
            if _buffered(event, table)
        ):
            sentences.append(UNNAMED)
        if any(_collective(event, table) for event in trace.events):
            sentences.append(TOGETHER.format("NCCL's kernels"))
    if facts.processes > 1:
        if facts.platform == "cpu":
            sentences.append(TOGETHER.format("Collectives between processes"))
        sentences.append(
            f"Only the {len(facts.local)} devices of the first of {facts.processes} processes were traced, of "
            f"{len(facts.devices)}."
        )
    if unjoined:
        sentences.append(
            f"{unjoined:,} of {len(trace.events):,} events name no instruction of the program beside the trace."
        )
    return sentences


def _buffered(event: TraceEvent, table: Instructions) -> bool:
    return (
        event.op.startswith("command_buffer")
        or event.graph
        or (event.op in table and table[event.op].buffered)
    )


def share(
    spans: Iterable[tuple[float, float, int, Key]], window: Span
) -> tuple[dict[Key, float], float, float]:
    """Returns the time of each key of spans (begin, end, rank, key) in a window, that outside all spans, and the gaps
    between them.
    """
    begin, end = window
    edges = []
    for a, b, rank, key in spans:
        a = max(a, begin)
        b = min(b, end)
        if b > a:
            edges += [(a, 1, rank, key), (b, -1, rank, key)]
    if not edges:
        return {}, end - begin, 0.0
    edges.sort(key=lambda edge: edge[0])
    live: dict[int, Counter[Key]] = defaultdict(Counter)
    totals: dict[Key, float] = defaultdict(float)
    gaps = 0.0
    last = edges[0][0]
    for at, more, rank, key in edges:
        if at > last:
            running = next((live[r] for r in sorted(live) if live[r]), None)
            if running is None:
                gaps += at - last
            else:
                each = (at - last) / running.total()
                for name, count in running.items():
                    totals[name] += each * count
            last = at
        live[rank][key] += more
        if not live[rank][key]:
            del live[rank][key]
    return dict(totals), (edges[0][0] - begin) + (end - last), gaps
