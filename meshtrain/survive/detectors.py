"""Fault detectors: who failed and how, and which fault explains the others. All detectors of a supervised run:

    kind of fault                         seen in                                          by
    lost, preempted, signal, error, ...   records that stop, ends of training processes    `ended`
    frozen, uninterruptible, gil, stuck,  step, phase, state of every rank's process       `hung`
    collective
    slow (reported, ends nothing)         seconds that a rank waits for others; a product  `stragglers.Stragglers`
    sick                                  copies that differ; a product that is known      `health.Health` of a process
    numbers                               a loss or gradient that is not finite            loop, then `leader.cleared`
    lock                                  a lease that its supervisor no longer renews     `SupervisedHeartbeat`

A rank hangs if it stays in its phase for longer than that may take; a frozen one is silent as a lost node is:

    state T                          frozen: somebody sent SIGSTOP; it will do nothing, in whatever phase
    state D                          in the kernel, where no signal reaches it: a disk or a driver
    its thread is silent, state R/S  the interpreter's lock is held by native code
    fewest steps, earliest phase     stuck there; `data`: the loader
    all in one phase of one step     a collective or the network: nobody is to blame
"""

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGTERM

from meshtrain.survive.records import (
    Node,
    ProcessEnd,
    Rank,
    RestartPlan,
    SupervisorOptions,
)

# of a plan, by rank; None for one whose supervisor is gone, or another one by now
Members = Sequence[Node | None]

# The cause is the first in this order; what stands later follows from what stands earlier, never the other way round: a
# killed process makes its peers fail.
HANGS = ("frozen", "uninterruptible", "gil", "stuck", "collective")
ORDER = (
    {"lost": 0, "signal": 1}
    | dict.fromkeys(HANGS, 2)
    | {"sick": 3, "numbers": 4, "config": 4}
)
ORDER |= {
    "memory": 5,
    "error": 5,
    "port": 5,
    "lock": 5,
    "preempted": 6,
    "grow": 6,
    "peer": 7,
}
# Kinds of new generations that are no fault. `lock`: the fault that left the run's lock to a process was reported
# already.
FREE = ("start", "grow", "preempted", "lock")
# Faults of a node's own: at the second one it is quarantined; if it is `sick`, at the first.
STRIKES = (
    "lost",
    "signal",
    "frozen",
    "uninterruptible",
    "gil",
    "stuck",
    "error",
    "memory",
    "sick",
)

# Seconds in a phase that are a hang; the phases of a step follow survive.step_timeout.
TIMEOUTS = {
    "start": 600.0, "join": 400.0, "open": 3600.0, "init": 600.0, "restore": 600.0, "compile": 3600.0,
    "eval": 600.0, "save": 600.0, "trace": 600.0, "end": 600.0,
}  # fmt: skip
FIRST_STEP = 600.0  # it may compile still
# of a step: seconds, and of the median
LEAST = 60.0
TIMES = 10.0
# Seconds without a sign of life of a rank's thread, which gives one every half
SILENT = 5.0
# In the order in which a rank goes through them, a step being taken from the end of `wait` on: the pair (steps taken,
# phase) only grows.
PHASES = (
    "start", "open", "join", "init", "restore", "log", "eval", "save",
    "data", "compile", "dispatch", "trace", "wait", "end",
)  # fmt: skip
DOES = {
    "frozen": "is frozen (SIGSTOP)",
    "uninterruptible": "is in the kernel, where no signal reaches it,",
    "stuck": "is stuck",
    "gil": "holds the interpreter's lock in native code",
    "data": "waits for its data loader",
    "wait": "waits for its devices",
}


@dataclass(frozen=True)
class Fault:
    """Describes a fault in a sentence, and names the nodes to blame."""

    kind: str
    sentence: str
    blamed: tuple[str, ...]
    step: int | None = None  # steps taken by then

    @property
    def order(self) -> int:
        return ORDER.get(self.kind, ORDER["error"])


# --- nodes that are gone, processes that ended


def ended(
    members: Members, plan: RestartPlan, options: SupervisorOptions
) -> list[Fault]:
    """Returns faults of members that are gone, and of those whose process ended otherwise than it should."""
    faults = []
    for rank, (name, node) in enumerate(zip(plan.members, members, strict=True)):
        if node is None:
            faults.append(
                Fault(
                    "lost",
                    f"node {name} is gone: another supervisor has its place",
                    (name,),
                )
            )
            continue
        if node.generation == plan.generation and node.end is not None:
            if fault := _end_fault(rank, node, node.end, plan):
                faults.append(fault)
        elif node.age >= options.node_timeout:
            sentence = (
                f"node {name} ({node.host}) gave no sign of life for {node.age:.1f} s"
            )
            if node.rank:
                sentence += f"; rank {node.rank.number} was in {node.rank.phase} after step {node.rank.step}"
            faults.append(Fault("lost", sentence, (name,), last_step(node)))
        elif node.generation < plan.generation and plan.age > max(
            60.0, options.node_timeout
        ):
            faults.append(
                Fault(
                    "lost",
                    f"node {name} ({node.host}) did not start its process",
                    (name,),
                )
            )
    return faults


