"""Who keeps the others waiting, and how: told from the step and the phase of every rank, the state of its process, and its thread's signs of life.

    state T                          frozen: somebody sent SIGSTOP
    state D                          in the kernel, where no signal reaches it: a disk or a driver
    its thread is silent, state R/S  the interpreter's lock is held by native code
    fewest steps, earliest phase     stuck there; `data`: the loader
    all in one phase of one step     a collective or the network: nobody is to blame

How long is too long depends on the phase.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.survive.causes import Fault
from meshtrain.survive.records import Node, Plan, Rank

if TYPE_CHECKING:
    from meshtrain.survive.decide import Options

# Seconds in a phase that are a hang; the phases of a step follow survive.step_timeout.
TIMEOUTS = {
    "start": 600.0, "join": 400.0, "open": 3600.0, "init": 600.0, "restore": 600.0, "compile": 3600.0,
    "eval": 600.0, "save": 600.0, "trace": 600.0, "end": 600.0,
}  # fmt: skip
FIRST_STEP = 600.0  # it may compile still
LEAST, TIMES = 60.0, 10.0  # of a step: seconds, and of the median
SILENT = 5.0  # seconds without a sign of life of a rank's thread, which gives one every half
# In the order in which a rank goes through them, a step being taken from the end of `wait` on: the pair (steps taken, phase) only grows.
PHASES = (
    "start",
    "open",
    "join",
    "init",
    "restore",
    "log",
    "eval",
    "save",
    "data",
    "compile",
    "dispatch",
    "trace",
    "wait",
    "end",
)
DOES = {
    "frozen": "is frozen (SIGSTOP)",
    "uninterruptible": "is in the kernel, where no signal reaches it,",
    "stuck": "is stuck",
    "gil": "holds the interpreter's lock in native code",
    "data": "waits for its data loader",
    "wait": "waits for its devices",
}


def timeout(rank: Rank, options: "Options") -> float:
    """Seconds that a rank may stay in its phase."""
    if rank.phase in ("restore", "save"):
        return TIMEOUTS[rank.phase] + options.moving
    if rank.phase in TIMEOUTS:
        return TIMEOUTS[rank.phase]
    if rank.step == (rank.start or 0) or rank.pace is None:
        return max(FIRST_STEP, options.step_timeout)
    return options.step_timeout or max(LEAST, TIMES * rank.pace)


def hung(members: Sequence[Node | None], plan: Plan, options: "Options") -> list[Fault]:
    """Those who keep the others waiting beyond the time of their phase."""
    there = [n for n in members if n is not None and n.rank and n.generation == plan.generation]
    nodes = [n for n in there if n.end is None]
    # While a member is not there yet, there is another fault, or none. Who ended well may have left one behind that does not end.
    if len(there) < len(members) or not nodes:
        return []
    place = {
        n.name: (n.rank.step, PHASES.index(n.rank.phase) if n.rank.phase in PHASES else 0) for n in nodes if n.rank
    }
    last = min(place.values())
    low = [n for n in nodes if n.rank and place[n.name] == last]
    late = [n for n in low if n.rank and _seconds(n, options) > timeout(n.rank, options)]
    if not late:
        return []
    for kind, chosen in (
        ("frozen", [n for n in nodes if n.rank and n.rank.proc in ("T", "t")]),
        ("uninterruptible", [n for n in late if n.rank and n.rank.proc == "D"]),
        ("gil", [n for n in late if n.rank and n.rank.alive_age > SILENT]),
    ):
        if chosen:
            return [_fault(kind, n, options) for n in chosen]
    if len(low) == len(nodes) > 1:
        return [_collective(nodes[0], options)]
    return [_fault("stuck", n, options) for n in late]


def _fault(kind: str, node: Node, options: "Options") -> Fault:
    rank = node.rank
    assert rank is not None
    does = DOES[rank.phase] if kind == "stuck" and rank.phase in DOES else f"{DOES[kind]} (phase {rank.phase})"
    sentence = (
        f"rank {rank.number} on {node.name} ({node.host}) {does} in step {_at_work_on(rank)} for {_seconds(node, options):.1f} s"
        + (f" at {rank.stack}" if rank.stack else "")
        + "; the others wait for it"
    )
    return Fault(kind, sentence + _sends(rank), (node.name,), rank.step)


def _collective(node: Node, options: "Options") -> Fault:
    rank = node.rank
    assert rank is not None
    sentence = (
        f"all ranks have been in the phase {rank.phase} of step {_at_work_on(rank)} for {_seconds(node, options):.1f} s: "
        f"a collective or the network, so nobody is blamed{_sends(rank)}"
    )
    return Fault("collective", sentence, (), rank.step)


def _seconds(node: Node, options: "Options") -> float:
    """That a rank is in its phase; its supervisor's silence beyond a beat is the supervisor's, not the rank's."""
    assert node.rank is not None
    return node.rank.phase_age + min(node.age, options.beat)


def _at_work_on(rank: Rank) -> int:
    """The step that a rank takes, or after `wait` the one that it has taken."""
    return rank.step if rank.phase in ("log", "eval", "save", "end") else rank.step + 1


def _sends(rank: Rank) -> str:
    return (
        f". The step's collectives: {rank.collectives}"
        if rank.collectives and rank.phase in ("dispatch", "wait")
        else ""
    )


def where(node: Node) -> str:
    """Where a node's rank was when it was heard last."""
    return f"; rank {node.rank.number} was in {node.rank.phase} after step {node.rank.step}" if node.rank else ""
