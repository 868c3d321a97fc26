"""Where a run's time went: every second from the first `join` to the last sign of it, by kind.

    init compile restore step data eval checkpoint    what a process counted by itself, on its own monotonic clock; init is its start and its end
    lost     whatever it was, it came after the save that a later process went on from: it had to be done again
    down     no process was there
    other    a process was there, and nobody has counted what it did after its last word

In SPMD all ranks do the same at once, so the time of a generation is that of rank 0: from its `started` to its `ended`, or, where its node
went without a word, to the verdict. The kinds sum to the whole by construction; `other` says how much of that is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshtrain.survive.beat import KIND_OF
from meshtrain.survive.history import Event, History, number, whole
from meshtrain.survive.records import Plan

# In the order in which a process comes to them.
COUNTED = ("init", "restore", "compile", "data", "step", "eval", "checkpoint")
KINDS = (*COUNTED, "lost", "down", "other")
GOOD_EXITS = (0, 75)  # done; stopped after a save


@dataclass(frozen=True)
class Save:
    """What rank 0 had spent when it began to save a step."""

    time: float
    step: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Piece:
    """A stretch of a generation's time; within one between two saves the order is not known, and shown as that of `COUNTED`."""

    began: float
    ended: float
    kind: str
    lost: bool


@dataclass(frozen=True)
class Generation:
    """The time of one set of processes: of its rank 0. Times in seconds on the history's clock."""

    number: int
    node: str
    began: float
    ended: float
    start: int | None  # the step it went on from
    step: int | None  # the last it is known to have taken
    exit: int | None  # of its rank 0; none: still there, or gone without a word
    saves: tuple[Save, ...]
    pieces: tuple[Piece, ...]
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
    generations: tuple[Generation, ...]

    @property
    def wall(self) -> float:
        return self.ended - self.began

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Of each of `KINDS`; they sum to `wall`."""
        found = {kind: sum(g.seconds.get(kind, 0.0) for g in self.generations) for kind in KINDS}
        found["down"] = max(self.wall - sum(found.values()), 0.0)
        return found

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
    """The ledger of a history. Of a run that goes on, up to the newest sign of it."""
    last = history.newest
    began = min(
        (event.time for event in history.of("join")), default=history.events[0].time if history.events else last
    )
    told: dict[int, _Told] = {}
    for event in history.of("started", "going", "save", "ended"):
        generation = event.whole("generation")
        if generation is not None:
            told.setdefault(generation, _Told(generation)).take(event)
    order = [told[n] for n in sorted(told)]
    ends = [_end(history, t, order[i + 1 :], last) for i, t in enumerate(order)]
    generations, after = [], began
    for i, (this, (end, alive)) in enumerate(zip(order, ends, strict=True)):
        later = [t.start for t in order[i + 1 :] if t.start is not None]
        first = min(max(this.began, after), last)
        after = min(max(end, first), last)
        generations.append(_generation(this, first, after, alive, min(later, default=None), history))
    return Ledger(began, max(last, after), tuple(generations))


class _Told:
    """What is told of one generation."""

    def __init__(self, generation: int) -> None:
        self.number = generation
        self.started: dict[int, Event] = {}
        self.ends: dict[int, Event] = {}
        self.saves: list[Save] = []
        self.start: int | None = None

    def take(self, event: Event) -> None:
        rank, seconds = event.whole("rank") or 0, _seconds(event.fields.get("seconds"))
        if (start := event.whole("start")) is not None:
            self.start = start
        if event.name == "started":
            self.started.setdefault(rank, event)
        elif event.name == "ended":
            self.ends[rank] = event
        elif event.name == "save" and (step := event.whole("step")) is not None:
            self.saves.append(Save(event.time, step, seconds))

    @property
    def rank(self) -> int:
        """Rank 0, or the nearest to it that is told of where rank 0's node has left nothing."""
        return min({**self.started, **self.ends}, default=0)

    @property
    def end(self) -> Event | None:
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
    """Seconds by kind: what is neither a kind nor a number is nothing, and comes out as `other`."""
    given = value if isinstance(value, dict) else {}
    found = {kind: number(given.get(kind)) for kind in COUNTED}
    return {kind: max(seconds or 0.0, 0.0) for kind, seconds in found.items()}


