"""Where a run's time went: every second from the first `join` to the last sign of it, by kind; and the life of each node.

    init compile restore step data eval checkpoint    counted by a process itself, on its own monotonic clock; init is its start and its end
    lost     whatever it was, it came after the save that a later process went on from: it had to be done again
    down     no process was there
    other    a process was there, and nobody has counted what it did after its last count

In SPMD all ranks do the same at once, so the time of a generation is that of rank 0: from its `started` to its `ended`, or, where its node
went without a sign, to the verdict. The kinds sum to the wall time by construction; `other` is how much of that is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from meshtrain.survive.heartbeat import KIND_OF
from meshtrain.survive.history import History, RunEvent, integer, number

# In the order in which a process comes to them.
COUNTED = ("init", "restore", "compile", "data", "step", "eval", "checkpoint")
KINDS = (*COUNTED, "lost", "down", "other")
WORD = {"checkpoint": "save", "init": "start, end", "other": "not counted", "data": "waiting for data"}
GOOD_EXITS = (0, 75)  # done; stopped after a save


def word(kind: str) -> str:
    """Returns what people call a kind of seconds."""
    return WORD.get(kind, kind)


@dataclass(frozen=True)
class Save:
    """What rank 0 had spent when it began to save a step."""

    time: float
    step: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class TimeSpan:
    """A stretch of a generation's time; within one between two saves the order is not known, and shown as that of `COUNTED`."""

    began: float
    ended: float
    kind: str
    lost: bool


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
    seconds: Mapping[str, float] = field(default_factory=dict)  # by kind, as in the ledger; sums to ended - began

    @property
    def steps(self) -> int:
        """Steps taken, as far as is known."""
        return max((self.step or 0) - self.start, 0) if self.start is not None else 0


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
        """Seconds of each of `KINDS`; they sum to `wall`."""
        sums = {kind: sum(g.seconds.get(kind, 0.0) for g in self.generations) for kind in KINDS}
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
        return sum(self.seconds[kind] for kind in kinds) / self.wall if self.wall else 0.0


def ledger(history: History) -> Ledger:
    """Returns the ledger of a history. Of a run that goes on, up to the newest sign of it."""
    last = history.newest
    joins = [event.time for event in history.of("join")] or [event.time for event in history.events[:1]]
    began = min(joins, default=last)
    logs: dict[int, _GenerationLog] = {}
    for event in history.of("started", "going", "save", "ended"):
        generation = event.integer("generation")
        if generation is not None:
            logs.setdefault(generation, _GenerationLog(generation)).add(event)
    order = [logs[n] for n in sorted(logs)]
    ends = [_end(history, log, order[i + 1 : i + 2], last) for i, log in enumerate(order)]
    generations, after = [], began
    for i, (log, (end, alive)) in enumerate(zip(order, ends, strict=True)):
        first = min(max(log.began, after), last)
        after = min(max(end, first), last)
        limit = min((later.start for later in order[i + 1 :] if later.start is not None), default=None)
        generations.append(_generation(log, first, after, alive, limit, history))
    return Ledger(began, max(last, after), tuple(generations))


class _GenerationLog:
    """The events of one generation."""

    def __init__(self, generation: int) -> None:
        self.number = generation
        self.started: dict[int, RunEvent] = {}
        self.ends: dict[int, RunEvent] = {}
        self.saves: list[Save] = []
        self.start: int | None = None

    def add(self, event: RunEvent) -> None:
        rank = event.integer("rank") or 0
        if (start := event.integer("start")) is not None:
            self.start = start
        if event.name == "started":
            self.started.setdefault(rank, event)
        elif event.name == "ended":
            self.ends[rank] = event
        elif event.name == "save" and (step := event.integer("step")) is not None:
            self.saves.append(Save(event.time, step, _seconds(event.fields.get("seconds"))))

    @property
    def rank(self) -> int:
        """Rank 0, or the nearest to it that has logged anything where rank 0's node has left nothing."""
        return min({**self.started, **self.ends}, default=0)

    @property
    def end(self) -> RunEvent | None:
        return self.ends.get(self.rank)

    @property
    def node(self) -> str:
        event = self.started.get(self.rank) or self.end
        return event.node if event else ""

    @property
    def began(self) -> float:
        """When it started; where that line is missing, as long before its end as it counted, or at its first save."""
        if self.rank in self.started:
            return self.started[self.rank].time
        if self.end is not None:
            return self.end.time - sum(_seconds(self.end.fields.get("seconds")).values())
        return min((save.time - sum(save.seconds.values()) for save in self.saves), default=float("inf"))


