"""What a supervisor knows of the others: their records with an age, the newest plan, who leads.

An age is how long a record was seen not to change, on the clock of who reads it: no node's clock is compared with another's, and time
in which the reader itself stood still (frozen, starved, on a disk that hangs) is nobody's age.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from meshtrain.survive.decide import Options
from meshtrain.survive.records import Node, Plan, decode
from meshtrain.survive.store import Store, twin

SKEW = 5.0  # seconds by which a clock may be wrong without a word
READ_SHARE = 0.002  # of its time, at most, a supervisor reads records; but at least twice a beat
LONGEST_LOOK = 1.0  # seconds between two looks; what is beyond it, was no looking


class View:
    """Of one supervisor, whose incarnation it is."""

    def __init__(self, store: Store, options: Options, incarnation: str) -> None:
        self.store, self.options, self.incarnation = store, options, incarnation
        self.nodes: list[Node] = []
        self.history: list[Plan] = []
        self.plan: Plan | None = None
        self._texts: dict[str, bytes] = {}
        self._records: dict[str, Node] = {}
        self._changed: dict[str, float] = {}  # when a record changed last; not in it: not since we look
        self._first: dict[str, float] = {}
        # When the process of a node, its incarnation and generation was seen to have ended.
        self._ended: dict[tuple[str, str, int], float] = {}
        self._plan_since = 0.0
        self._old: int | None = None  # the newest plan when we began, if the run was over by then
        self._clocks: dict[str, float] = {}
        self._told: Node | None = None
        self._next_read = 0.0
        self._looked: float | None = None
        # Seconds spent looking, up to the last reading, of which ages are; and since.
        self._watched = self._unread = 0.0

    # --- reading

    def look(self, now: float, own: Node) -> None:
        """Reads what has changed."""
        plans = self.store.plans()
        if self._old is None:
            self._old = plans[-1].number if plans and plans[-1].state == "over" else 0
        newest = plans[-1] if plans else None
        if newest and (self.plan is None or newest.number != self.plan.number):
            self._plan_since = now
            self._next_read = now
        over = max((i for i, p in enumerate(plans[:-1]) if p.state == "over"), default=-1)
        self.plan = replace(newest, age=now - self._plan_since) if newest else None
        self.history = plans[over + 1 : -1]
        self._unread += min(now - self._looked, LONGEST_LOOK) if self._looked is not None else 0.0
        self._looked = now
        if now >= self._next_read:
            self._watched, self._unread = self._watched + self._unread, 0.0
            began = time.thread_time()
            self._read()
            self._next_read = now + min((time.thread_time() - began) / READ_SHARE, self.options.beat / 2)
        self.nodes = [
            replace(record, age=self._age(name), known=self._known(name), ended_for=self._ended_for(record))
            for name, record in sorted(self._records.items())
            if name != own.name
        ]
        self._first.setdefault(own.name, self._watched)
        self.nodes = sorted(
            [*self.nodes, replace(own, age=0.0, known=self._known(own.name), ended_for=self._ended_for(own))],
            key=lambda n: n.name,
        )

    def _read(self) -> None:
        for name, text in self.store.nodes().items():
            if text == self._texts.get(name):
                continue
            node = decode(Node, text)
            # In the middle of being rewritten, or damaged: what it said before holds, and ages.
            if node is None or node.name != name:
                continue
            if name in self._texts or text == b"":
                self._changed[name] = self._watched
                before = self._records[name]
                if name not in self._first or node.incarnation != before.incarnation:
                    self._first[name] = self._watched
            self._texts[name], self._records[name] = text, node

    def _age(self, name: str) -> float:
        return self._watched - self._changed[name] if name in self._changed else float("inf")

    def _known(self, name: str) -> float:
        return self._watched - self._first.get(name, self._watched)

    def _ended_for(self, node: Node) -> float:
        if node.end is None:
            return 0.0
        of = (node.name, node.incarnation, node.generation)
        return self._watched - self._ended.setdefault(of, self._watched)

    # --- writing

    def changed(self, node: Node) -> bool:
        """Whether a node's record says something new besides its ages."""
        told = self._told
        if told is None:
            return True
        if _news(node) != _news(told):
            return True
        # Who was slow and no longer is must not be taken for stuck.
        return bool(node.rank and told.rank and told.rank.phase_age > self.options.beat > node.rank.phase_age)

    def published(self, node: Node) -> None:
        self._told = node

    # --- what follows from it

    def is_leader(self, own: Node, since: float) -> bool:
        """Whether this node leads: of the live ones that stay it has the lowest name. Not before it knows who is alive."""
        unheard = {n.name for n in self.nodes if n.name not in self._changed} - {own.name}
        at_work = self.plan is not None and self.plan.state != "over" and unheard & set(self.plan.members)
        # Who has just come may not take a node of the run for gone sooner than one who has watched it all the time.
        if unheard and since < (self.options.node_timeout if at_work else 2.5 * self.options.beat):
            return False
        live = [n for n in self.nodes if n.age < self.options.node_timeout]
        return own.name == min(live, key=lambda n: (n.leaving, n.name)).name

    def is_first(self, own: Node) -> bool:
        """Whether this node will hold the coordinator, as far as can be told: of the live ones it has the lowest name."""
        return own.name == min(n.name for n in self.nodes if n.age < self.options.node_timeout)

    def is_old(self, plan: Plan) -> bool:
        """Whether a plan is of a run that was over before this supervisor began."""
        return plan.number <= (self._old or 0)

    @property
    def generation(self) -> int:
        """The last one that there was, in this run or in one before it."""
        return self.plan.generation if self.plan else 0

    def may_go(self, own: Node) -> bool:
        """Whether a node that leaves is needed no longer: its process has ended, and others decide, or it stands alone."""
        if own.state == "running":
            return False
        plan = self.plan
        live = [n for n in self.nodes if n.name != own.name and n.age < self.options.node_timeout]
        if not live and (plan is None or plan.state == "forming" or self.is_old(plan)):
            return True
        stay = any(not n.leaving for n in live)
        return stay and (
            plan is None
            or own.name not in plan.members
            or plan.state in ("forming", "over")
            or plan.generation > own.generation
        )

    def new_clocks(self) -> list[tuple[str, float]]:
        """Nodes whose clock is wrong, with the seconds by which it is ahead of this one's; each once."""
        found = []
        for node in self.nodes:
            if node.name not in self._changed or node.age > 1.0:
                continue
            ahead = node.wall - (time.time() - node.age)
            if abs(ahead - self._clocks.get(node.name, 0.0)) > SKEW:
                self._clocks[node.name] = ahead
                found.append((node.name, ahead))
        return found

    def refuse_twin(self, name: str) -> None:
        """ConfigError if another supervisor is at work under this name.

        One that is silent may be frozen, its process at work until the lease has run out: that is waited for.
        """
        texts = self.store.nodes()
        node = decode(Node, texts.get(name, b""))
        if node is None:
            return
        if node.machine and node.machine == this_machine() and not Path(f"/proc/{node.pid}").exists():
            return
        deadline = time.monotonic() + (
            self.options.node_timeout if node.state == "running" else 2.5 * self.options.beat
        )
        while time.monotonic() < deadline:
            if self.store.nodes().get(name) != texts[name]:
                raise twin(node, self.store.root)
            time.sleep(0.1)


def this_machine() -> str:
    """Where a process number means one process: since this start of this machine, in this container. Hosts' names may be those of others."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    # No Linux: whether a process is gone is not known.
    except OSError:
        return ""


def _news(node: Node) -> tuple[object, ...]:
    """What others are to hear at once."""
    return node.state, node.generation, node.acked, node.leaving, node.end
