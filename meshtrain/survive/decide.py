"""What is to be done, as one pure function: decide(now, nodes, plan, history, options) -> (verdict, reason, blamed).

    no plan ──form──► forming ──run──► running ──stop──► stopping
                         ▲                │ form: a fault     │ form: the mesh grows
                         └────────────────┴───────────────────┘
                                          └──► over: done, stopped, refused, given up

Which of several faults explains the others: `causes`. Who keeps the others waiting: `hangs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from signal import SIGTERM
from typing import NamedTuple

from meshtrain.survive.causes import FREE, ORDER, STRIKES, Fault
from meshtrain.survive.hangs import hung, where
from meshtrain.survive.records import End, Node, Plan

DAY = 86400.0
QUARANTINE = 600.0  # seconds for the first time; twice as long each further time
LONGEST_DELAY = 300.0
SAME_STEP = 3  # faults at one step that are a loop
TOGETHER = 0.3  # seconds after which what others tell is no longer of the same moment
STEADY = 10.0  # seconds that a node must be there before it is taken in


@dataclass(frozen=True)
class Options:
    """What the config's section `survive` says, and how many of a number of nodes a mesh would use (None: there is no mesh)."""

    used: Callable[[int], int | None]
    wanted: int = 1
    least: int = 1
    join_timeout: float = 300.0
    step_timeout: float = 0.0
    node_timeout: float = 20.0
    restarts: int = 20
    moving: float = 0.0  # seconds that a slow disk takes for a node's share of a checkpoint

    @property
    def beat(self) -> float:
        """Seconds between two signs of life of a node."""
        return min(2.0, max(0.25, self.node_timeout / 10))


class Decision(NamedTuple):
    """`verdict`: wait, go on, form, run, stop, over. `kind` and `step` are those of the cause; `code` of the end; `members` of a run."""

    verdict: str
    reason: str = ""
    blamed: tuple[str, ...] = ()
    kind: str = ""
    step: int | None = None
    code: int = 0
    members: tuple[str, ...] = ()
    delay: float = 0.0
    quarantined: dict[str, float] | None = None  # None: as before


def decide(now: float, nodes: Sequence[Node], plan: Plan | None, history: Sequence[Plan], options: Options) -> Decision:
    """What the leader does next.

    now: its clock, in seconds; nodes: all it knows of, with the age of their records; plan: the newest; history: all before it, oldest
    first. Nothing is read or changed.
    """
    if plan is None:
        return Decision("form", "the run begins", kind="start")
    if plan.state == "over":
        return Decision("over", plan.reason, code=plan.code)
    if plan.state == "forming":
        return _forming(now, nodes, plan, history, options)
    members = _members(nodes, plan)
    if not any(members):
        return Decision("form", "the run goes on after all of its nodes were gone", kind="start")
    if ended := _ended(members, nodes, plan, options):
        return ended
    fault = _cause([*_ends(members, plan, options), *hung(members, plan, options)], members, plan, options)
    if fault is not None:
        return _after(fault, now, members, plan, history, options)
    if plan.state == "running" and (found := _growth(now, nodes, plan, options)):
        return found
    return Decision("go on")


# --- a generation forms


def _forming(now: float, nodes: Sequence[Node], plan: Plan, history: Sequence[Plan], options: Options) -> Decision:
    heard = [n for n in nodes if n.age < options.node_timeout]
    live = [n for n in heard if not n.leaving]
    # Who leaves need not answer, but its process of the generation before must be gone too.
    if busy := [n.name for n in heard if (n.acked < plan.generation and not n.leaving) or _at_work(n, plan)]:
        what = "to be ready" if plan.kind == "start" else f"to end the process of generation {plan.generation - 1}"
        return Decision("wait", f"for {_names(busy)} {what}")
    if not live:
        return Decision(
            "over", "all nodes were asked to go, run again to go on", kind="stopped", step=plan.step, code=75
        )
    if plan.age < plan.delay:
        return Decision("wait", f"{plan.delay:.0f} s after a fault without progress")
    # Who was ill stands back, as long as the others are enough.
    ill = quarantined(plan, now)
    well = [n for n in live if n.name not in ill]
    chosen = well if len(well) >= options.least and options.used(len(well)) else live
    patient = plan.kind == "start" and len(live) < options.wanted
    use = options.used(len(chosen))
    if len(chosen) < options.least or use is None:
        if plan.age < options.join_timeout:
            return Decision("wait", f"there are {len(live)} nodes, {max(options.least, 1)} are needed")
        reason = f"there are {len(live)} nodes after {options.join_timeout:.0f} s, {max(options.least, 1)} are needed; run again to go on"
        return Decision("over", reason, kind="few", code=75)
    if patient and plan.age < options.join_timeout:
        return Decision("wait", f"there are {len(live)} of {options.wanted} nodes")
    return Decision("run", plan.reason, members=tuple(_ranked(chosen, use, plan, history)))


