"""Decides what is to be done, as one pure function: decide(now, nodes, plan, history, options) -> (verdict, reason,
blamed).

    no plan ──form──► forming ──run──► running ──stop──► stopping
                         ▲                │ form: a fault     │ form: the mesh grows
                         └────────────────┴───────────────────┘
                                          └──► over: done, stopped, refused, given up

Faults, and which of several explains the others: `detectors`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from meshtrain.survive.detectors import (
    FREE,
    ORDER,
    STRIKES,
    Fault,
    Members,
    ended,
    hung,
    last_step,
)
from meshtrain.survive.records import Node, RestartPlan, SupervisorOptions

DAY = 86400.0
QUARANTINE = 600.0  # seconds for the first time; twice as long each further time
LONGEST_DELAY = 300.0
SAME_STEP = 3  # faults at one step that are a loop
TOGETHER = 0.3  # seconds after which other reports are no longer of the same moment
LOCKED = 5.0  # seconds until a lock that was held is tried again
STEADY = 10.0  # seconds that a node must be there before it is taken in

Plans = Sequence[RestartPlan]


class Decision(NamedTuple):
    """`verdict`: wait, go on, form, run, stop, over.

    `kind` and `step` are those of the cause; `code` of the end; `members` of a run.
    """

    verdict: str
    reason: str = ""
    blamed: tuple[str, ...] = ()
    kind: str = ""
    step: int | None = None
    code: int = 0
    members: tuple[str, ...] = ()
    delay: float = 0.0
    quarantined: dict[str, float] | None = None  # None: as before


def decide(
    now: float,
    nodes: Sequence[Node],
    plan: RestartPlan | None,
    history: Plans,
    options: SupervisorOptions,
) -> Decision:
    """Returns what the leader does next.

    now: its clock, in seconds; nodes: all it knows of, with the age of their records; plan: the newest; history: all
    before it, oldest first. Nothing is read or changed.
    """
    if plan is None:
        return Decision("form", "the run begins", kind="start")
    if plan.state == "over":
        return Decision("over", plan.reason, code=plan.code)
    if plan.state == "forming":
        return _forming(now, nodes, plan, history, options)
    incarnations = {(n.name, n.incarnation): n for n in nodes}
    members = [
        incarnations.get(member)
        for member in zip(plan.members, plan.incarnations, strict=True)
    ]
    if not any(members):
        return Decision(
            "form", "the run goes on after all of its nodes were gone", kind="start"
        )
    if decision := _all_ended_well(members, nodes, plan, options):
        return decision
    fault = _cause(
        [*ended(members, plan, options), *hung(members, plan, options)],
        members,
        plan,
        options,
    )
    if fault is not None:
        return _after(fault, now, members, plan, history, options)
    if plan.state == "running" and (decision := _growth(now, nodes, plan, options)):
        return decision
    return Decision("go on")


# --- a generation forms


def _forming(
    now: float,
    nodes: Sequence[Node],
    plan: RestartPlan,
    history: Plans,
    options: SupervisorOptions,
) -> Decision:
    heard = [n for n in nodes if n.age < options.node_timeout]
    strangers = [n for n in heard if n.differs and not n.leaving]
    if strangers and plan.kind == "start":
        return Decision("over", strangers[0].differs, kind="refused", code=2)
    # Strangers come to a run that is at work, and end by themselves.
    live = [n for n in heard if not n.leaving and not n.differs]

    # A node that leaves need not answer, but its process of the generation before must be gone too.
    def is_busy(node: Node) -> bool:
        at_work = node.state == "running" and node.generation < plan.generation
        return at_work or (node.acked < plan.generation and not node.leaving)

    if busy := [n.name for n in heard if is_busy(n)]:
        what = (
            "to be ready"
            if plan.kind == "start"
            else f"to end the process of generation {plan.generation - 1}"
        )
        return Decision("wait", f"for {_names(busy)} {what}")
    if not live:
        reason = "all nodes were asked to go, run again to go on"
        return Decision("over", reason, kind="stopped", step=plan.step, code=75)
    if plan.age < plan.delay:
        return Decision("wait", f"{plan.delay:.0f} s after a fault without progress")
    return _choose(live, strangers, now, plan, history, options)


def _choose(
    live: Sequence[Node],
    strangers: Sequence[Node],
    now: float,
    plan: RestartPlan,
    history: Plans,
    options: SupervisorOptions,
) -> Decision:
    """Chooses the nodes of a generation among those that are ready; waits for more as long as that is promising."""
    # Quarantined nodes stand back, as long as the others are enough.
    ill = quarantined(plan, now)
    well = [n for n in live if n.name not in ill]
    chosen = well if len(well) >= options.least and options.used(len(well)) else live
    use = options.used(len(chosen))
    expired = plan.age >= options.join_timeout
    if len(chosen) < options.least or use is None:
        needed = "; ".join(
            [f"{max(options.least, 1)} are needed", *(n.differs for n in strangers[:1])]
        )
        if not expired:
            return Decision("wait", f"there are {len(live)} nodes, {needed}")
        reason = f"there are {len(live)} nodes after {options.join_timeout:.0f} s, {needed}; run again to go on"
        return Decision("over", reason, kind="few", code=75)
    if options.holder:
        if not expired:
            return Decision("wait", f"for {options.holder}, which has the run's lock")
        reason = f"{options.holder} has the run's lock still after {options.join_timeout:.0f} s; run again to go on"
        return Decision("over", reason, kind="lock", code=75)
    if plan.kind == "start" and len(live) < options.wanted and not expired:
        return Decision("wait", f"there are {len(live)} of {options.wanted} nodes")
    return Decision(
        "run", plan.reason, members=tuple(_ranked(chosen, use, plan, history))
    )


def _ranked(
    nodes: Sequence[Node], use: int, plan: RestartPlan, history: Plans
) -> list[str]:
    """Returns the names of those who take part, in the order of their ranks: members of the generation before first, so
    that little changes.

    After numbers that are not finite the order is turned by one, and spares go first: every shard is computed
    elsewhere.
    """
    before = next((p.members for p in reversed([*history, plan]) if p.members), [])
    names = {n.name for n in nodes}
    old = [name for name in before if name in names]
    new = sorted(names - set(before))
    if plan.kind != "numbers":
        return sorted((old + new)[:use])
    return (new + old)[:use] if new else old[1:use] + old[:1]


# --- a generation runs


def _all_ended_well(
    members: Members,
    nodes: Sequence[Node],
    plan: RestartPlan,
    options: SupervisorOptions,
) -> Decision | None:
    """Returns the end of the run, or a generation without those who leave; None unless all processes ended well."""
    ends = [
        n.end
        for n in members
        if n is not None and n.generation == plan.generation and n.end is not None
    ]
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
    reason = f"stopped on request after step {step}, run again to go on"
    return Decision("over", reason, kind="stopped", step=step, code=75)


def _cause(
    faults: Sequence[Fault],
    members: Members,
    plan: RestartPlan,
    options: SupervisorOptions,
) -> Fault | None:
    """Returns what explains the other faults; None as long as there is no fault, or only effects whose cause may still
    show.
    """
    if not faults:
        return None
    first = min(faults, key=lambda f: f.order)
    there = [n for n in members if n is not None]
    ends = [
        n.ended_for
        for n in there
        if n.generation == plan.generation and n.end is not None
    ]
    if (
        ends
        and len(ends) < len(there)
        and first.order not in (ORDER["lost"], ORDER["frozen"])
    ):
        # Others may be about to report what came first, or likewise; a silent node is told from a slow one by its
        # timeout alone.
        effect = first.order == ORDER["peer"]
        silent = any(n.age > 3 * options.heartbeat for n in there if n.end is None)
        if min(ends) < (3.5 * options.heartbeat if effect else TOGETHER) or (
            effect and silent
        ):
            return None
    same = [f for f in faults if f.kind == first.kind]
    if len(same) == 1 or not first.blamed:
        return first
    others = f"; likewise {_names([name for f in same[1:] for name in f.blamed])}"
    blamed = tuple(dict.fromkeys(name for f in same for name in f.blamed))
    return replace(first, sentence=first.sentence + others, blamed=blamed)


def _after(
    fault: Fault,
    now: float,
    members: Members,
    plan: RestartPlan,
    history: Plans,
    options: SupervisorOptions,
) -> Decision:
    formed = [p for p in [*history, plan] if p.state == "forming"]
    past = [p for p in formed if p.kind not in FREE]
    starts = [
        n.rank.start
        for n in members
        if n is not None and n.rank and n.rank.start is not None
    ]
    step = _reached(fault, members, past if not starts else ())
    if fault.kind == "lock":
        return _await_lock(fault.sentence, step, formed, options)
    if fault.kind in FREE:
        return Decision("form", fault.sentence, kind=fault.kind, step=step)
    if reason := _given_up(
        fault, step, step > max(starts, default=0), past, now, options
    ):
        kind, code = ("refused", 2) if fault.kind == "config" else ("given up", 3)
        return Decision("over", reason, fault.blamed, kind, step, code)
    loops = sum(1 for _ in takewhile(lambda p: (p.step or 0) >= step, reversed(past)))
    delay = min(LONGEST_DELAY, 2.0**loops) if loops else 0.0
    until = quarantined(plan, now) | _new_quarantines(fault, past, now)
    return Decision(
        "form",
        fault.sentence,
        fault.blamed,
        fault.kind,
        step,
        delay=delay,
        quarantined=until,
    )


def _await_lock(
    sentence: str, step: int, formed: Plans, options: SupervisorOptions
) -> Decision:
    """Only a try shows who has it, and it is not waited for without end."""
    tries = takewhile(
        lambda p: p.kind == "lock" and (p.step or 0) >= step, reversed(formed)
    )
    if sum(1 for _ in tries) * LOCKED > options.join_timeout:
        return Decision(
            "over", f"{sentence}; run again to go on", kind="lock", step=step, code=75
        )
    return Decision("form", sentence, kind="lock", step=step, delay=LOCKED)


def _reached(fault: Fault, members: Members, past: Plans) -> int:
    """Returns how many steps the run had taken at a fault.

    `past`: generations before, if this one ended before it knew which step to go on from: the run is where it was.
    """
    if past:
        return past[-1].step or 0
    if fault.blamed and fault.step is not None:
        # The node to blame comes to the same step each time; how far the others come differs by one.
        return fault.step
    return max([last_step(n) or 0 for n in members if n is not None], default=0)


def _new_quarantines(fault: Fault, past: Plans, now: float) -> dict[str, float]:
    """Returns until when the nodes to blame are quarantined: at their second fault of a day, longer at each more."""
    until = {}
    for name in fault.blamed if fault.kind in STRIKES else ():
        strikes = sum(
            name in p.blamed and p.kind in STRIKES and now - p.wall < DAY for p in past
        )
        if strikes or fault.kind == "sick":
            until[name] = now + QUARANTINE * 2 ** max(0, strikes - 1)
    return until


def _given_up(
    fault: Fault,
    step: int,
    began: bool,
    past: Plans,
    now: float,
    options: SupervisorOptions,
) -> str | None:
    """Returns why another generation would not help, in a sentence; None if it may."""
    if fault.kind == "config":
        return fault.sentence
    before = past[-1] if past else None
    if (
        fault.kind == "numbers"
        and before is not None
        and before.kind == "numbers"
        and before.step == step
    ):
        return (
            f"{fault.sentence}. It is the same once more, with every rank on another node: the data or the "
            "optimizer, not a device"
        )
    if fault.kind in ("error", "memory") and not past and not began:
        return (
            f"{fault.sentence}. It came before the first step, so it is not tried again"
        )
    same = [p for p in past[-(SAME_STEP - 1) :] if p.step == step and p.kind != "lost"]
    if len(same) == SAME_STEP - 1 and fault.kind not in ("lost", "port"):
        return f"{fault.sentence}. It is fault number {SAME_STEP} in a row at step {step}: a loop"
    if sum(now - p.wall < DAY for p in past) >= options.restarts:
        return f"{fault.sentence}. The {options.restarts} restarts of survive.restarts are spent"
    return None


def _growth(
    now: float, nodes: Sequence[Node], plan: RestartPlan, options: SupervisorOptions
) -> Decision | None:
    """Takes in nodes that returned, once they have been there for a while, if the mesh would use more than it does."""
    free = [
        n.name
        for n in nodes
        if n.name not in plan.members
        and n.state == "idle"
        and not n.leaving
        and not n.differs
        and n.age < options.node_timeout
        and n.known >= STEADY
        and n.name not in quarantined(plan, now)
    ]
    if not free or plan.age < STEADY:
        return None
    more = options.used(len(plan.members) + len(free))
    today = len(plan.members)
    if more is None or more <= today:
        return None
    return Decision(
        "stop",
        f"{_names(free)} can take part: {more} nodes instead of {today}",
        kind="grow",
    )


def quarantined(plan: RestartPlan, now: float) -> dict[str, float]:
    """Returns the nodes still left out, and until when on the caller's clock `now`.

    The plan has times of its leader's clock, which may be wrong.
    """
    ahead = plan.wall + plan.age - now
    return {
        name: until - ahead
        for name, until in plan.quarantined.items()
        if until - ahead > now
    }


def _names(names: Sequence[str]) -> str:
    shown = list(names[:8]) + ([f"{len(names) - 8} more"] if len(names) > 8 else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
