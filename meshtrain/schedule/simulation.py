"""When each op of a schedule happens, and how long it all takes, from the durations of the ops.

Two models of execution:

    asynchronous  each stage does its ops in the table's order, each as soon as its input has arrived. The model of the
                  papers, and of frameworks with one program per stage.
    lockstep      one program for all stages: every clock costs the sum of the slots that *any* stage uses in it (see
                  `phases`), on the stage where it takes longest. What this framework's executor does on accelerators.

Messages travel while stages work on. In lockstep a message leaves when its slot ends, and the next clock's slot of the
same kind waits for it: so an activation has the time of H, B and W to travel, a cotangent that of W and the next F. A
pair ends before both
leave, and the next one waits for both: they have the time of H and W.

G and R travel on a lane of their own, one after the other; the stage goes on until the next of them begins, or its
first F needs a G.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshtrain.registry import Shown
from meshtrain.schedule.phases import boundaries, ops_per_clock, phases
from meshtrain.schedule.table import B, F, Table, W, check_is_table

# kinds of span, besides F, B and W
HEAD = 3
OPTIMIZER = 4
EXECUTIONS = ("asynchronous", "lockstep")
_IN_CLOCK = {
    False: np.array([0, 2, 3, 1]),
    True: np.array([0, 1, 3, 2]),
}  # order of F, B, W, HEAD in a clock, by table.paired

PerChunk = float | np.ndarray


@dataclass(frozen=True, eq=False)
class Durations:
    """How long things take, all in one unit of time (seconds, or the time of one forward).

    `forward`, `input_grad` and `weight_grad` are of one microbatch and one model chunk: a number, or an array over the
    virtual stages. Where the table does not split the backward it takes input_grad + weight_grad.
    """

    forward: PerChunk = 1.0
    input_grad: PerChunk = 1.0
    weight_grad: PerChunk = 1.0
    message: float = 0.0  # one hop of an activation or cotangent to another stage
    # Messages within a forward, and within a backward, that the other hides where the table pairs the two.
    forward_hidden: PerChunk = 0.0
    backward_hidden: PerChunk = 0.0
    head: float = 0.0  # the whole loss head, forward and backward, of one microbatch
    # Each stage does 1/stages of every head; otherwise the last virtual stage's stage does it.
    head_spread: bool = False
    optimizer: float = 0.0  # on every stage, after everything else
    gather: float = 0.0  # a G: the weights of one chunk
    reduce: float = 0.0  # an R: the gradient of one chunk

    def work(self, table: Table) -> np.ndarray:
        """float [3, virtual stages]: duration of F, B and W as the table's slots have them."""
        forward, input_grad, weight_grad = (
            _per_virtual_stage(table, name, getattr(self, name))
            for name in ("forward", "input_grad", "weight_grad")
        )
        if table.split:
            return np.stack([forward, input_grad, weight_grad])
        return np.stack([forward, input_grad + weight_grad, np.zeros_like(forward)])

    def hidden(self, table: Table) -> np.ndarray:
        """float [3, virtual stages]: how much shorter F, B and W are in a pair."""
        values = {
            name: getattr(self, name) for name in ("forward_hidden", "backward_hidden")
        }
        hidden = [
            _per_virtual_stage(table, name, value) for name, value in values.items()
        ]
        return np.stack([*hidden, np.zeros(table.virtual_stages)]) * table.paired


# A backward twice as long as a forward, all else at once.
EVEN = Durations()


def _per_virtual_stage(table: Table, name: str, value: PerChunk) -> np.ndarray:
    if np.ndim(value) > 0 and np.shape(value) != (table.virtual_stages,):
        raise ValueError(
            f"{name} has {np.size(value)} entries, and must be a number or have one for each of the "
            f"{table.virtual_stages} virtual stages"
        )
    return np.broadcast_to(np.asarray(value, float), table.virtual_stages)