def _end_fault(
    rank: int, node: Node, end: ProcessEnd, plan: RestartPlan
) -> Fault | None:
    """Returns the fault of a training process that ended; None if it ended as it should."""
    # The others wait for a process that was asked to go before it had joined them; later all stop after the same step.
    joined = node.rank is None or node.rank.start is not None
    is_stopping = plan.state == "stopping"
    # One that is asked before it listens ends by the signal, and one that is asked again is ended.
    is_unheard = end.exit == -SIGTERM or end.kind == "ended_by_us"
    if (end.exit == 75 and not joined) or (
        is_unheard and (is_stopping or node.leaving)
    ):
        if is_stopping:
            return Fault(plan.kind, plan.reason, (), end.step)
        sentence = f"{plan.members[rank]} was asked to go, and its process ended before it could save"
        return Fault("preempted", sentence, (), end.step)
    if end.exit in (0, 75):
        return None
    known = tuple(plan.members[r] for r in end.ranks if 0 <= r < len(plan.members))
    is_effect = end.kind in ("peer", "numbers", "lock", "port", "config")
    blamed = () if is_effect else known if end.ranks else (plan.members[rank],)
    sentence = f"rank {rank} on {node.name} ({node.host}) {end.sentence.rstrip('.')}"
    return Fault(end.kind, sentence, blamed, end.step)


def last_step(node: Node) -> int | None:
    return node.end.step if node.end else node.rank.step if node.rank else None


# --- processes that hang


def patience(pace: float) -> float:
    """Returns seconds without a step that are a stall, where a step takes `pace` seconds: 10 steps, and at least a
    minute.
    """
    return max(LEAST, TIMES * pace)


def timeout(rank: Rank, options: SupervisorOptions) -> float:
    """Returns seconds that a rank may stay in its phase."""
    if rank.phase in ("restore", "save"):
        return TIMEOUTS[rank.phase] + options.moving
    if rank.phase in TIMEOUTS:
        return TIMEOUTS[rank.phase]
    if rank.step == (rank.start or 0) or rank.pace is None:
        return max(FIRST_STEP, options.step_timeout)
    return options.step_timeout or patience(rank.pace)


def hung(
    members: Members, plan: RestartPlan, options: SupervisorOptions
) -> list[Fault]:
    """Returns faults of those who keep the others waiting beyond the time of their phase."""
    started = [
        (n, n.rank)
        for n in members
        if n is not None and n.rank and n.generation == plan.generation
    ]
    running = [(n, rank) for n, rank in started if n.end is None]
    frozen = [(n, rank) for n, rank in running if rank.proc in ("T", "t")]
    # In a debugger (t) it may be for as long as its phase may take.
    stopped = [(n, rank) for n, rank in frozen if rank.proc == "T"]
    if silent := [
        (n, rank)
        for n, rank in stopped
        if _silence(n, rank, options) > options.node_timeout
    ]:
        return [_fault("frozen", n, rank, options) for n, rank in silent]
    # While a member is not there yet, there is another fault, or none. One that ended well may have left one behind
    # that does not end.
    if len(started) < len(members) or not running:
        return []
    return _stuck(running, frozen, options)


def _stuck(
    running: Sequence[tuple[Node, Rank]],
    frozen: Sequence[tuple[Node, Rank]],
    options: SupervisorOptions,
) -> list[Fault]:
    """Returns faults of the ranks that are behind all others, once one of them is beyond the time of its phase."""
    place = {
        n.name: (rank.step, PHASES.index(rank.phase) if rank.phase in PHASES else 0)
        for n, rank in running
    }
    last = min(place.values())
    low = [(n, rank) for n, rank in running if place[n.name] == last]
    late = [
        (n, rank)
        for n, rank in low
        if _seconds(n, rank, options) > timeout(rank, options)
    ]
    if not late:
        return []
    in_kernel = [(n, rank) for n, rank in late if rank.proc == "D"]
    holders = [(n, rank) for n, rank in late if rank.alive_age > SILENT]
    for kind, chosen in (
        ("frozen", frozen),
        ("uninterruptible", in_kernel),
        ("gil", holders),
    ):
        if chosen:
            return [_fault(kind, n, rank, options) for n, rank in chosen]
    if len(low) == len(running) > 1:
        n, rank = running[0]
        sentence = (
            f"all ranks have been in the phase {rank.phase} of step {_step_at_work(rank)} for "
            f"{_seconds(n, rank, options):.1f} s: "
            f"a collective or the network, so nobody is blamed{_collectives(rank)}"
        )
        return [Fault("collective", sentence, (), rank.step)]
    return [_fault("stuck", n, rank, options) for n, rank in late]


def _fault(kind: str, node: Node, rank: Rank, options: SupervisorOptions) -> Fault:
    does = (
        DOES[rank.phase]
        if kind == "stuck" and rank.phase in DOES
        else f"{DOES[kind]} (phase {rank.phase})"
    )
    seconds = (_silence if kind == "frozen" else _seconds)(node, rank, options)
    sentence = (
        f"rank {rank.number} on {node.name} ({node.host}) {does} in step {_step_at_work(rank)} for {seconds:.1f} s"
        + (f" at {rank.stack}" if rank.stack else "")
        + f"; the others wait for it{_collectives(rank)}"
    )
    return Fault(kind, sentence, (node.name,), rank.step)


def _seconds(node: Node, rank: Rank, options: SupervisorOptions) -> float:
    """Returns for how long a rank is in its phase; its supervisor's silence beyond a heartbeat is the supervisor's, not
    the rank's.
    """
    return rank.phase_age + min(node.age, options.heartbeat)


def _silence(node: Node, rank: Rank, options: SupervisorOptions) -> float:
    """Returns seconds since the last sign of life of a rank's thread, or since its process began if it never gave
    one.
    """
    return (rank.alive_age or rank.phase_age) + min(node.age, options.heartbeat)


def _step_at_work(rank: Rank) -> int:
    return rank.step if rank.phase in ("log", "eval", "save", "end") else rank.step + 1


def _collectives(rank: Rank) -> str:
    is_in_step = rank.phase in ("dispatch", "wait")
    if rank.collectives and is_in_step:
        return f". The step's collectives: {rank.collectives}"
    return ""