def _seconds(value: object) -> dict[str, float]:
    """Returns seconds by kind: what is neither a kind nor a number is nothing, and comes out as `other`."""
    fields = value if isinstance(value, dict) else {}
    return {kind: max(number(fields.get(kind)) or 0.0, 0.0) for kind in COUNTED}


def _end(history: History, log: _GenerationLog, following: list[_GenerationLog], last: float) -> tuple[float, bool]:
    """Returns when its rank 0 ended, and whether it is still there."""
    if log.end is not None:
        return log.end.time, False

    def ends(plan_generation: int, state: str) -> bool:
        return plan_generation > log.number or (plan_generation == log.number and state == "over")

    # Its node has gone without a sign: until others decided to go on without it, or took its place.
    times = [plan.wall for plan in history.plans if ends(plan.generation, plan.state)] + [l.began for l in following]
    end = min((time for time in times if time >= log.began), default=None)
    if end is not None:
        # The verdict came a moment before; others, such as that a rank is slow, end nothing.
        verdicts = [e.time for e in history.of("verdict") if e.integer("generation") == log.number]
        end = max((time for time in verdicts if log.began <= time <= end), default=end)
    # All went at once, and nobody was there to decide: until the last event before the node came back.
    back = min((e.time for e in history.of("join") if e.node == log.node and e.time > log.began), default=None)
    if back is not None and (end is None or back < end):
        end = max((e.time for e in history.events if e.time < back), default=back)
    return (last, not history.over) if end is None else (end, False)


EVERYTHING = float("inf")  # instead of a step: all that a generation did counts


def _generation(
    log: _GenerationLog, began: float, ended: float, alive: bool, limit: int | None, history: History
) -> GenerationTime:
    """Returns a generation between `began` and `ended`; `limit`: the step that a later one went on from, None if none did."""
    saves = sorted(log.saves, key=lambda save: (save.step, save.time))
    total, step, exit = _total(log, alive, history)
    if total is not None and saves:
        total = {kind: max(total[kind], saves[-1].seconds[kind]) for kind in COUNTED}
    marks = [save.seconds for save in saves] + ([total] if total is not None else [])
    counted, known = sum(marks[-1].values()) if marks else 0.0, ended - began
    # Of clocks that differ by more than they were thought to, the node's own monotonic one is right about shares.
    scale = min(1.0, known / counted) if counted else 1.0
    # A process counts once it has come so far: what was before is its start-up. What it had counted when a save began says how long that
    # was; the supervisor sees a save a moment later, so the shortest. What is left was after its last count: frozen, for one.
    starts = [known - counted * scale, *(save.time - began - sum(save.seconds.values()) for save in saves)]
    before = max(min(starts), 0.0) if marks else 0.0
    spans, spent, at = [], dict.fromkeys(COUNTED, 0.0), began + before
    kept_step = _kept_step(log, saves, limit, alive, step, exit)
    if before:
        spans.append(TimeSpan(began, at, "init", kept_step is None))
    for i, mark in enumerate(marks):
        mark_step = saves[i].step if i < len(saves) else EVERYTHING
        lost = kept_step is None or mark_step > kept_step
        for kind in COUNTED:
            more = max(mark[kind] - spent[kind], 0.0) * scale
            spent[kind] = max(mark[kind], spent[kind])
            if more:
                spans.append(TimeSpan(at, min(at + more, ended), kind, lost))
                at = min(at + more, ended)
    if ended - at > 1e-9:
        # What it did after its last count, if its supervisor has logged in which phase it ended.
        last_kind = KIND_OF.get(log.end.text("phase"), "other") if log.end is not None else "other"
        spans.append(TimeSpan(at, ended, last_kind, kept_step != EVERYTHING))
    seconds = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        seconds["lost" if span.lost else span.kind] += span.ended - span.began
    newest = max([save.step for save in saves] + ([step] if step is not None else []), default=None)
    return GenerationTime(
        log.number, log.node, began, ended, log.start, newest, exit, tuple(saves), tuple(spans), seconds
    )


