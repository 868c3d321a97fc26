"""Accounts for a run's time: every second from the first `join` to the last sign of it, by kind; and the life of each
node.

    init     the start and the end of a process. A process counts this kind and the next six on its own monotonic clock
    compile  restore  step  data  eval  checkpoint
    lost     whatever it was, it came after the save that a later process went on from: it had to be done again
    down     no process was there
    other    a process was there, and nobody has counted what it did after its last count

In SPMD all ranks do the same at once, so the time of a generation is the time of rank 0: from its `started` to its
`ended`, or, where its node went without a sign, to the verdict. The kinds sum to the wall time by construction;
`other` is how much of that is not known.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshtrain.survive.heartbeat import KIND_OF
from meshtrain.survive.history import History, RunEvent, integer, number

# In the order in which a process comes to them.
COUNTED = ("init", "restore", "compile", "data", "step", "eval", "checkpoint")
KINDS = (*COUNTED, "lost", "down", "other")
WORD = {
    "checkpoint": "save",
    "init": "start, end",
    "other": "not counted",
    "data": "waiting for data",
}
GOOD_EXITS = (0, 75)  # done; stopped after a save
EVERYTHING = math.inf  # instead of a step: all that a generation did counts


def word(kind: str) -> str:
    """Returns what people call a kind of seconds."""
    return WORD.get(kind, kind)


class Save(NamedTuple):
    """Holds the seconds that rank 0 had spent when it began to save a step."""

    step: int
    time: float
    seconds: Mapping[str, float]


class TimeSpan(NamedTuple):
    """A stretch of a generation's time; within one between two saves the order is not known, and shown as that of
    `COUNTED`.
    """

    began: float
    ended: float
    kind: str  # `lost` for all that had to be done again
    did: str  # the kind, whether it was lost or not


@dataclass(frozen=True)
class GenerationTime:
    """The time of one set of processes: of its rank 0. Times in seconds on the history's clock."""

    number: int
    node: str
    began: float
    ended: float
    start: int | None  # the step it went on from
    step: int | None  # the last it is known to have taken
    exit: int | None  # of its rank 0; none: still there, or gone without a sign
    saves: tuple[Save, ...]
    spans: tuple[TimeSpan, ...]
    seconds: Mapping[str, float]  # by kind, as in the ledger; sums to ended - began


