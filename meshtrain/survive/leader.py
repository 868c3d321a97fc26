"""What the leader does: asks `decide`, writes what it decided where all read it, and reports what needs no decision.

    records of all nodes, newest plan ──decide──► form: everybody ends its process ──► run: members, mesh, config, coordinator
                                             └──► stop: a checkpoint, then form      └──► over: everybody ends

Every supervisor has one; that of the live node with the lowest name is at work.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshtrain.config import Config, to_yaml
from meshtrain.files import write_atomically
from meshtrain.survive.decide import Decision, Options, decide, quarantined
from meshtrain.survive.forming import formed
from meshtrain.survive.records import Node, Plan
from meshtrain.survive.store import Store
from meshtrain.survive.stragglers import Stragglers
from meshtrain.survive.view import View
from meshtrain.survive.words import say


class Leader:
    """Of one supervisor."""

    def __init__(self, config: Config, run: Path, store: Store, view: View, options: Options) -> None:
        self.config, self.run, self.store, self.view, self.options = config, run, store, view, options
        self.stragglers = Stragglers()
        self.leads = False
        self.waits = ""  # for what, as it was said
        self._shape = ""  # of the newest mesh, in words
        self._cleared = 0  # the newest generation of which it was said that it computes what another did not

    def lead(self, node: Node, since: float) -> None:
        """What follows from what is known, if it is the turn of `node`, whose supervisor began `since` seconds ago."""
        if not self.view.is_leader(node, since):
            self.leads = False
            return
        if not self.leads:
            self.leads = True
            self.store.say("lead")
        self._report()
        plan = self.view.plan
        if plan is not None and plan.state == "over" and self.view.is_old(plan):
            plan = None
        decision = decide(time.time(), self.view.nodes, plan, self.view.history, self.options)
        if decision.verdict == "wait" and decision.reason != self.waits:
            say(f"waiting: {decision.reason}.")
        self.waits = decision.reason if decision.verdict == "wait" else ""
        if decision.verdict in ("form", "run", "stop") or (
            decision.verdict == "over" and not (plan and plan.state == "over")
        ):
            self._propose(decision, plan, node)

    def _propose(self, decision: Decision, plan: Plan | None, node: Node) -> None:
        now, number, generation = time.time(), self.store.next_number, plan.generation if plan else self.view.generation
        what: dict[str, Any] = {
            "number": number, "generation": generation, "leader": node.name, "wall": now, "kind": decision.kind,
            "reason": decision.reason, "verdict": decision.verdict, "blamed": list(decision.blamed), "step": decision.step,
            "code": decision.code, "delay": decision.delay,
            "quarantined": quarantined(plan, now) if decision.quarantined is None and plan else decision.quarantined or {},
        }  # fmt: skip
        if decision.verdict == "form":
            new = Plan(
                **what | {"generation": generation + 1, "state": "forming", "members": plan.members if plan else []}
            )
        elif decision.verdict == "run":
            assert plan is not None
            new = self._formed(decision, plan, what)
        else:
            assert plan is not None
            new = replace(plan, **what, state="stopping" if decision.verdict == "stop" else "over")
        if not self.store.propose(new):
            return
        if decision.verdict == "run":
            self.store.say(
                "formed", generation=new.generation, members=new.members, mesh=new.mesh, microbatches=new.microbatches, kind=new.kind,
                reason=new.reason,
            )  # fmt: skip
            say(f"generation {new.generation} on {', '.join(new.members)}: {self._shape}.")
        else:
            blamed = f" (blamed: {', '.join(new.blamed)})" if new.blamed else ""
            say(f"{new.reason}{blamed}." if new.reason else f"{new.verdict}.")
            self.store.say(
                "over" if decision.verdict == "over" else "verdict", verdict=decision.verdict, kind=decision.kind, reason=decision.reason,
                blamed=list(decision.blamed), generation=generation, step=decision.step, code=decision.code,
            )  # fmt: skip
        self.view.look(time.monotonic(), node)

    def _formed(self, decision: Decision, plan: Plan, what: dict[str, Any]) -> Plan:
        """The plan of a generation that runs, and its config beside it."""
        by_name = {n.name: n for n in self.view.nodes}
        found = formed(self.config, len(decision.members))
        assert found is not None, "options.used said that there is a mesh"
        self._shape, members = found.sentence, list(decision.members[: found.nodes])
        first = by_name[members[0]]
        config = replace(found.config, run=replace(found.config.run, directory=str(self.run)))
        kept = {name: getattr(plan, name) for name in ("kind", "blamed", "step", "delay")}
        new = Plan(
            **what | kept | {
                "state": "running", "members": members, "incarnations": [by_name[m].incarnation for m in members],
                "coordinator": _reached_at(first), "mesh": config.mesh.shape, "microbatches": config.parallel.microbatches,
            }
        )  # fmt: skip
        write_atomically(self.store.config(new), to_yaml(config).encode())
        return new

    def _report(self) -> None:
        """What is to be reported, though nothing is to be done: clocks, slow ranks."""
        for name, ahead in self.view.new_clocks():
            self.store.say("clock", node=name, ahead=ahead)
            say(f"the clock of {name} is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'} of this node's.")
        plan = self.view.plan
        if plan is not None and plan.state == "running":
            for node, score, sentence in self.stragglers.look(self.view.nodes, plan):
                self.store.say("straggler", generation=plan.generation, node=node, score=score, sentence=sentence)
                say(sentence)
            if self._cleared < plan.generation and (found := cleared(self.view.nodes, plan)):
                self._cleared = plan.generation
                self.store.say("sick", generation=plan.generation, sentence=found)
                say(found)


def cleared(nodes: Sequence[Node], plan: Plan) -> str | None:
    """What is said when a step has finite numbers that had none in the generation before, where each shard was computed elsewhere."""
    ranks = [n.rank for n in nodes if n.name in plan.members and n.generation == plan.generation and n.rank]
    if plan.kind != "numbers" or plan.step is None or len(ranks) < len(plan.members):
        return None
    if min(rank.step for rank in ranks) <= plan.step:
        return None
    return (
        f"step {plan.step} has finite numbers now that every rank is on another node: a device computed wrongly, not the data; which one "
        "cannot be told."
    )


def sizes(config: Config) -> Callable[[int], int | None]:
    """How many of a number of nodes a run of `config` would use; None if there is no mesh for them."""

    @cache
    def used(nodes: int) -> int | None:
        found = formed(config, nodes) if nodes > 0 else None
        return found.nodes if found else None

    return used


def _reached_at(node: Node) -> str:
    """Where the coordinator is reached: host:port, an IPv6 address in brackets."""
    return f"[{node.address}]:{node.port}" if ":" in node.address else f"{node.address}:{node.port}"