def _kept_step(
    log: _GenerationLog, saves: list[Save], limit: int | None, alive: bool, step: int | None, exit: int | None
) -> float | None:
    """Returns the step of the newest save that a later generation built on, EVERYTHING, or None where it built on nothing of this one."""
    if limit is None:
        if alive or exit in GOOD_EXITS:
            return EVERYTHING
        # It failed, and nobody has gone on yet: they will from its newest save.
        return saves[-1].step if saves else None
    # Stopped in good order: what it took is in a last save, which no schedule had due.
    if exit in GOOD_EXITS and step is not None and (log.start or 0) < step <= limit:
        return EVERYTHING
    return max((save.step for save in saves if save.step <= limit), default=None)


def _total(
    log: _GenerationLog, alive: bool, history: History
) -> tuple[dict[str, float] | None, int | None, int | None]:
    """Returns what its rank 0 had spent by its end (of a living one: by its last record), at which step, and with which code it ended."""
    if log.end is not None:
        exit = log.end.fields.get("exit")
        is_code = isinstance(exit, int) and not isinstance(exit, bool)
        return _seconds(log.end.fields.get("seconds")), log.end.integer("step"), exit if is_code else None
    record = history.records.get(log.node) if alive else None
    rank = record.rank if record is not None and record.generation == log.number else None
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

    def by_numbers(name: str) -> list[tuple[bool, int, str]]:
        digits = "".join(c if c.isdecimal() else " " for c in name).split()
        return [(False, 0, name.rstrip("0123456789")), *((True, int(d[:18]), "") for d in digits)]

    ends = {g.number: g.ended for g in times.generations}
    names = {e.node for e in history.events} | set(history.records)
    nodes = {name: NodeLife(name, [], []) for name in sorted(names, key=by_numbers)}
    begun: dict[str, tuple[int, int, float]] = {}
    heard: dict[str, float] = {}

    def close(node: str, time: float) -> None:
        if node in begun:
            generation, rank, began = begun.pop(node)
            ended = max(began, min(time, ends.get(generation, time)))
            nodes[node].processes.append((generation, rank, began, ended))

    for event in history.events:
        there, generation = nodes[event.node].there, event.integer("generation")
        if event.name == "join" or not there:
            there.append((event.time, event.time))
            close(event.node, heard.get(event.node, event.time))
        there[-1] = (there[-1][0], event.time)
        if event.name == "started" and generation is not None:
            close(event.node, event.time)
            begun[event.node] = (generation, event.integer("rank") or 0, event.time)
        elif event.name == "ended":
            ends.setdefault(generation or 0, event.time)
            close(event.node, event.time)
        heard[event.node] = event.time
    for node in list(begun):
        close(node, times.ended)
    for name, record in history.records.items():
        if there := nodes[name].there:
            first, last = there[-1]
            there[-1] = (first, max(last, min(record.wall, times.ended)))
    return list(nodes.values())


def dominant(spans: Sequence[TimeSpan], began: float, ended: float, columns: int) -> list[str]:
    """Returns what was done most in each of `columns` equal parts of a time; '' where that is nothing."""
    seconds = (ended - began) / columns or 1.0
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        kind = "lost" if span.lost else span.kind
        first, last = (int((time - began) / seconds) for time in (span.began, span.ended))
        for i in range(max(first, 0), min(last + 1, columns)):
            begins = began + i * seconds
            share = min(span.ended, begins + seconds) - max(span.began, begins)
            spent[i][kind] = spent[i].get(kind, 0.0) + max(share, 0.0)
    for column in spent:
        column[""] = seconds - sum(column.values())
    return [max(column, key=lambda kind: column[kind]) for column in spent]
