"""Leads a run: asks `decide`, writes the decision where all read it, and reports events that need no decision.

    records of all nodes, newest plan ──decide──► form: all processes end        ──► run: members, mesh, config
                                             └──► stop: a checkpoint, then form  └─► over: all supervisors end

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
from meshtrain.run.lock import holder
from meshtrain.survive.console import report
from meshtrain.survive.decide import Decision, decide, quarantined
from meshtrain.survive.forming import formed
from meshtrain.survive.records import Node, RestartPlan, SupervisorOptions
from meshtrain.survive.store import Store, config_of
from meshtrain.survive.stragglers import Stragglers
from meshtrain.survive.view import View


class Leader:
    """The leader's part of one supervisor."""

    def __init__(
        self,
        config: Config,
        run: Path,
        store: Store,
        view: View,
        options: SupervisorOptions,
    ) -> None:
        self.config = config
        self.run = run
        self.store = store
        self.view = view
        self.options = options
        self.stragglers = Stragglers()
        self.leads = False
        self._waits = ""  # for what, as it was reported
        self._shape = ""  # the newest mesh, as a sentence
        self._cleared = 0  # the newest generation of which `cleared` was reported

    def lead(self, node: Node, since: float) -> None:
        """Decides what follows from the view, if it is the turn of `node`, whose supervisor began `since` seconds
        ago.
        """
        if not self.view.is_leader(node, since):
            self.leads = False
            return
        if not self.leads:
            self.leads = True
            self.store.log("lead")
        self._report()
        plan = self.view.plan
        options = self.options
        if plan is not None and plan.state == "over" and self.view.is_old(plan):
            plan = None
        if plan is not None and plan.state == "forming":
            options = replace(options, holder=holder(self.run))
        decision = decide(
            time.time(), self.view.nodes, plan, self.view.history, options
        )
        waits = decision.reason if decision.verdict == "wait" else ""
        if waits and waits != self._waits:
            report(f"waiting: {waits}.")
        self._waits = waits
        is_over = plan is not None and plan.state == "over"
        if decision.verdict in ("form", "run", "stop") or (
            decision.verdict == "over" and not is_over
        ):
            self._propose(decision, plan, node)

    def _propose(
        self, decision: Decision, plan: RestartPlan | None, node: Node
    ) -> None:
        now = time.time()
        verdict = decision.verdict
        generation = plan.generation if plan else self.view.generation
        kept = quarantined(plan, now) if decision.quarantined is None and plan else {}
        fields: dict[str, Any] = {
            "number": self.store.next_number,
            "generation": generation,
            "leader": node.name,
            "wall": now,
            "kind": decision.kind,
            "reason": decision.reason,
            "verdict": verdict,
            "blamed": list(decision.blamed),
            "step": decision.step,
            "code": decision.code,
            "delay": decision.delay,
            "quarantined": decision.quarantined or kept,
        }
        if verdict == "form":
            members = plan.members if plan else []
            new = RestartPlan(
                **fields
                | {"generation": generation + 1, "state": "forming", "members": members}
            )
        else:
            assert plan is not None
            if verdict == "run":
                new = self._formed(decision, plan, fields)
            else:
                new = replace(
                    plan, **fields, state="stopping" if verdict == "stop" else "over"
                )
        if self.store.propose(new):
            self._announce(new, fields)
            self.view.look(time.monotonic(), node)

    def _announce(self, new: RestartPlan, fields: dict[str, Any]) -> None:
        """Logs and prints a plan that was written."""
        if new.verdict == "run":
            shown = ("generation", "members", "mesh", "microbatches", "kind", "reason")
            self.store.log("formed", **{name: getattr(new, name) for name in shown})
            report(
                f"generation {new.generation} on {', '.join(new.members)}: {self._shape}."
            )
        else:
            blamed = f" (blamed: {', '.join(new.blamed)})" if new.blamed else ""
            report(f"{new.reason}{blamed}." if new.reason else f"{new.verdict}.")
            logged = (
                "verdict",
                "kind",
                "reason",
                "blamed",
                "generation",
                "step",
                "code",
            )
            self.store.log(
                "over" if new.verdict == "over" else "verdict",
                **{name: fields[name] for name in logged},
            )

    def _formed(
        self, decision: Decision, plan: RestartPlan, fields: dict[str, Any]
    ) -> RestartPlan:
        generation = formed(self.config, len(decision.members))
        assert generation is not None, "options.used has said that there is a mesh"
        by_name = {n.name: n for n in self.view.nodes}
        self._shape = generation.sentence
        members = list(decision.members[: generation.nodes])
        config = replace(
            generation.config,
            run=replace(generation.config.run, directory=str(self.run)),
        )
        first = by_name[members[0]]
        host = f"[{first.address}]" if ":" in first.address else first.address  # IPv6
        cause = {
            name: getattr(plan, name) for name in ("kind", "blamed", "step", "delay")
        }
        new = RestartPlan(
            **fields | cause,
            state="running",
            members=members,
            incarnations=[by_name[m].incarnation for m in members],
            coordinator=f"{host}:{first.port}",
            mesh=config.mesh.shape,
            microbatches=config.parallel.microbatches,
        )
        self.store.generation(new.generation)
        write_atomically(config_of(self.store.root, new), to_yaml(config).encode())
        return new

    def _report(self) -> None:
        for name, ahead in self.view.new_clocks():
            self.store.log("clock", node=name, ahead=ahead)
            report(
                f"the clock of {name} is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'} of this node's."
            )
        plan = self.view.plan
        if plan is None or plan.state != "running":
            return
        if self.stragglers.generation != plan.generation:
            self.stragglers = Stragglers(plan.generation)
        for name, score, sentence in self.stragglers.look(self.view.nodes, plan):
            self.store.log(
                "straggler",
                generation=plan.generation,
                node=name,
                score=score,
                sentence=sentence,
            )
            report(sentence)
        if self._cleared < plan.generation and (
            sentence := cleared(self.view.nodes, plan) or ""
        ):
            self._cleared = plan.generation
            self.store.log("sick", generation=plan.generation, sentence=sentence)
            report(sentence)


def cleared(nodes: Sequence[Node], plan: RestartPlan) -> str | None:
    """Returns a sentence when a step has finite numbers that had none in the generation before, with each shard
    computed elsewhere.
    """
    ranks = [
        n.rank
        for n in nodes
        if n.name in plan.members and n.generation == plan.generation and n.rank
    ]
    if plan.kind != "numbers" or plan.step is None or len(ranks) < len(plan.members):
        return None
    if min(rank.step for rank in ranks) <= plan.step:
        return None
    return (
        f"step {plan.step} has finite numbers now that every rank is on another node: a device computed wrongly, not "
        "the data; which one "
        "cannot be told."
    )


def sizes(config: Config) -> Callable[[int], int | None]:
    """Returns how many of a number of nodes a run of `config` would use, as a function; None if there is no mesh for
    them.
    """

    @cache
    def used(nodes: int) -> int | None:
        generation = formed(config, nodes) if nodes > 0 else None
        return generation.nodes if generation else None

    return used