def _at_work(node: Node, plan: Plan) -> bool:
    return node.state == "running" and node.generation < plan.generation


def _ranked(nodes: Sequence[Node], use: int, plan: Plan, history: Sequence[Plan]) -> list[str]:
    """The names of those who take part, in the order of their ranks: who took part before first, so that little changes.

    After numbers that are not finite the order is turned by one, and spares go first: every shard is computed elsewhere.
    """
    before = next((p.members for p in reversed([*history, plan]) if p.members), [])
    names = {n.name for n in nodes}
    old, new = [name for name in before if name in names], sorted(names - set(before))
    if plan.kind != "numbers":
        return sorted((old + new)[:use])
    return (new + old)[:use] if new else old[1:use] + old[:1]


# --- a generation runs


def _members(nodes: Sequence[Node], plan: Plan) -> list[Node | None]:
    """The nodes of the plan in the order of their ranks; None for one whose supervisor is gone, or another one by now."""
    by_name = {n.name: n for n in nodes}
    found: list[Node | None] = []
    for name, incarnation in zip(plan.members, plan.incarnations, strict=True):
        node = by_name.get(name)
        found.append(node if node is not None and node.incarnation == incarnation else None)
    return found


def _ended(members: Sequence[Node | None], nodes: Sequence[Node], plan: Plan, options: Options) -> Decision | None:
    """What follows when all ended well: the end of the run, or a generation without those who leave."""
    ends = [n.end for n in members if n is not None and n.generation == plan.generation and n.end is not None]
    if len(ends) < len(members) or any(e.exit not in (0, 75) for e in ends):
        return None
    step = max(e.step for e in ends)
    if all(e.exit == 0 for e in ends):
        return Decision("over", "the run is done", kind="done", step=step)
    if plan.state == "stopping":
        return Decision("form", plan.reason, kind=plan.kind, step=step)
    leaving = {n.name for n in members if n is not None and n.leaving}
    left = [n for n in nodes if n.age < options.node_timeout and not n.leaving]
    if leaving and len(left) >= options.least and options.used(len(left)):
        reason = f"{_names(sorted(leaving))} was asked to go, after step {step}"
        return Decision("form", reason, kind="preempted", step=step)
    return Decision(
        "over", f"stopped on request after step {step}, run again to go on", kind="stopped", step=step, code=75
    )


def _ends(members: Sequence[Node | None], plan: Plan, options: Options) -> list[Fault]:
    """Members that are gone, and those whose process ended otherwise than it should."""
    faults = []
    for rank, (name, node) in enumerate(zip(plan.members, members, strict=True)):
        if node is None:
            faults.append(Fault("lost", f"node {name} is gone: another supervisor has its place", (name,)))
        elif node.generation == plan.generation and node.end is not None:
            if _went_early(node, node.end):
                faults.append(Fault("preempted", f"{name} was asked to go before its first step", (), node.end.step))
            elif node.end.exit not in (0, 75):
                faults.append(_fault_of(rank, node, plan))
        elif node.age >= options.node_timeout:
            sentence = f"node {name} ({node.host}) gave no sign of life for {node.age:.1f} s{where(node)}"
            faults.append(Fault("lost", sentence, (name,), _step(node)))
        elif node.generation < plan.generation and plan.age > max(60.0, options.node_timeout):
            faults.append(Fault("lost", f"node {name} ({node.host}) did not start its process", (name,)))
    return faults


def _went_early(node: Node, end: End) -> bool:
    """Whether its process went on request before it had joined the others: they wait for it. Later all stop after the same step."""
    return (end.exit == 75 and node.rank is not None and node.rank.start is None) or (
        end.exit == -SIGTERM and node.leaving
    )


def _fault_of(rank: int, node: Node, plan: Plan) -> Fault:
    end = node.end
    assert end is not None
    blamed = tuple(plan.members[r] for r in end.ranks if 0 <= r < len(plan.members)) if end.ranks else (node.name,)
    if end.kind in ("peer", "numbers", "lock", "port", "config"):
        blamed = ()
    sentence = f"rank {rank} on {node.name} ({node.host}) {end.sentence.rstrip('.')}"
    return Fault(end.kind, sentence, blamed, end.step)