class SentSpan(NamedTuple):
    """A collective over data as it travels: its kind (G or R) and chunk, and the stage beside which it does."""

    kind: int
    chunk: int
    stage: int
    start: float
    end: float


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(Shown):
    """The result of `simulate`. Spans are arrays of one length, in the order (clock, place in the clock, stage).

    `kind` is F, B, W, HEAD or OPTIMIZER; `microbatch` and `chunk` are -1 for OPTIMIZER. `cause[i]` is the span
    that span i waited for, -1 for none.
    """

    table: Table
    execution: str
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    clock: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cause: np.ndarray
    hidden: (
        np.ndarray
    )  # how long messages of the span travel while the other half of its pair works
    transfers: tuple[SentSpan, ...] = ()

    @cached_property
    def makespan(self) -> float:
        return float(self.end.max())

    @cached_property
    def busy(self) -> np.ndarray:
        """Time that each stage works, [stages]."""
        return np.bincount(self.stage, self.end - self.start, self.table.stages)

    @property
    def idle(self) -> np.ndarray:
        """Time that each stage waits, [stages]."""
        return self.makespan - self.busy

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time, taken together, in which they wait."""
        return float(self.idle.mean() / self.makespan) if self.makespan else 0.0

    @cached_property
    def peak_in_flight(self) -> np.ndarray:
        """Most entries (microbatches of one chunk) stashed at once, [stages]. The table's order alone decides it."""
        done = (
            self.table.cells[:, :, W if self.table.split else B, 0] >= 0
        )  # its entry is held to the end of this clock
        taken = self.table.cells[:, :, F, 0] >= 0
        return (np.cumsum(taken, axis=0) - np.cumsum(done, axis=0) + done).max(axis=0)

    def count_in_flight(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, entries stashed from then on) for a stage: a step function that ends with 0."""
        mine = self.stage == stage
        begin = self.start[mine & (self.kind == F)]
        done = self.end[mine & (self.kind == (W if self.table.split else B))]
        times, place = np.unique(np.concatenate([done, begin]), return_inverse=True)
        steps = np.bincount(
            place, np.concatenate([-np.ones(len(done)), np.ones(len(begin))])
        )
        return times, np.cumsum(steps).astype(int)

    def critical_path(self) -> list[int]:
        """Spans, first to last, each of which began when the one before allowed it: what to shorten to gain time."""
        optimizers = len(self.kind) - self.table.stages
        path = [
            optimizers + int(self.stage[self.cause[optimizers]])
        ]  # on the stage that was done last
        while self.cause[path[-1]] >= 0:
            path.append(int(self.cause[path[-1]]))
        return path[::-1]


def simulate(
    table: Table, durations: Durations = EVEN, execution: str = "lockstep"
) -> Timeline:
    """Runs a legal table by `execution` ('lockstep' or 'asynchronous').

    Raises IllegalTable if the table is not legal. Raises ValueError for another model of execution, and for arrays of
    durations that are not as long as the virtual stages are many.
    """
    check_is_table(table, "simulate")
    if execution not in EXECUTIONS:
        raise ValueError(
            f"execution '{execution}' is not one of {', '.join(EXECUTIONS)}"
        )
    spans = _spans(table, durations, execution)
    lanes = _Lanes(table, durations, table.stages if execution == "asynchronous" else 1)
    start, cause = (_asynchronous if execution == "asynchronous" else _lockstep)(
        table, durations, spans, lanes
    )
    end = start + spans.work
    last = int(np.argmax(end))
    all_done = max(end[last], *lanes.free)
    stages = np.arange(table.stages)
    none = np.full(table.stages, -1)
    return Timeline(
        table=table,
        execution=execution,
        kind=np.append(spans.kind, none + 1 + OPTIMIZER),
        stage=np.append(spans.stage, stages),
        microbatch=np.append(spans.microbatch, none),
        chunk=np.append(spans.chunk, none),
        clock=np.append(spans.clock, none + 1 + table.clocks),
        start=np.append(start, np.full(table.stages, all_done)),
        end=np.append(end, np.full(table.stages, all_done + durations.optimizer)),
        cause=np.append(cause, none + 1 + last),
        hidden=np.append(spans.hidden, np.zeros(table.stages)),
        transfers=tuple(lanes.transfers),
    )


class _Lanes:
    """The lanes of collectives over data: a lane for each stage that runs on its own, or one in lockstep."""

    def __init__(self, table: Table, durations: Durations, lanes: int) -> None:
        self.sends = table.sends
        self.seconds = (durations.gather, durations.reduce)
        self.bounds = boundaries(table)
        self.next = [0] * lanes
        self.free = [0.0] * lanes
        self.transfers = list[SentSpan]()
        self.beside = (
            [[lane] for lane in range(lanes)]
            if lanes > 1
            else [list(range(table.stages))]
        )

    def begin(self, lane: int, clock: int, now: float) -> float:
        """Begins what begins up to a clock that a stage would go on with `now`; returns when it does."""
        while (
            self.next[lane] < len(self.bounds) and self.bounds[self.next[lane]] <= clock
        ):
            now = self.free[lane] = max(now, self.free[lane])
            for kind, chunk in np.argwhere(
                self.sends == self.bounds[self.next[lane]]
            ).tolist():
                start = self.free[lane]
                self.free[lane] = self.free[lane] + self.seconds[kind]
                if self.seconds[kind]:
                    self.transfers += [
                        SentSpan(kind, chunk, s, start, self.free[lane])
                        for s in self.beside[lane]
                    ]
            self.next[lane] += 1
        return now


@dataclass(frozen=True, eq=False)
class _Spans:
    """The ops of a table and the loss heads between them, in an order in which they can be done."""

    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    clock: np.ndarray
    virtual: np.ndarray
    work: np.ndarray
    hidden: np.ndarray


def _spans(table: Table, durations: Durations, execution: str) -> _Spans:
    clock, stage, kind = np.nonzero(table.cells[..., 0] >= 0)
    microbatch, chunk = table.cells[clock, stage, kind].T
    virtual = table.virtual(stage, chunk)
    used = np.asarray(table.cells[..., 0] >= 0)
    if execution == "lockstep":
        used = used | used.any(axis=1, keepdims=True)
    with_f, with_b, with_w = np.moveaxis(used, 2, 0)
    in_pair = (with_b & (with_f | with_w))[clock, stage]
    hidden = durations.hidden(table)[kind, virtual] * in_pair
    work = durations.work(table)[kind, virtual] - hidden
    spans = _Spans(kind, stage, microbatch, chunk, clock, virtual, work, hidden)
    if durations.head:
        heads = _head_spans(table, durations)
        spans = _Spans(*map(np.append, _columns(spans), _columns(heads)))
    order = np.lexsort((spans.stage, _IN_CLOCK[table.paired][spans.kind], spans.clock))
    return _Spans(*(column[order] for column in _columns(spans)))


def _columns(spans: _Spans) -> list[np.ndarray]:
    """Lists the columns of spans in their order."""
    return list(vars(spans).values())


def _head_spans(table: Table, durations: Durations) -> _Spans:
    """Returns the loss heads: one for each microbatch and each stage that has a part of the head."""
    last = table.virtual_stages - 1
    on = (
        np.arange(table.stages)
        if durations.head_spread
        else np.array([table.stage_of(last)])
    )
    heads = len(on) * table.microbatches
    return _Spans(
        kind=np.full(heads, HEAD),
        stage=np.tile(on, table.microbatches),
        microbatch=np.repeat(np.arange(table.microbatches), len(on)),
        chunk=np.full(heads, table.chunk_of(last)),
        clock=np.repeat(table.when()[F, last], len(on)),
        virtual=np.full(heads, last),
        work=np.full(heads, durations.head / len(on)),
        hidden=np.zeros(heads),
    )


def _asynchronous(
    table: Table, durations: Durations, spans: _Spans, lanes: _Lanes
) -> tuple[np.ndarray, np.ndarray]:
    """Start and cause of each span when every stage goes on as soon as it can."""
    wants, gives, hop = _link(table, durations, spans)
    nothing = 4 * table.virtual_stages * table.microbatches
    ready = [0.0] * (nothing + 2)
    giver = [-1] * (nothing + 2)
    free = [0.0] * table.stages
    before = [-1] * table.stages
    starts = []
    causes = []
    columns = (spans.stage, spans.clock, spans.work, wants, gives, hop)
    for i, (s, clock, work, wanted, value, travel) in enumerate(
        zip(*(c.tolist() for c in columns), strict=True)
    ):
        start = lanes.begin(s, clock, free[s])
        cause = before[s]
        if ready[wanted] > start:
            start = ready[wanted]
            cause = giver[wanted]
        starts.append(start)
        causes.append(cause)
        free[s] = end = start + work
        before[s] = i
        if end + travel > ready[value]:
            ready[value] = end + travel
            giver[value] = i
    return np.array(starts), np.array(causes)


def _link(
    table: Table, durations: Durations, spans: _Spans
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the number of the value that each span waits for, of the one that it gives, and how long that travels."""
    last = table.virtual_stages - 1
    # Each value that a span can wait for has a number: the inputs of F and of B, and of the loss head, by virtual stage
    # and microbatch. `wants` is what a span waits for, `gives` what it makes ready, `hop` how long that travels.
    values = table.virtual_stages * table.microbatches
    place = spans.virtual * table.microbatches + spans.microbatch
    nothing = 4 * values
    wants = np.where(spans.kind == W, nothing + 1, spans.kind * values + place)
    is_f = spans.kind == F
    is_b = spans.kind == B
    is_head = spans.kind == HEAD
    # Who waits for the last virtual stage's output
    turn = HEAD if durations.head else B
    gives = np.full(len(place), nothing)
    gives[is_f] = np.where(
        spans.virtual == last,
        turn * values + place,
        F * values + place + table.microbatches,
    )[is_f]
    gives[is_b] = np.where(
        spans.virtual == 0, nothing, B * values + place - table.microbatches
    )[is_b]
    gives[is_head] = (B * values + place)[is_head]

    onward = spans.virtual + np.where(is_f, 1, np.where(is_b, -1, 0))
    hop = np.where(
        table.stage_of(np.clip(onward, 0, last)) != spans.stage, durations.message, 0.0
    )
    if (
        durations.head and durations.head_spread and table.stages > 1
    ):  # all stages get the output, and send a part back
        hop[is_head | (is_f & (spans.virtual == last))] = durations.message
    return wants, gives, hop