@dataclass(frozen=True)
class Ledger:
    """Every second between `began` and `ended`, by kind."""

    began: float
    ended: float
    generations: tuple[GenerationTime, ...]

    @property
    def wall(self) -> float:
        return self.ended - self.began

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each of `KINDS`; they sum to `wall`."""
        sums = {
            kind: sum(g.seconds.get(kind, 0.0) for g in self.generations)
            for kind in KINDS
        }
        sums["down"] = max(self.wall - sum(sums.values()), 0.0)
        return sums

    @property
    def goodput(self) -> float:
        """Share of the wall time in steps that count: dispatched and waited for, and not done again later."""
        return self._share("step")

    @property
    def effective(self) -> float:
        """Share of it in all that goes with them too: steps, data, evaluation and saves that count."""
        return self._share("step", "data", "eval", "checkpoint")

    def _share(self, *kinds: str) -> float:
        if self.wall:
            return sum(self.seconds[kind] for kind in kinds) / self.wall
        return 0.0


def ledger(history: History) -> Ledger:
    """Returns the ledger of a history; while the run goes on, the ledger ends at its newest sign."""
    last = history.newest
    joins = [event.time for event in history.of("join")] or [
        event.time for event in history.events[:1]
    ]
    began = min(joins, default=last)
    events = defaultdict[int, list[RunEvent]](list)
    for event in history.of("started", "going", "save", "ended"):
        if (generation := event.integer("generation")) is not None:
            events[generation].append(event)
    logs = [
        _GenerationLog(generation, events[generation]) for generation in sorted(events)
    ]
    ends = [_end(history, log, logs[i + 1 : i + 2], last) for i, log in enumerate(logs)]
    generations = []
    after = began
    for i, (log, (end, alive)) in enumerate(zip(logs, ends, strict=True)):
        first = min(max(log.began, after), last)
        after = min(max(end, first), last)
        limit = min(
            (later.start for later in logs[i + 1 :] if later.start is not None),
            default=None,
        )
        generations.append(_generation(log, first, after, alive, limit, history))
    return Ledger(began, max(last, after), tuple(generations))


class _GenerationLog:
    """Holds the events that one generation's rank 0 logged; if its node left nothing, those of the next rank that left
    any.
    """

    def __init__(self, generation: int, events: Sequence[RunEvent]) -> None:
        self.number = generation
        bounds = [e for e in events if e.name in ("started", "ended")]
        rank = min((e.integer("rank") or 0 for e in bounds), default=0)
        bounds = [e for e in bounds if (e.integer("rank") or 0) == rank]
        started = next((e for e in bounds if e.name == "started"), None)
        self.end = next((e for e in reversed(bounds) if e.name == "ended"), None)
        first = started or self.end
        self.node = first.node if first else ""
        self.start = next(
            (
                start
                for e in reversed(events)
                if (start := e.integer("start")) is not None
            ),
            None,
        )
        steps = [
            (step, e)
            for e in events
            if e.name == "save" and (step := e.integer("step")) is not None
        ]
        saves = (
            Save(step, e.time, _seconds(e.fields.get("seconds"))) for step, e in steps
        )
        self.saves = sorted(saves, key=lambda save: (save.step, save.time))
        if started:
            self.began = started.time
        elif self.end:
            # Where the line of its start is missing, as long before its end as it counted, or at its first save.
            self.began = self.end.time - sum(
                _seconds(self.end.fields.get("seconds")).values()
            )
        else:
            self.began = min(
                (save.time - sum(save.seconds.values()) for save in self.saves),
                default=math.inf,
            )


def _seconds(value: object) -> dict[str, float]:
    """Returns seconds by kind: what is neither a kind nor a number is nothing, and comes out as `other`."""
    fields = value if isinstance(value, dict) else {}
    return {kind: max(number(fields.get(kind)) or 0.0, 0.0) for kind in COUNTED}


def _end(
    history: History,
    log: _GenerationLog,
    following: Sequence[_GenerationLog],
    last: float,
) -> tuple[float, bool]:
    if log.end is not None:
        return log.end.time, False
    # Its node has gone without a sign: until others decided to go on without it, or took its place.
    plans = [
        p
        for p in history.plans
        if p.generation > log.number or (p.generation, p.state) == (log.number, "over")
    ]
    times = [*(p.wall for p in plans), *(f.began for f in following)]
    end = min((time for time in times if time >= log.began), default=None)
    if end is not None:
        # The verdict came a moment before; others, such as that a rank is slow, end nothing.
        verdicts = [
            e.time
            for e in history.of("verdict")
            if e.integer("generation") == log.number
        ]
        end = max((time for time in verdicts if log.began <= time <= end), default=end)
    # All went at once, and nobody was there to decide: until the last event before the node came back.
    back = min(
        (
            e.time
            for e in history.of("join")
            if e.node == log.node and e.time > log.began
        ),
        default=None,
    )
    if back is not None and (end is None or back < end):
        end = max((e.time for e in history.events if e.time < back), default=back)
    return (last, not history.over) if end is None else (end, False)


def _generation(
    log: _GenerationLog,
    began: float,
    ended: float,
    alive: bool,
    limit: int | None,
    history: History,
) -> GenerationTime:
    """`limit`: the step that a later one went on from, None if none did."""
    saves = log.saves
    (total, step, exit) = _total(log, alive, history)
    marks: list[tuple[float, Mapping[str, float]]] = [
        (save.step, save.seconds) for save in saves
    ]
    if total is not None:
        least = saves[-1].seconds if saves else total
        marks.append(
            (EVERYTHING, {kind: max(total[kind], least[kind]) for kind in COUNTED})
        )
    counted = sum(marks[-1][1].values()) if marks else 0.0
    known = ended - began
    # Of clocks that differ by more than they were thought to, the node's own monotonic one is right about shares.
    scale = min(1.0, known / counted) if counted else 1.0
    # A process counts once it has come so far: what was before is its start-up. What it had counted when a save began
    # says how long that was; the supervisor sees a save a moment later, so the shortest. What is left was after its
    # last count: frozen, for one.
    starts = [
        known - counted * scale,
        *(save.time - began - sum(save.seconds.values()) for save in saves),
    ]
    before = max(min(starts), 0.0) if marks else 0.0
    resumed = _resumed_step(log, limit, alive, step, exit)
    spans, spent, at = [], dict.fromkeys(COUNTED, 0.0), began

    def spend(kind: str, seconds: float, lost: bool) -> None:
        nonlocal at
        spans.append(
            TimeSpan(at, min(at + seconds, ended), "lost" if lost else kind, kind)
        )
        at = spans[-1].ended

    if before:
        spend("init", before, resumed is None)
    for mark_step, mark in marks:
        for kind in COUNTED:
            if more := max(mark[kind] - spent[kind], 0.0) * scale:
                spend(kind, more, resumed is None or mark_step > resumed)
            spent[kind] = max(mark[kind], spent[kind])
    if ended - at > 1e-9:
        # What it did after its last count, if its supervisor has logged in which phase it ended.
        spend(
            KIND_OF.get(log.end.text("phase"), "other") if log.end else "other",
            ended - at,
            resumed != EVERYTHING,
        )
    seconds = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        seconds[span.kind] += span.ended - span.began
    newest = max(
        [save.step for save in saves] + ([step] if step is not None else []),
        default=None,
    )
    of = log.number, log.node, began, ended, log.start, newest, exit
    return GenerationTime(*of, tuple(saves), tuple(spans), seconds)


def _resumed_step(
    log: _GenerationLog,
    limit: int | None,
    alive: bool,
    step: int | None,
    exit: int | None,
) -> float | None:
    """Returns the step of the newest save that a later generation built on, EVERYTHING, or None where it built on
    nothing of this one.
    """
    if limit is None and (alive or exit in GOOD_EXITS):
        return EVERYTHING
    # Stopped in good order: what it took is in a last save, which no schedule had due.
    if (
        limit is not None
        and exit in GOOD_EXITS
        and step is not None
        and (log.start or 0) < step <= limit
    ):
        return EVERYTHING
    # If it failed, and nobody has gone on yet: they will from its newest save.
    return max(
        (save.step for save in log.saves if limit is None or save.step <= limit),
        default=None,
    )


def _total(
    log: _GenerationLog, alive: bool, history: History
) -> tuple[dict[str, float] | None, int | None, int | None]:
    """Returns what its rank 0 had spent by its end (of a living one: by its last record), at which step, and with which
    code it ended.
    """
    if log.end is not None:
        exit = log.end.fields.get("exit")
        is_code = isinstance(exit, int) and not isinstance(exit, bool)
        return (
            _seconds(log.end.fields.get("seconds")),
            log.end.integer("step"),
            exit if is_code else None,
        )
    record = history.records.get(log.node) if alive else None
    rank = (
        record.rank if record is not None and record.generation == log.number else None
    )
    if rank is None:
        return None, None, None
    return (_seconds(rank.seconds) if rank.seconds else None), integer(rank.step), None


# --- each node's life, and what was done most


class NodeLife(NamedTuple):
    """A node: since when it is seen to be there, until when, and the times of its processes."""

    name: str
    there: list[tuple[float, float]]
    processes: list[tuple[int, int, float, float]]  # generation, rank, began, ended


def lives(history: History, times: Ledger) -> list[NodeLife]:
    """Returns every node that has written anything, in the order of its name's numbers: n2 before n10."""

    def split_numbers(name: str) -> list[tuple[str, int]]:
        return [
            (letters, int(digits or 0))
            for letters, digits in re.findall(r"([^0-9]*)([0-9]*)", name)
        ]

    ends = {g.number: g.ended for g in times.generations}
    of_node: dict[str, list[RunEvent]] = {name: [] for name in history.records}
    for event in history.events:
        of_node.setdefault(event.node, []).append(event)
    nodes = []
    for name in sorted(of_node, key=split_numbers):
        events = of_node[name]
        node = NodeLife(name, [], [])
        for event in events:
            if event.name == "join" or not node.there:
                node.there.append((event.time, event.time))
            node.there[-1] = (node.there[-1][0], event.time)
        until = times.ended
        for i, event in reversed(list(enumerate(events))):
            generation = event.integer("generation")
            if event.name == "started" and generation is not None:
                ended = max(event.time, min(until, ends.get(generation, until)))
                node.processes.insert(
                    0, (generation, event.integer("rank") or 0, event.time, ended)
                )
            # A process is there until it ended or another one began; where its node came back, until the last that was
            # heard before.
            if event.name in ("started", "ended"):
                until = event.time
            elif event.name == "join" and i > 0:
                until = events[i - 1].time
        if node.there and name in history.records:
            first, last = node.there[-1]
            node.there[-1] = (
                first,
                max(last, min(history.records[name].wall, times.ended)),
            )
        nodes.append(node)
    return nodes


def dominant(
    spans: Sequence[TimeSpan], began: float, ended: float, columns: int
) -> list[str]:
    """Returns what was done most in each of `columns` equal parts of a time; '' where that is nothing."""
    seconds = (ended - began) / columns or 1.0
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        first, last = (
            int((time - began) / seconds) for time in (span.began, span.ended)
        )
        for i in range(max(first, 0), min(last + 1, columns)):
            begins = began + i * seconds
            share = min(span.ended, begins + seconds) - max(span.began, begins)
            spent[i][span.kind] = spent[i].get(span.kind, 0.0) + max(share, 0.0)
    for column in spent:
        column[""] = seconds - sum(column.values())
    return [max(column, key=lambda kind: column[kind]) for column in spent]