def _end(history: History, this: _Told, later: list[_Told], last: float) -> tuple[float, bool]:
    """When its rank 0 ended, and whether it is still there."""
    if this.end is not None:
        return this.end.time, False
    # Its node has gone without a word: until others decided to go on without it, or took its place.
    found = [plan.wall for plan in history.plans if _ends(plan, this.number)]
    found += [t.began for t in later[:1]]
    end = min((time for time in found if time >= this.began), default=None)
    # The verdict came a moment before; others, such as that a rank is slow, end nothing.
    judged = [e.time for e in history.of("verdict") if e.whole("generation") == this.number and e.time >= this.began]
    if end is not None:
        end = max((time for time in judged if time <= end), default=end)
    # All went at once, and nobody was there to decide: until the last that was heard before the node came back.
    back = min((e.time for e in history.of("join") if e.node == this.node and e.time > this.began), default=None)
    if back is not None and (end is None or back < end):
        end = max((e.time for e in history.events if e.time < back), default=back)
    return (last, not history.over) if end is None else (end, False)


def _ends(plan: Plan, generation: int) -> bool:
    return plan.generation > generation or (plan.generation == generation and plan.state == "over")


def _generation(
    this: _Told, began: float, ended: float, alive: bool, limit: int | None, history: History
) -> Generation:
    """A generation between `began` and `ended`, of whose steps those up to `limit` count (none: no later one has said)."""
    saves = sorted(this.saves, key=lambda save: (save.step, save.time))
    total, step, exit = _total(this, alive, history)
    known = ended - began
    if total is not None and saves:
        total = {kind: max(total[kind], saves[-1].seconds[kind]) for kind in COUNTED}
    marks = [save.seconds for save in saves] + ([total] if total is not None else [])
    counted = _sum(marks[-1]) if marks else 0.0
    # Of clocks that differ by more than they were thought to, the node's own monotonic one is right about shares.
    scale = min(1.0, known / counted) if counted else 1.0
    # A process counts once it has come so far: what was before is its start-up. What it had counted when a save began says how long that
    # was; the supervisor sees a save a moment later, so the shortest. What is left was after its last count: frozen, for one.
    before = (
        min([known - counted * scale, *(save.time - began - _sum(save.seconds) for save in saves)]) if marks else 0.0
    )
    before = max(before, 0.0)
    pieces, spent, at = [], dict.fromkeys(COUNTED, 0.0), began + before
    kept_step = _kept(this, saves, limit, alive, step, exit)
    kept = kept_step is not None
    if before:
        pieces.append(Piece(began, at, "init", not kept))
    for i, mark in enumerate(marks):
        lost = not kept or (kept_step != EVERYTHING and (i >= len(saves) or saves[i].step > kept_step))  # type: ignore[operator]
        for kind in COUNTED:
            more = max(mark[kind] - spent[kind], 0.0) * scale
            spent[kind] = max(mark[kind], spent[kind])
            if more:
                pieces.append(Piece(at, min(at + more, ended), kind, lost))
                at = min(at + more, ended)
    if ended - at > 1e-9:
        pieces.append(Piece(at, ended, _last_kind(this), kept_step != EVERYTHING))
    seconds = dict.fromkeys(KINDS, 0.0)
    for piece in pieces:
        seconds["lost" if piece.lost else piece.kind] += piece.ended - piece.began
    steps = [save.step for save in saves] + ([step] if step is not None else [])
    return Generation(
        this.number, this.node, began, ended, this.start, max(steps, default=None), exit, tuple(saves), tuple(pieces), seconds
    )  # fmt: skip


EVERYTHING = -1  # instead of a step: all that a generation did counts


def _kept(
    this: _Told, saves: list[Save], limit: int | None, alive: bool, step: int | None, exit: int | None
) -> int | None:
    """The step of the newest save that a later generation built on, EVERYTHING, or none where it built on nothing of this one."""
    if limit is None:
        if alive or exit in GOOD_EXITS:
            return EVERYTHING
        # It failed, and nobody has gone on yet: they will from its newest save.
        return saves[-1].step if saves else None
    # Stopped in good order: what it took is in a last save, which no schedule had due.
    if exit in GOOD_EXITS and step is not None and (this.start or 0) < step <= limit:
        return EVERYTHING
    return max((save.step for save in saves if save.step <= limit), default=None)


def _last_kind(this: _Told) -> str:
    """What a process did after its last count, if its supervisor says in which phase it ended."""
    return KIND_OF.get(this.end.text("phase"), "other") if this.end is not None else "other"


def _sum(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _total(this: _Told, alive: bool, history: History) -> tuple[dict[str, float] | None, int | None, int | None]:
    """What its rank 0 had spent by its end (of a living one: by its last record), at which step, and with which code it ended."""
    if this.end is not None:
        exit = this.end.fields.get("exit")
        good = isinstance(exit, int) and not isinstance(exit, bool)
        return _seconds(this.end.fields.get("seconds")), this.end.whole("step"), exit if good else None
    record = history.records.get(this.node) if alive else None
    rank = record.rank if record is not None and record.generation == this.number else None
    if rank is None:
        return None, None, None
    return (_seconds(rank.seconds) if rank.seconds else None), whole(rank.step), None
