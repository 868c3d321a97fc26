"""The kinds of faults, and which of them explain the others.

The cause is the first in this order; what stands later follows from what stands earlier, never the other way round: a killed process
makes its peers fail.

    a node is silent < a signal < frozen, stuck < sick < its own error < asked to go < an error that names a peer
"""

from dataclasses import dataclass

HANGS = ("frozen", "uninterruptible", "gil", "stuck", "collective")
ORDER = {"lost": 0, "signal": 1} | dict.fromkeys(HANGS, 2) | {"sick": 3, "numbers": 4, "config": 4}
ORDER |= {"memory": 5, "error": 5, "port": 5, "lock": 5, "preempted": 6, "peer": 7}

# Kinds of new generations that are no fault.
FREE = ("start", "grow", "preempted")
# Faults of a node's own: at the second one it is quarantined; if it is `sick`, at the first.
STRIKES = ("lost", "signal", "frozen", "uninterruptible", "gil", "stuck", "error", "memory", "sick")


@dataclass(frozen=True)
class Fault:
    """What happened, in words, and the nodes to blame."""

    kind: str
    sentence: str
    blamed: tuple[str, ...]
    step: int | None = None  # steps taken by then

    @property
    def order(self) -> int:
        return ORDER.get(self.kind, ORDER["error"])
