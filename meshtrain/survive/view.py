"""Holds what a supervisor knows of the others: their records with an age, the newest plan, who leads; and whether they
would train alike.

An age is how long a record was seen not to change, on the clock of who reads it: no node's clock is compared with
another's, and time in which the reader itself stood still (frozen, starved, on a disk that hangs) is nobody's age.

    node's record    digests: config, code, python, jax, jaxlib, ...        compared by each who reads it
    NAME.config      the config in full                                     read where digests differ, to name the key

A leader decides with its own config and code.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from meshtrain.config import Config, imports, short
from meshtrain.config.follow import differences
from meshtrain.errors import ConfigError
from meshtrain.run.rows import parse
from meshtrain.run.versions import source_digest, versions
from meshtrain.survive.child import kill_left_behind
from meshtrain.survive.records import Node, RestartPlan, SupervisorOptions, decode
from meshtrain.survive.store import Store, other_supervisor

SKEW = 5.0  # seconds by which a clock may be wrong without a warning
READ_SHARE = (
    # Of its time, at most, a supervisor reads records; but at least twice a heartbeat
    0.002
)
LONGEST_LOOK = 1.0  # seconds between two looks; what is beyond it, was no looking
MOST_KEYS = 4  # that are named of a config that differs


class View:
    """One supervisor's view of the run."""

    def __init__(self, store: Store, options: SupervisorOptions) -> None:
        self.store = store
        self.options = options
        self.nodes: list[Node] = []
        self.history: list[RestartPlan] = []
        self.plan: RestartPlan | None = None
        self._texts: dict[str, bytes] = {}
        self._records: dict[str, Node] = {}
        self._changed: dict[
            str, float
        ] = {}  # when a record changed last; not in it: not since we look
        self._differs: dict[str, str] = {}
        self._first: dict[str, float] = {}
        # When the process of a node, its incarnation and generation was seen to have ended.
        self._ended: dict[tuple[str, str, int], float] = {}
        self._plan_since = 0.0
        # The newest plan when we began, if the run was over by then
        self._old: int | None = None
        self._clocks: dict[str, float] = {}
        self._next_read = 0.0
        self._looked: float | None = None
        # Seconds spent looking, up to the last reading, of which ages are; and since.
        self._watched = self._unread = 0.0

    # --- reading

    def look(self, now: float, own: Node) -> None:
        """Reads what has changed."""
        self._look_at_plans(now)
        self._unread += (
            min(now - self._looked, LONGEST_LOOK) if self._looked is not None else 0.0
        )
        self._looked = now
        if now >= self._next_read:
            self._watched = self._watched + self._unread
            self._unread = 0.0
            began = time.thread_time()
            self._read(own)
            self._next_read = now + min(
                (time.thread_time() - began) / READ_SHARE, self.options.heartbeat / 2
            )
        self._first.setdefault(own.name, self._watched)
        others = [node for node in self._records.values() if node.name != own.name]
        timed = [
            self._timed(node, self._age(node), self._differs[node.name])
            for node in others
        ]
        self.nodes = sorted(
            [*timed, self._timed(own, 0.0, own.differs)], key=lambda n: n.name
        )

    def _look_at_plans(self, now: float) -> None:
        """Reads the newest plan, and those since a run was over last."""
        plans = self.store.plans()
        newest = plans[-1] if plans else None
        if self._old is None:
            self._old = newest.number if newest and newest.state == "over" else 0
        if newest and (self.plan is None or newest.number != self.plan.number):
            self._plan_since = self._next_read = now
        over = max(
            (i for i, p in enumerate(plans[:-1]) if p.state == "over"), default=-1
        )
        self.plan = replace(newest, age=now - self._plan_since) if newest else None
        self.history = plans[over + 1 : -1]

    def _timed(self, node: Node, age: float, differs: str) -> Node:
        ended_for = 0.0
        if node.end is not None:
            process = (node.name, node.incarnation, node.generation)
            ended_for = self._watched - self._ended.setdefault(process, self._watched)
        known = self._watched - self._first.get(node.name, self._watched)
        return replace(node, age=age, known=known, ended_for=ended_for, differs=differs)

    def _age(self, node: Node) -> float:
        if node.name in self._changed:
            return self._watched - self._changed[node.name]
        return float("inf")

    def _read(self, own: Node) -> None:
        for name, text in self.store.nodes().items():
            if text == self._texts.get(name):
                continue
            node = decode(Node, text)
            before = self._records.get(name)
            # In the middle of being rewritten, or damaged: what stood there before holds, and ages.
            if node is None or node.name != name:
                continue
            is_new = before is None or node.incarnation != before.incarnation
            if before is not None:
                self._changed[name] = self._watched
                if name not in self._first or is_new:
                    self._first[name] = self._watched
            if node.digests == own.digests:
                self._differs[name] = ""
            elif is_new:
                configs = self.store.read_config(name), self.store.read_config(own.name)
                self._differs[name] = difference(node, own, *configs)
            self._texts[name] = text
            self._records[name] = node

    # --- what follows from it

    def is_leader(self, own: Node, since: float) -> bool:
        """Returns whether this node leads: it has the lowest name of the live nodes that stay.

        It does not lead before it knows who is alive.
        """
        unheard = {n.name for n in self.nodes if n.name not in self._changed} - {
            own.name
        }
        at_work = (
            self.plan is not None
            and self.plan.state != "over"
            and unheard & set(self.plan.members)
        )
        # A node that has just come may not take a node of the run for gone sooner than one that has watched it all the
        # time.
        if unheard and since < (
            self.options.node_timeout if at_work else 2.5 * self.options.heartbeat
        ):
            return False
        return own.name == min(self._live(), key=lambda n: (n.leaving, n.name)).name

    def is_first(self, own: Node) -> bool:
        """Returns whether this node will have the coordinator, as far as can be known: it has the lowest name of the
        live nodes.
        """
        return own.name == min(n.name for n in self._live())

    def _live(self) -> list[Node]:
        return [n for n in self.nodes if n.age < self.options.node_timeout]

    def is_old(self, plan: RestartPlan) -> bool:
        """Returns whether a plan is of a run that was over before this supervisor began."""
        return plan.number <= (self._old or 0)

    @property
    def generation(self) -> int:
        """The last generation that there was, in this run or in one before it."""
        return self.plan.generation if self.plan else 0

    def may_go(self, own: Node) -> bool:
        """Returns whether a node that leaves is needed no longer: its process has ended, and others decide, or it
        stands alone.
        """
        if own.state == "running":
            return False
        plan = self.plan
        others = [n for n in self._live() if n.name != own.name]
        if not others and (
            plan is None or plan.state == "forming" or self.is_old(plan)
        ):
            return True
        if all(n.leaving for n in others):
            return False
        if plan is None or own.name not in plan.members:
            return True
        return plan.state in ("forming", "over") or plan.generation > own.generation

    def new_clocks(self) -> list[tuple[str, float]]:
        """Returns nodes whose clock is wrong, with the seconds by which it is ahead of this one's; each once."""
        wrong = []
        for node in self.nodes:
            if node.name not in self._changed or node.age > 1.0:
                continue
            ahead = node.wall - (time.time() - node.age)
            if abs(ahead - self._clocks.get(node.name, 0.0)) > SKEW:
                self._clocks[node.name] = ahead
                wrong.append((node.name, ahead))
        return wrong

    def refuse_stranger(self, own: Node) -> None:
        """Raises ConfigError if a node joins others that are at work, and its config, code or versions differ from
        theirs.
        """
        if self.plan is None or self.plan.state == "over" or self.is_old(self.plan):
            return
        last = next(
            (
                plan
                for plan in (self.plan, *reversed(self.history))
                if plan.incarnations
            ),
            None,
        )
        members = (
            set(zip(last.members, last.incarnations, strict=True)) if last else set()
        )
        if (own.name, own.incarnation) in members:
            return
        for node in self._live():
            if node.differs and (node.name, node.incarnation) in members:
                raise ConfigError(f"{node.differs}.")

    def refuse_twin(self, name: str) -> None:
        """Raises ConfigError if another supervisor is at work under this name.

        One that is silent may be frozen, its process at work until the lease has run out: that is waited for.
        """
        text = self.store.nodes().get(name, b"")
        node = decode(Node, text)
        if node is None:
            return
        is_here = bool(node.machine) and node.machine == this_machine()
        if is_here and not Path(f"/proc/{node.pid}").exists():
            return
        seconds = (
            self.options.node_timeout
            if node.state == "running"
            else 2.5 * self.options.heartbeat
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.store.nodes().get(name) != text:
                raise other_supervisor(node, self.store.root)
            time.sleep(0.1)
        if is_here:
            kill_left_behind(node, self.store.root)


def this_machine() -> str:
    """Returns where a process number means one process: this start of this machine, this container.

    Hosts' names may be those of others.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    # No Linux: whether a process is gone is not known.
    except OSError:
        return ""


# --- whether nodes would train alike


def config_text(config: Config) -> str:
    """Returns what must be the same on all nodes, as JSON."""
    values = dataclasses.asdict(config)
    # A node may know the run's directory by another path.
    del values["run"]["directory"]
    return json.dumps(values)


def digests(config: Config) -> dict[str, str]:
    """Returns digests of a node's config and code, and the versions of its libraries."""
    text = hashlib.sha256(config_text(config).encode()).hexdigest()
    # The source identifies meshtrain: a checkout has no version, or another installation's.
    libraries = {
        name: version for name, version in versions().items() if name != "meshtrain"
    }
    own = {"config": text[:16], "code": source_digest()[:16]}
    if config.run.imports or imports.plugins():
        own["run.imports"] = imports.digest(config.run.imports)[:16]
    return own | libraries


def difference(node: Node, own: Node, their_config: bytes, own_config: bytes) -> str:
    """Returns a sentence on how a node differs from this one; empty if it does not.

    A config is empty where there is none.
    """
    theirs, ours = (defaultdict(lambda: "unknown", one.digests) for one in (node, own))
    names = sorted({*theirs, *ours})
    differ = {
        name: (theirs[name], ours[name]) for name in names if theirs[name] != ours[name]
    }
    parts = []
    if differ.pop("config", None):
        keys = [
            f"{key} is {short(str(theirs))} on {node.name} and {short(str(ours))} on {own.name}"
            for key, ours, theirs in differences(
                parse(own_config) or {}, parse(their_config) or {}
            )
        ]
        more = (
            [f"{len(keys) - MOST_KEYS} more keys differ"]
            if len(keys) > MOST_KEYS
            else []
        )
        parts += [*keys[:MOST_KEYS], *more] or ["its config is another"]
    if differ.pop("code", None):
        parts.append("its meshtrain is of other source code")
    parts += [
        f"{name} is {theirs} on {node.name} and {ours} on {own.name}"
        for name, (theirs, ours) in differ.items()
    ]
    if not parts:
        return ""
    fits = f"node {node.name} ({node.host}) does not fit node {own.name} ({own.host})"
    return f"{fits}: {'; '.join(parts)}; give all nodes of a run the same config, code and versions"
