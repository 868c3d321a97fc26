"""Histories of runs that never were, with faults at random moments, and where their time truly went."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.survive.history import History, together
from meshtrain.survive.records import Node, RestartPlan, decode

FREE = ("grow", "preempted")  # kinds of re-forming that are no faults
FAULTS = ("signal", "node", "hang", "error", "memory", *FREE)


@dataclass
class Stretch:
    """Time of one generation's rank 0: what it did, and the step of the last save that began before it did so."""

    generation: int
    kind: str
    seconds: float
    save: int | None


@dataclass
class Synthetic:
    """A run of `nodes` nodes, each with its own clock, through `faults` faults."""

    dice: random.Random
    nodes: int = 4
    faults: int = 3
    skew: float = 3600.0
    now: float = 1.7e9
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    plans: list[dict[str, Any]] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # indices of stretches
    down: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)  # of faults
    stopped: dict[int, int | None] = field(
        default_factory=dict
    )  # by generation: the step of a stop in good order

    def __post_init__(self) -> None:
        self.names = [f"n{i}" for i in range(self.nodes)]
        # The first leader's clock is the history's.
        self.ahead = {
            name: self.dice.uniform(-self.skew, self.skew) if name != "n0" else 0.0
            for name in self.names
        }
        self.began = self.now

    def event(self, writer: str, what: str, **fields: Any) -> None:
        self.lines.setdefault(writer, []).append(
            {"wall": self.now + self.ahead[writer], "event": what, **fields}
        )

    def plan(
        self,
        generation: int,
        state: str,
        kind: str,
        blamed: list[str],
        members: list[str],
        **more: Any,
    ) -> None:
        leader = members[0]
        self.plans.append(
            {
                "number": len(self.plans),
                "generation": generation,
                "state": state,
                "leader": leader,
                "wall": self.now + self.ahead[leader],
                "members": members,
                "mesh": {"data": len(members), "tensor": 1, "pipeline": 1},
                "microbatches": 2,
                "kind": kind,
                "blamed": blamed,
                "reason": f"{kind} of {', '.join(blamed) or 'nobody'}",
                "verdict": "form",
                "code": 0,
                "quarantined": {},
                **more,
            }
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.down += seconds

    def play(self) -> "Synthetic":
        """The whole run, until it is done."""
        for name in self.names:
            self.event(name, "join", incarnation="a", host=name, pid=1)
        for leader in self.names:
            for name in self.names:
                if name != leader and (leader == "n0" or self.dice.random() < 0.5):
                    self.event(
                        leader,
                        "clock",
                        node=name,
                        ahead=self.ahead[name] - self.ahead[leader],
                    )
        saved, kind, blamed = [0], "start", []
        for generation in range(1, self.faults + 2):
            members = self.names[:]
            self.dice.shuffle(members)
            self.wait(self.dice.uniform(0.1, 3))
            self.plan(generation, "forming", kind, blamed, members)
            self.event(
                members[0],
                "formed",
                generation=generation,
                members=members,
                kind=kind,
                reason="",
            )
            self.wait(self.dice.uniform(0.1, 1))
            for rank, name in enumerate(members):
                self.event(name, "started", generation=generation, rank=rank, pid=7)
            kind, blamed = self.live(
                generation, members, saved, generation == self.faults + 1
            )
        self.plan(generation, "over", "done", [], members, code=0)
        self.event(
            members[0], "over", verdict="done", code=0, reason="the last step is taken"
        )
        return self

    def live(
        self, generation: int, members: list[str], saved: list[int], last: bool
    ) -> tuple[str, list[str]]:
        """One generation, until it is done or a fault ends it: what ended it, and who is blamed."""
        dice, rank0 = self.dice, members[0]
        while len(saved) > 1 and dice.random() < 0.1:  # the newest is damaged
            saved.pop()
        start, save = saved[-1], None
        spent = dict.fromkeys(
            ("init", "restore", "compile", "data", "step", "eval", "checkpoint"), 0.0
        )
        for before in range(1, generation):
            self.lose(before, start)

        def spend(what: str, seconds: float) -> None:
            spent[what] += seconds
            self.stretches.append(Stretch(generation, what, seconds, save))
            self.now += seconds

        start_up = dice.uniform(0.5, 5)  # before the process can count
        self.stretches.append(Stretch(generation, "init", start_up, None))
        self.now += start_up
        kind = "done" if last else dice.choice(FAULTS)
        blamed = [dice.choice(members)] if kind not in (*FREE, "done") else []
        early = not last and kind not in FREE and dice.random() < 0.2
        step = start
        for what in ("init", "restore", "compile"):
            spend(what, dice.expovariate(1 / 4))
            if early and dice.random() < 0.5:
                break
        else:
            end = start + dice.randint(1, 40)
            every = dice.randint(3, 9)
            while step < end:
                spend("data", dice.expovariate(10))
                spend("step", dice.uniform(0.5, 2))
                step += 1
                if step == start + 1:
                    self.event(
                        rank0,
                        "going",
                        generation=generation,
                        rank=0,
                        start=start,
                        compile_cached=True,
                    )
                if step % every == 0:
                    self.event(
                        rank0,
                        "save",
                        generation=generation,
                        rank=0,
                        step=step,
                        seconds=dict(spent),
                    )
                    save = step
                    spend("checkpoint", dice.uniform(0.2, 2))
                    saved.append(step)
                    if dice.random() < 0.3:
                        spend("eval", dice.uniform(0.2, 2))
        if kind == "hang":
            # Frozen: time goes by, and it counts none of it.
            self.stretches.append(Stretch(generation, "other", 60.0, save))
            self.now += 60.0
        good, judge = kind in (*FREE, "done"), members[1]
        if kind != "node" or blamed != [rank0]:
            judge = rank0
            self.event(
                rank0,
                "ended",
                generation=generation,
                rank=0,
                exit=(0 if last else 75) if good else -9,
                kind=kind,
                sentence="",
                step=step,
                start=start,
                seconds=dict(spent),
                phase_seconds=60.0 if kind == "hang" else 0.0,
            )
        self.event(
            judge,
            "verdict",
            verdict="form",
            kind=kind,
            generation=generation,
            blamed=blamed,
            step=step,
        )
        self.stopped[generation] = step if good and step > start else None
        if good and step > saved[-1]:
            saved.append(step)
        if not good:
            self.kinds[kind] += 1
        return kind, blamed

    def write(self, run: Path) -> Path:
        """The same as the supervisors' files."""
        at = run / "survive"
        (at / "plans").mkdir(parents=True)
        (at / "nodes").mkdir()
        for node, lines in self.lines.items():
            (at / f"events.{node}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
        for number, plan in enumerate(self.plans):
            (at / "plans" / f"{number:06}.json").write_text(json.dumps(plan))
        for node, record in self.records.items():
            (at / "nodes" / f"{node}.json").write_text(
                json.dumps({"name": node} | record).ljust(4096)
            )
        return run

    def lose(self, generation: int, start: int) -> None:
        """What a generation did after the save that a later one, which goes on from `start`, has built on."""
        stopped = self.stopped[generation]
        if stopped is not None and stopped <= start:
            return
        own = [i for i, s in enumerate(self.stretches) if s.generation == generation]
        kept = [
            i
            for i in own
            if (save := self.stretches[i].save) is not None and save <= start
        ]
        newest = self.stretches[kept[-1]].save if kept else None
        self.lost |= (
            {i for i in own if i > kept[-1] or self.stretches[i].save == newest}
            if kept
            else set(own)
        )

    def truth(self) -> Counter[str]:
        """Seconds by kind."""
        found = Counter({"down": self.down})
        for i, stretch in enumerate(self.stretches):
            found["lost" if i in self.lost else stretch.kind] += stretch.seconds  # type: ignore[assignment]
        return found


def told(
    lines: dict[str, list[dict[str, Any]]],
    plans: Iterable[dict[str, Any]] = (),
    records: dict[str, dict[str, Any]] | None = None,
) -> History:
    """The history of what is in the files."""
    least = {"leader": "n0", "kind": "", "reason": ""}
    decided = [decode(RestartPlan, json.dumps(least | plan).encode()) for plan in plans]
    written = {
        name: json.dumps({"name": name} | record).encode()
        for name, record in (records or {}).items()
    }
    nodes = {
        name: node
        for name, text in written.items()
        if (node := decode(Node, text)) is not None
    }
    return together(lines, [plan for plan in decided if plan is not None], nodes)


def spoilt(line: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """The line of a file; now and then one of its fields is not what it should be."""
    if dice.random() > 0.1:
        return line
    wrong = [
        None,
        -1,
        1e300,
        9e10,
        "x",
        [],
        [3],
        {"step": "much", "eval": -5, "wind": 3},
        True,
        2**70,
        "\x1b[2J",
    ]
    return line | {dice.choice(list(line)): dice.choice(wrong)}