def _cause(faults: Sequence[Fault], members: Sequence[Node | None], plan: Plan, options: Options) -> Fault | None:
    """What explains the others; None as long as there is no fault, or only effects whose cause may still show."""
    if not faults:
        return None
    first = min(faults, key=lambda f: f.order)
    there = [n for n in members if n is not None]
    ends = [n.ended_for for n in there if n.generation == plan.generation and n.end is not None]
    if ends and len(ends) < len(there) and first.order not in (ORDER["lost"], ORDER["frozen"]):
        # Others may be about to tell what came first, or likewise; a node that is silent is told from a slow one by its timeout alone.
        effect = first.order == ORDER["peer"]
        silent = any(n.age > 3 * options.beat for n in there if n.end is None)
        if min(ends) < (3.5 * options.beat if effect else TOGETHER) or (effect and silent):
            return None
    same = [f for f in faults if f.kind == first.kind]
    if len(same) == 1 or not first.blamed:
        return first
    others = f"; likewise {_names([name for f in same[1:] for name in f.blamed])}"
    return replace(
        first, sentence=first.sentence + others, blamed=tuple(dict.fromkeys(name for f in same for name in f.blamed))
    )


def _after(
    fault: Fault, now: float, members: Sequence[Node | None], plan: Plan, history: Sequence[Plan], options: Options
) -> Decision:
    """A new generation, or the end where another one would not help."""
    past = [p for p in [*history, plan] if p.state == "forming" and p.kind not in FREE]
    step = max([_step(n) or 0 for n in members if n is not None], default=0)
    if fault.blamed and fault.step is not None:
        # Who is to blame comes to the same step each time; how far the others come differs by one.
        step = fault.step
    starts = [n.rank.start for n in members if n is not None and n.rank and n.rank.start is not None]
    if not starts and past:
        # It ended before it knew which step to go on from: the run is where it was.
        step = past[-1].step or 0
    if fault.kind in FREE:
        return Decision("form", fault.sentence, kind=fault.kind, step=step)
    given_up = _given_up(fault, step, step > max(starts, default=0), past, now, options)
    if given_up:
        code = 2 if fault.kind == "config" else 3
        return Decision("over", given_up, fault.blamed, "refused" if code == 2 else "given up", step, code)
    loops = 0
    while loops < len(past) and (past[-1 - loops].step or 0) >= step:
        loops += 1
    delay = min(LONGEST_DELAY, 2.0**loops) if loops else 0.0
    until = quarantined(plan, now)
    for name in fault.blamed if fault.kind in STRIKES else ():
        strikes = sum(name in p.blamed and p.kind in STRIKES and now - p.wall < DAY for p in past)
        if strikes or fault.kind == "sick":
            until[name] = now + QUARANTINE * 2 ** max(0, strikes - 1)
    return Decision("form", fault.sentence, fault.blamed, fault.kind, step, delay=delay, quarantined=until)


def _given_up(fault: Fault, step: int, began: bool, past: Sequence[Plan], now: float, options: Options) -> str | None:
    """Why another generation would not help, in a sentence; None if it may."""
    if fault.kind == "config":
        return fault.sentence
    before = past[-1] if past else None
    if fault.kind == "numbers" and before is not None and before.kind == "numbers" and before.step == step:
        return f"{fault.sentence}. It is the same once more, with every rank on another node: the data or the optimizer, not a device"
    if fault.kind in ("error", "memory") and not past and not began:
        return f"{fault.sentence}. It came before the first step, so it is not tried again"
    same = [p for p in past[-(SAME_STEP - 1) :] if p.step == step and p.kind != "lost"]
    if len(same) == SAME_STEP - 1 and fault.kind not in ("lost", "port", "lock"):
        return f"{fault.sentence}. It is fault number {SAME_STEP} in a row at step {step}: a loop"
    recent = sum(now - p.wall < DAY for p in past)
    if recent >= options.restarts:
        return f"{fault.sentence}. The {options.restarts} restarts of survive.restarts are spent"
    return None


def _growth(now: float, nodes: Sequence[Node], plan: Plan, options: Options) -> Decision | None:
    """Takes in nodes that returned, once they have been there for a while, if the mesh would use more than it does."""
    free = [
        n.name for n in nodes
        if n.name not in plan.members and n.state == "idle" and not n.leaving and n.age < options.node_timeout
        and n.known >= STEADY and n.name not in quarantined(plan, now)
    ]  # fmt: skip
    if not free or plan.age < STEADY:
        return None
    more, today = options.used(len(plan.members) + len(free)), len(plan.members)
    if more is None or more <= today:
        return None
    return Decision("stop", f"{_names(free)} can take part: {more} nodes instead of {today}", kind="grow")


def quarantined(plan: Plan, now: float) -> dict[str, float]:
    """Who is left out still, and until when on the clock that says `now`. The plan's times are of its leader's clock, which may be wrong."""
    ahead = plan.wall + plan.age - now
    return {name: until - ahead for name, until in plan.quarantined.items() if until - ahead > now}


def _step(node: Node) -> int | None:
    return node.end.step if node.end else node.rank.step if node.rank else None


def _names(names: Sequence[str]) -> str:
    shown = list(names[:8]) + ([f"{len(names) - 8} more"] if len(names) > 8 else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