def _lockstep(
    table: Table, durations: Durations, spans: _Spans, lanes: _Lanes
) -> tuple[np.ndarray, np.ndarray]:
    """Start and cause of each span when all stages run one program."""
    alone = durations.work(table)
    in_pair = (alone - durations.hidden(table)).max(axis=1).tolist()
    alone = alone.max(axis=1).tolist()
    head = durations.head / (table.stages if durations.head_spread else 1)
    message = durations.message if table.stages > 1 else 0.0
    begin = np.zeros((table.clocks, 4))  # when F, B, W, HEAD begin in each clock
    now = f_arrives = b_arrives = 0.0
    for clock, (does_f, does_head, does_b, does_w, *_) in enumerate(
        ops_per_clock(phases(table)).tolist()
    ):
        now = lanes.begin(0, clock, now)
        pair = table.paired and does_b and (does_f or does_w)
        f, b, w = in_pair if pair else alone
        if pair and does_f:
            now = max(now, b_arrives)
        if does_f:
            begin[clock, F] = now = max(now, f_arrives)
            now += f
            f_arrives = now + message + pair * b
        if does_head and head:
            begin[clock, HEAD] = now + pair * b
            now += head * (not pair)
        if does_b:
            begin[clock, B] = now = max(now, b_arrives)
            now += b
            b_arrives = now + message + w * (pair and not does_f)
            now += head * (pair and does_head)
        if does_w:
            begin[clock, W] = now
            now += w
    # A span waits for the longest span of the slot before it: spans stand in this order already.
    cause = np.full(len(spans.kind), -1)
    longest = -1
    for slot in _slots(spans):
        cause[slot] = longest
        longest = slot.start + int(np.argmax(spans.work[slot]))
    return begin[spans.clock, spans.kind], cause


def _slots(spans: _Spans) -> Iterator[slice]:
    """Runs of spans that are in the same slot of the same clock."""
    change = (np.diff(spans.clock) != 0) | (np.diff(spans.kind) != 0)
    edges = [0, *(np.flatnonzero(change) + 1).tolist(), len(spans.kind)]
    for first, end in itertools.pairwise(edges):
        yield slice(first, end)
